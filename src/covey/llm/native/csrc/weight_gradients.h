// Gradients of linear layers' weights, sums over tokens of d x', on processors with AMX; elsewhere torch makes them.
//
// In both matrices the tokens come first, an order that oneDNN multiplies at less than half of AMX's rate. Here the
// input x that layers share is packed once, and a task owns a block of the result that stays in a core's cache.
//
// Shapes: T tokens, M outputs, N inputs of the layer.

#pragma once

#include <cstdint>

#include "gemm.h"
#include "simd.h"

namespace {

// The layers that have one input, and where the gradients of their weights go. bindings.py declares the same fields.
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
inline void pack(const bf16* from, int64_t row_stride, int tokens, int columns, bool turned, bf16* to) {
    int steps = squares(tokens);
    for (int step = 0; step < steps; step++) {
        for (int column = 0; column < columns; column += TILE) {
            __mmask16 there = columns - column >= TILE ? 0xffff : (1 << (columns - column)) - 1;
            auto tile = reinterpret_cast<__m512i*>(to + tile_offset<bf16>(column, step * SIDE, steps));
            for (int i = 0; i < TILE; i++) {
                int token = step * SIDE + 2 * i;
                const bf16* at = from + token * row_stride + column;
                if (column % SIDE == 0) {  // of the next step: so many rows far apart the processor does not foresee
                    __builtin_prefetch(at + SIDE * row_stride);
                    __builtin_prefetch(at + (SIDE + 1) * row_stride);
                }
                tile[i] = paired(token < tokens ? at : nullptr, token + 1 < tokens ? at + row_stride : nullptr, there);
            }
            if (turned) transpose(tile);
        }
    }
}

// Where `count` columns are cut: into equal parts of whole squares, as many as `most` and a multiple of `times` ask
// for.
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
    size_t panel = size_t(wide) * DEPTH;  // numbers of a packed part of x
    std::unique_ptr<Floats[]> packed_memory(new Floats[panel * columns * chunks / SIDE]);
    bf16* packed = reinterpret_cast<bf16*>(packed_memory.get());
#pragma omp parallel num_threads(shape.threads)
    {
        Tiles tiles;
        std::vector<Floats> left_memory, sum_memory;
        bf16* left = scratch<bf16>(left_memory, size_t(most) * DEPTH);
        float* sums = scratch<float>(sum_memory, size_t(most) * wide);
#pragma omp for schedule(static)
        for (int part = 0; part < chunks * columns; part++) {
            int t = part / columns * DEPTH, n0 = part % columns * wide;
            int some = std::min(DEPTH, tokens - t), n = std::min(wide, inputs - n0);
            pack(shape.x + int64_t(t) * inputs + n0, inputs, some, n, false, packed + part * panel);
        }
#pragma omp for schedule(static)
        for (size_t number = 0; number < tasks.size(); number++) {
            Task task = tasks[number];
            const bf16* d = shape.d[task.layer] + task.first;
            int all = shape.outputs[task.layer], m = task.outputs, n0 = task.column * wide;
            int n = std::min(wide, inputs - n0);
            for (int t = 0; t < tokens; t += DEPTH) {
                int some = std::min(DEPTH, tokens - t), steps = squares(some);
                pack(d + int64_t(t) * all, all, some, m, true, left);
                const bf16* right = packed + (size_t(t / DEPTH) * columns + task.column) * panel;
                for (int i = 0; i < m; i += SIDE)
                    for (int j = 0; j < n; j += SIDE)
                        multiply_factors(left + tile_offset<bf16>(i, 0, steps), steps, right + tile_offset<bf16>(j, 0, steps),
                            steps, steps, t > 0, sums + block_offset(i, j, wide / SIDE));
            }
            for (int i = 0; i < m; i++) {
                bf16* to = shape.out[task.layer] + int64_t(task.first + i) * inputs + n0;
                for (int j = 0; j < n; j += TILE) {
                    bf16 narrowed[TILE];
                    store(load(sums + block_offset(i, j, wide / SIDE)), narrowed);
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
