// Gradients of the weights of linear layers that share their input, out = dout' x: AMX only, elsewhere torch does it.
//
// The tokens, over which is summed, are the rows of both factors; oneDNN multiplies such matrices at less than half of
// AMX's rate. x is packed once for all layers. A task owns a block of one layer's result, whose fp32 sums stay in a
// core's cache over all tokens. Entry point: `weight_gradients`.
//
// Shapes: T tokens, M outputs, N inputs of the layer.

#pragma once

#include <cstdint>

#include "gemm.h"
#include "simd.h"

namespace {

// bindings.py declares the same fields.
struct WeightGradientArgs {
    const bf16* x;            // [T, N]
    const bf16* const* dout;  // of each layer: [T, M]
    bf16* const* out;         // of each layer: [M, N]
    const int32_t* outputs;   // of each layer: M
    int32_t layers, tokens, inputs, threads;
};

}  // namespace

#ifdef HAVE_AMX
#include <algorithm>
#include <memory>
#include <vector>

namespace {

constexpr int TOKEN_CHUNK = 256;                     // 32 columns of each factor, 32 KB, stay in the first-level cache
constexpr int MAX_OUTPUTS = 384, MAX_INPUTS = 576;  // of a task: 0.9 MB of sums, 0.5 MB of factors

// Interleave 16 numbers of two tokens; a null token is 0.
inline __m512i interleave(const bf16* first, const bf16* second, __mmask16 mask) {
    __m256i low = first ? _mm256_maskz_loadu_epi16(mask, first) : _mm256_setzero_si256();
    __m256i high = second ? _mm256_maskz_loadu_epi16(mask, second) : _mm256_setzero_si256();
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// Pack [tokens, columns] into [columns / 16, tokens / 32] tiles with k along tokens: a B operand, or, if `transposed`,
// the A operand of the transposed matrix.
inline void pack(const bf16* from, int64_t row_stride, int tokens, int columns, bool transposed, bf16* to) {
    int k_tiles = blocks(tokens);
    for (int k = 0; k < k_tiles; k++) {
        for (int column = 0; column < columns; column += TILE) {
            __mmask16 mask = columns - column >= TILE ? 0xffff : (1 << (columns - column)) - 1;
            auto tile = reinterpret_cast<__m512i*>(to + tile_offset<bf16>(column, k * BLOCK, k_tiles));
            for (int i = 0; i < TILE; i++) {
                int token = k * BLOCK + 2 * i;
                const bf16* at = from + token * row_stride + column;
                if (column % BLOCK == 0) {  // the next k tile: the hardware prefetches no streams so far apart
                    __builtin_prefetch(at + BLOCK * row_stride);
                    __builtin_prefetch(at + (BLOCK + 1) * row_stride);
                }
                tile[i] =
                    interleave(token < tokens ? at : nullptr, token + 1 < tokens ? at + row_stride : nullptr, mask);
            }
            if (transposed) transpose(tile);
        }
    }
}

// Size of equal parts of `count` columns: at most `max_size` and a multiple of BLOCK. The number of parts is a multiple
// of `times`.
inline int part_size(int count, int max_size, int times) {
    int parts = (count + max_size * times - 1) / (max_size * times) * times;
    return blocks((count + parts - 1) / parts) * BLOCK;
}

// A block of one layer's result.
struct WeightGradientTask {
    int layer, first_output, outputs, column_part;
};

// out[i] = dout[i]' x. Tasks depend on the shapes and the number of threads alone, so the result is reproducible.
void weight_gradients(const WeightGradientArgs& args) {
    int inputs = args.inputs, tokens = args.tokens, part_inputs = part_size(inputs, MAX_INPUTS, 1), max_outputs = 0;
    int parts = (inputs + part_inputs - 1) / part_inputs, chunks = (tokens + TOKEN_CHUNK - 1) / TOKEN_CHUNK;
    std::vector<WeightGradientTask> tasks;
    for (int layer = 0; layer < args.layers; layer++) {
        int outputs = args.outputs[layer], task_outputs = part_size(outputs, MAX_OUTPUTS, args.threads);
        max_outputs = std::max(max_outputs, task_outputs);
        for (int first = 0; first < outputs; first += task_outputs)
            for (int part = 0; part < parts; part++)
                tasks.push_back({layer, first, std::min(task_outputs, outputs - first), part});
    }
    size_t panel = size_t(part_inputs) * TOKEN_CHUNK;  // numbers of a packed part of a chunk of x
    std::unique_ptr<f32x16[]> packed_memory(new f32x16[panel * parts * chunks / BLOCK]);
    bf16* packed = reinterpret_cast<bf16*>(packed_memory.get());
#pragma omp parallel num_threads(args.threads)
    {
        TileConfig tile_config;
        std::vector<f32x16> a_memory, sum_memory;
        bf16* a = scratch<bf16>(a_memory, size_t(max_outputs) * TOKEN_CHUNK);
        float* sums = scratch<float>(sum_memory, size_t(max_outputs) * part_inputs);
#pragma omp for schedule(static)
        for (int panel_index = 0; panel_index < chunks * parts; panel_index++) {
            int t = panel_index / parts * TOKEN_CHUNK, n0 = panel_index % parts * part_inputs;
            int count = std::min(TOKEN_CHUNK, tokens - t), n = std::min(part_inputs, inputs - n0);
            pack(args.x + int64_t(t) * inputs + n0, inputs, count, n, false, packed + panel_index * panel);
        }
#pragma omp for schedule(static)
        for (size_t index = 0; index < tasks.size(); index++) {
            WeightGradientTask task = tasks[index];
            const bf16* dout = args.dout[task.layer] + task.first_output;
            int row_stride = args.outputs[task.layer], m = task.outputs, n0 = task.column_part * part_inputs;
            int n = std::min(part_inputs, inputs - n0);
            for (int t = 0; t < tokens; t += TOKEN_CHUNK) {
                int count = std::min(TOKEN_CHUNK, tokens - t), k_tiles = blocks(count);
                pack(dout + int64_t(t) * row_stride, row_stride, count, m, true, a);
                const bf16* b = packed + (size_t(t / TOKEN_CHUNK) * parts + task.column_part) * panel;
                for (int i = 0; i < m; i += BLOCK)
                    for (int j = 0; j < n; j += BLOCK)
                        gemm_block(a + tile_offset<bf16>(i, 0, k_tiles), k_tiles, b + tile_offset<bf16>(j, 0, k_tiles),
                            k_tiles, k_tiles, t > 0, sums + block_offset(i, j, part_inputs / BLOCK));
            }
            for (int i = 0; i < m; i++) {
                bf16* to = args.out[task.layer] + int64_t(task.first_output + i) * inputs + n0;
                for (int j = 0; j < n; j += TILE) {
                    bf16 rounded[TILE];
                    store(load(sums + block_offset(i, j, part_inputs / BLOCK)), rounded);
                    std::memcpy(to + j, rounded, std::min(TILE, n - j) * sizeof(bf16));
                }
            }
        }
    }
}

}  // namespace

#else

namespace {

inline void weight_gradients(const WeightGradientArgs&) {}

}  // namespace

#endif
