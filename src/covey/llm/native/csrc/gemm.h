// GEMM micro-kernels on packed operands, C (+)= A B, accumulated in fp32: AMX if there is any, else vectors.
//
// Operands are packed into tiles of 16 rows of 64 bytes: TILE_K = 16 floats or 32 bf16. A strip is 16 rows of a matrix,
// whose tiles along k are contiguous.
// - A operand: rows are rows of A, contiguous along k.
// - B operand: a strip is 16 columns of B. Row p of a tile holds, for each column, number p along k; in bf16 the pair
//   of numbers 2 p and 2 p + 1 (VNNI layout). Transposing every tile as words (`transpose_tiles`) turns the A operand X
//   into the B operand X'; `pack_b_from_a` makes the B operand X of it.
// - C: blocks of 2 x 2 tiles of 16 x 16 floats (`block_offset`).
//
// Entry point: `gemm_block`. Callers hold a `TileConfig`.

#pragma once

#include <cstring>
#include <type_traits>

#include "amx.h"
#include "simd.h"

namespace {

template <typename Scalar>
constexpr int TILE_K = 64 / sizeof(Scalar);  // numbers in a row of a tile

// Offset of (row, column) in an A operand whose strips have `k_tiles` tiles. The rest of the tile's row follows it.
template <typename Scalar>
inline size_t tile_offset(int row, int column, int k_tiles) {
    size_t tile = size_t(row) / TILE * k_tiles + column / TILE_K<Scalar>;
    return (tile * TILE + row % TILE) * TILE_K<Scalar> + column % TILE_K<Scalar>;
}

// Transpose each tile of 16 x 16 words in place: from an A operand to the B operand of the transposed matrix, or back.
template <typename Scalar>
inline void transpose_tiles(Scalar* tiles, size_t numbers) {
    for (size_t tile = 0; tile < numbers; tile += TILE * TILE_K<Scalar>) {
        u32x16 rows[TILE];
        std::memcpy(rows, tiles + tile, sizeof rows);
        transpose(rows);
        std::memcpy(tiles + tile, rows, sizeof rows);
    }
}

// Store numbers k and k + 1 (k even) of 16 columns of a B operand: interleaved in bf16, as two rows in fp32.
inline void store_pair(f32x16 even, f32x16 odd, bf16* to) {
#ifdef __AVX512BF16__
    __m512i low = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(__m512(even))));
    __m512i high = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(__m512(odd))));
    __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    std::memcpy(to, &pairs, sizeof pairs);
#else
    bf16 lows[LANES], highs[LANES];
    store(even, lows);
    store(odd, highs);
    for (int i = 0; i < LANES; i++) to[2 * i] = lows[i], to[2 * i + 1] = highs[i];
#endif
}
inline void store_pair(f32x16 even, f32x16 odd, float* to) {
    store(even, to);
    store(odd, to + LANES);
}

// Offset in a B operand of the pair (k, k + 1) of the 16 columns from `column` on, for `store_pair`.
template <typename Scalar>
inline size_t pair_offset(int k, int column, int k_tiles) {
    size_t tile = size_t(column) / TILE * k_tiles + k / TILE_K<Scalar>;
    return (tile * TILE * TILE_K<Scalar>) + k % TILE_K<Scalar> * TILE;
}

// Repack the A operand X [rows, columns] as the B operand X, with k along its rows. Both sizes are multiples of BLOCK.
template <typename Scalar>
inline void pack_b_from_a(const Scalar* from, int rows, int columns, Scalar* to) {
    int column_tiles = columns / TILE_K<Scalar>, k_tiles = rows / TILE_K<Scalar>;
    for (int column = 0; column < columns; column += TILE) {
        for (int row = 0; row < rows; row += 2) {
            const Scalar* even = from + tile_offset<Scalar>(row, column, column_tiles);
            store_pair(load(even), load(even + TILE_K<Scalar>), to + pair_offset<Scalar>(row, column, k_tiles));
        }
    }
}

#ifdef HAVE_AMX
// `gemm_block` on AMX: tiles 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
inline void gemm_block_amx(const bf16* a, int a_stride, const bf16* b, int b_stride, int k_tiles, bool accumulate,
    float* c) {
    constexpr int BYTES = 64, SIZE = TILE * TILE_K<bf16>;
    const bf16 *a1 = a + size_t(a_stride) * SIZE, *b1 = b + size_t(b_stride) * SIZE;
    compiler_barrier(c);
    if (accumulate) {
        _tile_loadd(0, c, BYTES);
        _tile_loadd(1, c + 256, BYTES);
        _tile_loadd(2, c + 512, BYTES);
        _tile_loadd(3, c + 768, BYTES);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < k_tiles; k++) {
        _tile_loadd(4, a + k * SIZE, BYTES);
        _tile_loadd(6, b + k * SIZE, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1 + k * SIZE, BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + k * SIZE, BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, BYTES);
    _tile_stored(1, c + 256, BYTES);
    _tile_stored(2, c + 512, BYTES);
    _tile_stored(3, c + 768, BYTES);
}
#endif

// Accumulators of the vector micro-kernel: as wide as the processor's registers, for as many rows of 16 columns as its
// register file holds (32 registers with AVX-512, else 16).
typedef float Accumulator __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t AccumulatorWords __attribute__((vector_size(REGISTER_BYTES)));
constexpr int MICRO_ROWS = REGISTER_BYTES == 64 ? 16 : 4;
constexpr int REGISTER_COLUMNS = sizeof(Accumulator) / sizeof(float), REGISTERS_PER_ROW = TILE / REGISTER_COLUMNS;

// One k step of some columns of B: a float, or a pair of bf16, of each column. `multiply_add` adds its product with the
// float or pair of one row of A.
struct FloatColumns {
    Accumulator b;
    FloatColumns() = default;
    explicit FloatColumns(const float* from) : b(load_as<Accumulator>(from)) {}
    Accumulator multiply_add(Accumulator sum, const float* a) const { return sum + *a * b; }
};
#ifdef __AVX512BF16__
struct PairColumns {
    __m512i pairs;
    PairColumns() = default;
    explicit PairColumns(const bf16* from) : pairs(load_as<__m512i>(from)) {}
    Accumulator multiply_add(Accumulator sum, const bf16* a) const {
        __m512i pair = _mm512_set1_epi32(load_as<int>(a));
        return Accumulator(_mm512_dpbf16_ps(__m512(sum), __m512bh(pair), __m512bh(pairs)));
    }
};
#else
struct PairColumns {
    Accumulator even, odd;
    PairColumns() = default;
    explicit PairColumns(const bf16* from) {
        AccumulatorWords words = load_as<AccumulatorWords>(from), low = words << 16, high = words & 0xffff0000u;
        std::memcpy(&even, &low, sizeof even);
        std::memcpy(&odd, &high, sizeof odd);
    }
    Accumulator multiply_add(Accumulator sum, const bf16* a) const {
        return sum + to_float(a[0]) * even + to_float(a[1]) * odd;
    }
};
#endif

// One 16 x 16 tile of C on vectors, MICRO_ROWS rows at a time.
template <typename Scalar>
inline void gemm_tile_simd(const Scalar* a, const Scalar* b, int k_tiles, bool accumulate, float* c) {
    constexpr int WORD = TILE_K<Scalar> / TILE;
    using Columns = std::conditional_t<std::is_same<Scalar, bf16>::value, PairColumns, FloatColumns>;
    for (int first = 0; first < TILE; first += MICRO_ROWS) {
        Accumulator sums[MICRO_ROWS][REGISTERS_PER_ROW];
        auto each = [&](auto visit) {
#pragma GCC unroll 16
            for (int i = 0; i < MICRO_ROWS; i++)
#pragma GCC unroll 4
                for (int j = 0; j < REGISTERS_PER_ROW; j++)
                    visit(sums[i][j], i, j, c + (first + i) * TILE + j * REGISTER_COLUMNS);
        };
        each([&](Accumulator& sum, int, int, const float* from) {
            sum = accumulate ? load_as<Accumulator>(from) : Accumulator{};
        });
        for (int k = 0; k < k_tiles; k++) {
            const Scalar* rows = a + (size_t(k) * TILE + first) * TILE_K<Scalar>;
            const Scalar* columns = b + size_t(k) * TILE * TILE_K<Scalar>;
            for (int p = 0; p < TILE; p++, rows += WORD, columns += TILE_K<Scalar>) {
                Columns right[REGISTERS_PER_ROW];
#pragma GCC unroll 4
                for (int j = 0; j < REGISTERS_PER_ROW; j++) right[j] = Columns(columns + j * REGISTER_COLUMNS * WORD);
                each([&](Accumulator& sum, int i, int j, const float*) {
                    sum = right[j].multiply_add(sum, rows + i * TILE_K<Scalar>);
                });
            }
        }
        each([&](Accumulator& sum, int, int, float* to) { std::memcpy(to, &sum, sizeof sum); });
    }
}

// c[2, 2, 16, 16] = two strips of A times two strips of B, added to what `c` holds if `accumulate`. The second strip
// begins `a_stride` or `b_stride` tiles after the first.
template <typename Scalar>
inline void gemm_block(const Scalar* a, int a_stride, const Scalar* b, int b_stride, int k_tiles, bool accumulate,
    float* c) {
#ifdef HAVE_AMX
    if constexpr (std::is_same<Scalar, bf16>::value) {
        if (amx_enabled()) return gemm_block_amx(a, a_stride, b, b_stride, k_tiles, accumulate, c);
    }
#endif
    constexpr int SIZE = TILE * TILE_K<Scalar>;
    for (int i = 0; i < 4; i++)
        gemm_tile_simd(
            a + size_t(i / 2) * a_stride * SIZE, b + size_t(i % 2) * b_stride * SIZE, k_tiles, accumulate, c + i * 256);
}

// Offset of (row, column) in a matrix of C blocks, `block_columns` of them side by side. The 16 columns of a tile's row
// are contiguous.
inline size_t block_offset(int row, int column, int block_columns) {
    size_t block = size_t(row) / BLOCK * block_columns + column / BLOCK;
    size_t tile = (block * 2 + row % BLOCK / TILE) * 2 + column % BLOCK / TILE;
    return tile * TILE * TILE + row % TILE * TILE + column % TILE;
}

}  // namespace
