// Gradients of linear layers' weights, sums over tokens of d x', on processors with AMX; elsewhere torch makes them.
//
// In both matrices the tokens come first, an order that oneDNN multiplies at less than half of AMX's rate. Here what
// layers have in common, x, is packed once, and a task owns a part of the result that stays in a core's cache.
//
// Shapes: T tokens, M outputs, N inputs of the layer.

#pragma once

#include <cstdint>

#include "tiles.h"
#include "vectors.h"

namespace {

// The layers that have one input, and where the gradients of their weights go. library.py declares the same fields.
struct WeightGradients {
    const bf16* x;           // [T, N]
    const bf16* const* d;    // of each layer: [T, M]
    bf16* const* out;        // of each layer: [M, N]
    const int32_t* outputs;  // of each layer: M
    int32_t layers, tokens, inputs, threads;
};

}  // namespace

#ifdef HAVE_TILES
#include <algorithm>
#include <memory>
#include <vector>

namespace {

constexpr int DEPTH = 256;      // tokens at a time: 32 columns of each factor, 32 KB, stay in the first cache
constexpr int OUTPUTS = 384, INPUTS = 576;  // of a task at most: 0.9 MB of sums, 0.5 MB of factors

// Two tokens' 16 numbers as pairs (first, second); past the end there are zeros.
inline __m512i paired(const bf16* first, const bf16* second, __mmask16 there) {
    __m256i low = first ? _mm256_maskz_loadu_epi16(there, first) : _mm256_setzero_si256();
    __m256i high = second ? _mm256_maskz_loadu_epi16(there, second) : _mm256_setzero_si256();
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// Some columns of `tokens` rows as tiles, [columns / 16, tokens / 32] of them: rows are pairs of tokens and columns
// stand side by side; or, `turned`, the other way round.
inline void pack(const bf16* from, int64_t pitch, int tokens, int columns, bool turned, __m512i* to) {
    int steps = squares(tokens);
    for (int step = 0; step < steps; step++) {
        for (int column = 0; column < columns; column += TILE) {
            __mmask16 there = columns - column >= TILE ? 0xffff : (1 << (columns - column)) - 1;
            __m512i* tile = to + (column / TILE * steps + step) * TILE;
            for (int i = 0; i < TILE; i++) {
                int token = step * SIDE + 2 * i;
                const bf16* at = from + token * pitch + column;
                tile[i] = paired(token < tokens ? at : nullptr, token + 1 < tokens ? at + pitch : nullptr, there);
            }
            if (turned) transpose(tile);
        }
    }
}

// sums[32, 32] (four tiles of 16 x 16) += left' right, over `steps` times 32 tokens.
inline void add_square(const __m512i* left, const __m512i* right, int steps, float* sums) {
    constexpr int PITCH = 64;
    const __m512i *below = left + steps * TILE, *beside = right + steps * TILE;
    _tile_loadd(0, sums, PITCH);
    _tile_loadd(1, sums + 256, PITCH);
    _tile_loadd(2, sums + 512, PITCH);
    _tile_loadd(3, sums + 768, PITCH);
    for (int step = 0; step < steps; step++) {
        _tile_loadd(4, left + step * TILE, PITCH);
        _tile_loadd(6, right + step * TILE, PITCH);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, beside + step * TILE, PITCH);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + step * TILE, PITCH);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, PITCH);
    _tile_stored(1, sums + 256, PITCH);
    _tile_stored(2, sums + 512, PITCH);
    _tile_stored(3, sums + 768, PITCH);
}

// Where `count` columns are cut: into equal parts of whole squares, as many as `most` and a multiple of `times` ask for.
inline int part_of(int count, int most, int times) {
    int parts = (count + most * times - 1) / (most * times) * times;
    return squares((count + parts - 1) / parts) * SIDE;
}

// out[i] = d[i]' x. The tasks depend on the shapes and the number of threads alone, so the result is always the same.
void weight_gradients(const WeightGradients& shape) {
    struct Task {
        int layer, first, outputs, column;
    };
    int inputs = shape.inputs, tokens = shape.tokens, wide = part_of(inputs, INPUTS, 1), most = 0;
    int columns = (inputs + wide - 1) / wide, chunks = (tokens + DEPTH - 1) / DEPTH;
    std::vector<Task> tasks;
    for (int layer = 0; layer < shape.layers; layer++) {
        int all = shape.outputs[layer], high = part_of(all, OUTPUTS, shape.threads);
        most = std::max(most, high);
        for (int first = 0; first < all; first += high)
            for (int column = 0; column < columns; column++)
                tasks.push_back({layer, first, std::min(high, all - first), column});
    }
    size_t panel = size_t(wide) * DEPTH / 32;  // vectors of a packed part of x
    std::unique_ptr<__m512i[]> packed(new __m512i[panel * columns * chunks]);
#pragma omp parallel num_threads(shape.threads)
    {
        Tiles tiles;
        size_t room = size_t(most) * wide / TILE;
        std::unique_ptr<__m512i[]> left(new __m512i[size_t(most) * DEPTH / 32]), memory(new __m512i[room]);
        float* sums = reinterpret_cast<float*>(memory.get());
#pragma omp for schedule(static)
        for (int part = 0; part < chunks * columns; part++) {
            int t = part / columns * DEPTH, n0 = part % columns * wide;
            int some = std::min(DEPTH, tokens - t), n = std::min(wide, inputs - n0);
            pack(shape.x + int64_t(t) * inputs + n0, inputs, some, n, false, &packed[part * panel]);
        }
#pragma omp for schedule(static)
        for (size_t number = 0; number < tasks.size(); number++) {
            Task task = tasks[number];
            const bf16* d = shape.d[task.layer] + task.first;
            int all = shape.outputs[task.layer], m = task.outputs, n0 = task.column * wide;
            int n = std::min(wide, inputs - n0);
            std::fill(memory.get(), memory.get() + room, __m512i{});
            for (int t = 0; t < tokens; t += DEPTH) {
                int some = std::min(DEPTH, tokens - t), steps = squares(some);
                pack(d + int64_t(t) * all, all, some, m, true, left.get());
                const __m512i* right = &packed[(size_t(t / DEPTH) * columns + task.column) * panel];
                for (int i = 0; i < squares(m); i++)
                    for (int j = 0; j < squares(n); j++)
                        add_square(&left[i * 2 * steps * TILE], right + j * 2 * steps * TILE, steps,
                            sums + (size_t(i) * (wide / SIDE) + j) * SIDE * SIDE);
            }
            for (int i = 0; i < m; i++) {
                bf16* to = shape.out[task.layer] + int64_t(task.first + i) * inputs + n0;
                for (int j = 0; j < n; j += TILE) {
                    size_t square = size_t(i / SIDE) * (wide / SIDE) + j / SIDE;
                    const float* from = sums + square * SIDE * SIDE + (i % SIDE / TILE * 2 + j % SIDE / TILE) * TILE * TILE;
                    bf16 narrowed[TILE];
                    store(load(from + i % TILE * TILE), narrowed);
                    std::memcpy(to + j, narrowed, std::min(TILE, n - j) * sizeof(bf16));
                }
            }
        }
    }
}

}  // namespace

#else

namespace {

inline void weight_gradients(const WeightGradients&) {}

}  // namespace

#endif
