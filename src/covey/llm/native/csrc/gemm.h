// Matrix products of prepacked tiles, accumulated in fp32: by AMX if the processor has it, else in vectors.
//
// A tile is 16 rows of 64 bytes, 16 floats or 32 bf16. 16 rows of a matrix are a strip, whose tiles follow one another.
// In a left factor a row's numbers are summed over. The right factor of a product lies turned: a strip is 16 of its
// columns, and row p of a tile holds, of each, number p, or in bf16 the numbers 2 p and 2 p + 1.

#pragma once

#include <cstring>
#include <type_traits>

#include "amx.h"
#include "simd.h"

namespace {

template <typename Value>
constexpr int ROW = 64 / sizeof(Value);  // numbers in a row of a tile

// Where a number of a matrix lies whose strips have `steps` tiles. The rest of a tile's row follows it.
template <typename Value>
inline size_t tile_offset(int row, int column, int steps) {
    size_t tile = size_t(row) / TILE * steps + column / ROW<Value>;
    return (tile * TILE + row % TILE) * ROW<Value> + column % ROW<Value>;
}

// Turns tiles, rows of words into columns: a left factor X becomes the right factor X' and the other way round.
template <typename Value>
inline void turn(Value* tiles, size_t numbers) {
    for (size_t tile = 0; tile < numbers; tile += TILE * ROW<Value>) {
        Words rows[TILE];
        std::memcpy(rows, tiles + tile, sizeof rows);
        transpose(rows);
        std::memcpy(tiles + tile, rows, sizeof rows);
    }
}

// One column's neighbours, numbers 2 p and 2 p + 1, side by side.
inline void store_pair(Floats even, Floats odd, bf16* to) {
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
inline void store_pair(Floats even, Floats odd, float* to) {
    store(even, to);
    store(odd, to + LANES);
}

// Of a right factor of so many `steps`, the rows that hold numbers `row` and `row + 1` of the 16 columns from `column`.
template <typename Value>
inline size_t pair_inside(int row, int column, int steps) {
    size_t tile = size_t(column) / TILE * steps + row / ROW<Value>;
    return (tile * TILE * ROW<Value>) + row % ROW<Value> * TILE;
}

// A matrix X of tiles as the right factor X, whose rows are summed over. Both sizes are multiples of SIDE.
template <typename Value>
inline void pair_up(const Value* from, int rows, int columns, Value* to) {
    int across = columns / ROW<Value>, steps = rows / ROW<Value>;
    for (int column = 0; column < columns; column += TILE) {
        for (int row = 0; row < rows; row += 2) {
            const Value* even = from + tile_offset<Value>(row, column, across);
            store_pair(load(even), load(even + ROW<Value>), to + pair_inside<Value>(row, column, steps));
        }
    }
}

#ifdef HAVE_TILES
inline void multiply_by_tiles(const bf16* left, int below, const bf16* right, int beside, int steps, bool begun,
    float* sums) {
    constexpr int BYTES = 64, SIZE = TILE * ROW<bf16>;
    const bf16 *lower = left + size_t(below) * SIZE, *next = right + size_t(beside) * SIZE;
    compiler_barrier(sums);
    if (begun) {
        _tile_loadd(0, sums, BYTES);
        _tile_loadd(1, sums + 256, BYTES);
        _tile_loadd(2, sums + 512, BYTES);
        _tile_loadd(3, sums + 768, BYTES);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < steps; step++) {
        _tile_loadd(4, left + step * SIZE, BYTES);
        _tile_loadd(6, right + step * SIZE, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, next + step * SIZE, BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + step * SIZE, BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, BYTES);
    _tile_stored(1, sums + 256, BYTES);
    _tile_stored(2, sums + 512, BYTES);
    _tile_stored(3, sums + 768, BYTES);
}
#endif

// As many floats as the processor adds at once, and as many rows of sums of 16 columns as its registers hold.
#ifdef __AVX512F__
typedef Floats Sums;
typedef Words SumWords;
constexpr int AT_ONCE = 16;
#else
typedef float Sums __attribute__((vector_size(32)));
typedef uint32_t SumWords __attribute__((vector_size(32)));
constexpr int AT_ONCE = 4;
#endif
constexpr int SOME = sizeof(Sums) / sizeof(float), PARTS = TILE / SOME;

template <typename Vector>
inline Vector fetch(const void* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// Numbers of some columns, which meet a word of each row of a left factor.
struct Numbers {
    Sums numbers;
    explicit Numbers(const float* from) : numbers(fetch<Sums>(from)) {}
    Sums added_to(Sums sum, const float* left) const { return sum + *left * numbers; }
};
#ifdef __AVX512BF16__
struct Pairs {
    __m512i pairs;
    explicit Pairs(const bf16* from) : pairs(fetch<__m512i>(from)) {}
    Sums added_to(Sums sum, const bf16* left) const {
        __m512i both = _mm512_set1_epi32(fetch<int>(left));
        return Sums(_mm512_dpbf16_ps(__m512(sum), __m512bh(both), __m512bh(pairs)));
    }
};
#else
struct Pairs {
    Sums even, odd;
    explicit Pairs(const bf16* from) {
        SumWords words = fetch<SumWords>(from), low = words << 16, high = words & 0xffff0000u;
        std::memcpy(&even, &low, sizeof even);
        std::memcpy(&odd, &high, sizeof odd);
    }
    Sums added_to(Sums sum, const bf16* left) const { return sum + to_float(left[0]) * even + to_float(left[1]) * odd; }
};
#endif

// One tile of sums.
template <typename Value>
inline void multiply_by_vectors(const Value* left, const Value* right, int steps, bool begun, float* sums) {
    constexpr int WORD = ROW<Value> / TILE;
    using Columns = std::conditional_t<std::is_same<Value, bf16>::value, Pairs, Numbers>;
    for (int first = 0; first < TILE; first += AT_ONCE) {
        Sums sum[AT_ONCE][PARTS];
        auto each = [&](auto visit) {
#pragma GCC unroll 16
            for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
                for (int j = 0; j < PARTS; j++) visit(sum[i][j], i, j);
        };
        each([&](Sums& x, int i, int j) { x = begun ? fetch<Sums>(sums + (first + i) * TILE + j * SOME) : Sums{}; });
        for (int step = 0; step < steps; step++) {
            const Value* rows = left + (size_t(step) * TILE + first) * ROW<Value>;
            const Value* columns = right + size_t(step) * TILE * ROW<Value>;
            for (int p = 0; p < TILE; p++, rows += WORD, columns += ROW<Value>) {
                const Columns some[] = {Columns(columns), Columns(columns + (PARTS - 1) * SOME * WORD)};
                each([&](Sums& x, int i, int j) { x = some[j].added_to(x, rows + i * ROW<Value>); });
            }
        }
        each([&](Sums& x, int i, int j) { std::memcpy(sums + (first + i) * TILE + j * SOME, &x, sizeof x); });
    }
}

// sums[2, 2, 16, 16] = two strips of the left factor times two of the right one; where they have `begun`, added to what
// is there. `below` and `beside` are tiles from one strip to the next. A thread that calls it has `Tiles`.
template <typename Value>
inline void multiply_factors(const Value* left, int below, const Value* right, int beside, int steps, bool begun,
    float* sums) {
#ifdef HAVE_TILES
    if constexpr (std::is_same<Value, bf16>::value) {
        if (may_use_tiles()) return multiply_by_tiles(left, below, right, beside, steps, begun, sums);
    }
#endif
    constexpr int SIZE = TILE * ROW<Value>;
    for (int i = 0; i < 4; i++)
        multiply_by_vectors(
            left + size_t(i / 2) * below * SIZE, right + size_t(i % 2) * beside * SIZE, steps, begun, sums + i * 256);
}

// Where number (row, column) of such squares lies, `across` of them side by side; 16 of a row lie together.
inline size_t block_offset(int row, int column, int across) {
    size_t square = size_t(row) / SIDE * across + column / SIDE;
    return ((square * 2 + row % SIDE / TILE) * 2 + column % SIDE / TILE) * TILE * TILE + row % TILE * TILE + column % TILE;
}

}  // namespace
