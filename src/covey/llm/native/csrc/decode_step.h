// One decoding step through all layers in one call, for few rows: AMX or AVX512-BF16 only.
//
// On other processors native_decoder.py runs the linear layers with oneDNN and calls the other kernels one by one.
//
// With few rows, reading weights dominates. They are prepacked once as tiles in the order in which they are read, and
// prefetched; what follows a linear layer (bias, residual add, SwiGLU) is fused into it as an epilogue.
// Entry points: `prepack_weight`, `linear`, `decode_step`.
//
// Shapes: R rows, W hidden width; M outputs, N inputs of a linear layer.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "decode_attention.h"
#include "rmsnorm_swiglu.h"
#include "amx.h"
#include "simd.h"

namespace {

// bindings.py declares the same fields, here and below.
struct Linear {
    const void* weight;  // [M / 32, N / 32, 2] tiles, the B operand of x W'
    const bf16* bias;    // [padded(M)], or null
    int32_t outputs, inputs;
};

struct Layer {
    const bf16 *input_norm, *query_norm, *key_norm, *inner_norm;  // of the input, of heads (may be null), of the MLP
    Linear qkv, output, gate_up, down;  // the outputs of `gate_up` alternate: 16 of the gate, 16 of the up projection
};

// Matrices have a multiple of 16 rows, and rows a multiple of 32 numbers, with 0 past the width.
struct DecodeStepArgs {
    const Layer* layers;
    const bf16* norm;
    Linear head;
    AttentionArgs attention;   // for the first layer
    int64_t own_layer_stride;  // from one layer's own keys, or values, to the next one's, in numbers
    float* hidden;             // [R, W], the residual stream: the tokens' embeddings at first
    bf16 *normed, *qkv, *attended, *gated, *logits;
    int32_t layer_count;
};

}  // namespace

#if HAVE_AVX512_BF16

namespace {

// Pack a weight [M, N] into tiles, padded with 0.
void prepack_weight(const bf16* weight, int outputs, int inputs, void* tiles, int threads) {
    auto to = static_cast<__m512i*>(tiles);
    int k_tiles = blocks(inputs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int block = 0; block < blocks(outputs); block++) {
        for (int k = 0; k < k_tiles; k++) {
            int left = inputs - k * BLOCK;
            __mmask32 mask = left >= BLOCK ? ~0u : (1u << left) - 1;
            for (int half = 0; half < 2; half++) {
                __m512i* tile = to + ((size_t(block) * k_tiles + k) * 2 + half) * TILE;
                for (int i = 0; i < TILE; i++) {
                    int output = block * BLOCK + half * TILE + i;
                    const bf16* from = weight + int64_t(output) * inputs + k * BLOCK;
                    tile[i] = output < outputs ? _mm512_maskz_loadu_epi16(mask, from) : __m512i{};
                }
                transpose(tile);
            }
        }
    }
}

constexpr int PREFETCH_DISTANCE = 8 * 2 * TILE;  // in vectors of weights: 8 k tiles of a block

#ifdef HAVE_AMX
// sums[2, 2, 16, 16] = 32 rows of x, or without BOTH the first 16, by 32 outputs, whose tiles are `b`. With `prefetch`
// the tiles of a later k are prefetched.
template <bool BOTH>
inline void linear_block_amx(const bf16* x, int row_stride, const __m512i* b, int k_tiles, bool prefetch, float* sums) {
    constexpr int BYTES = 64;
    int64_t row = int64_t(row_stride) * sizeof(bf16);
    compiler_barrier(x);
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) _tile_zero(2);
    if (BOTH) _tile_zero(3);
    for (int k = 0; k < k_tiles; k++, x += BLOCK, b += 2 * TILE) {
        if (prefetch)
            for (int i = 0; i < 2 * TILE; i++) _mm_prefetch(b + PREFETCH_DISTANCE + i, _MM_HINT_T1);
        _tile_loadd(4, x, row);
        _tile_loadd(6, b, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (BOTH) {
            _tile_loadd(5, x + int64_t(TILE) * row_stride, row);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, BYTES);
    _tile_stored(1, sums + 256, BYTES);
    if (BOTH) _tile_stored(2, sums + 512, BYTES);
    if (BOTH) _tile_stored(3, sums + 768, BYTES);
}
#endif

// The same on vectors for ROWS rows: a pair of bf16 of a row is broadcast and multiplied with those of 32 outputs.
template <int ROWS>
inline void linear_rows_simd(const bf16* x, int row_stride, const __m512i* b, int k_tiles, bool prefetch, float* sums) {
    __m512 low[ROWS] = {}, high[ROWS] = {};
    for (int k = 0; k < k_tiles; k++, x += BLOCK, b += 2 * TILE) {
        if (prefetch)
            for (int i = 0; i < 2 * TILE; i++) _mm_prefetch(b + PREFETCH_DISTANCE + i, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int pair = 0; pair < TILE; pair++) {
            auto first = __m512bh(b[pair]), second = __m512bh(b[TILE + pair]);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                int word;
                std::memcpy(&word, x + int64_t(i) * row_stride + 2 * pair, sizeof word);
                auto a = __m512bh(_mm512_set1_epi32(word));
                low[i] = _mm512_dpbf16_ps(low[i], a, first);
                high[i] = _mm512_dpbf16_ps(high[i], a, second);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        store(f32x16(low[i]), sums + i * TILE);
        store(f32x16(high[i]), sums + 256 + i * TILE);
    }
}

// sums[2, 2, 16, 16] = `rows` rows of x, at most 32, by 32 outputs.
inline void linear_block(const bf16* x, int row_stride, const __m512i* b, int k_tiles, int rows, bool prefetch,
    float* sums) {
#ifdef HAVE_AMX
    if (amx_enabled()) {
        if (rows > TILE) return linear_block_amx<true>(x, row_stride, b, k_tiles, prefetch, sums);
        return linear_block_amx<false>(x, row_stride, b, k_tiles, prefetch, sums);
    }
#endif
    int row = 0;
    auto in_groups_of = [&](auto group) {
        for (; row + group() <= rows; row += group()) {
            float* to = sums + row / TILE * 512 + row % TILE * TILE;
            linear_rows_simd<group()>(x + int64_t(row) * row_stride, row_stride, b, k_tiles, prefetch && row == 0, to);
        }
    };
    in_groups_of(std::integral_constant<int, 8>());
    in_groups_of(std::integral_constant<int, 4>());
    in_groups_of(std::integral_constant<int, 2>());
    in_groups_of(std::integral_constant<int, 1>());
}

// x W' + b, handed to epilogue(row, first of 32 outputs, 16 sums, 16 sums) instead of being stored.
template <typename Epilogue>
void linear(const bf16* x, const Linear& layer, int rows, int threads, Epilogue epilogue) {
    int k_tiles = blocks(layer.inputs), row_stride = padded(layer.inputs);
#pragma omp parallel num_threads(threads)
    {
        TileConfig tile_config;
        alignas(64) float sums[4 * TILE * TILE];
#pragma omp for schedule(static) nowait
        for (int block = 0; block < blocks(layer.outputs); block++) {
            auto b = static_cast<const __m512i*>(layer.weight) + int64_t(block) * k_tiles * 2 * TILE;
            f32x16 low_bias = {}, high_bias = {};
            const bf16* bias = layer.bias + block * BLOCK;
            if (layer.bias) low_bias = load(bias), high_bias = load(bias + TILE);
            for (int row = 0; row < rows; row += BLOCK) {
                int count = std::min(BLOCK, rows - row);
                linear_block(x + int64_t(row) * row_stride, row_stride, b, k_tiles, count, row == 0, sums);
                for (int i = 0; i < count; i++) {
                    const float* sum = sums + i / TILE * 512 + i % TILE * TILE;
                    epilogue(row + i, block * BLOCK, load(sum) + low_bias, load(sum + 256) + high_bias);
                }
            }
        }
        _mm_sfence();  // non-temporal stores of the epilogue become visible to other threads
    }
}

// Epilogue that stores bf16 in rows `row_stride` apart; with `non_temporal` past the caches, for results that are not
// read soon.
struct StoreEpilogue {
    bf16* out;
    int64_t row_stride;
    int width;
    bool non_temporal;

    void operator()(int row, int column, f32x16 low, f32x16 high) const {
        auto both = __m512i(_mm512_cvtne2ps_pbh(high, low));
        bf16* to = out + row * row_stride + column;
        if (column + BLOCK > width) _mm512_mask_storeu_epi16(to, (1u << (width - column)) - 1, both);
        else if (non_temporal && reinterpret_cast<uintptr_t>(to) % sizeof both == 0)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
        else _mm512_storeu_si512(to, both);
    }
};

// out = x W' + b.
void linear(const bf16* x, const Linear& layer, bf16* out, int rows, int threads) {
    bool large = int64_t(rows) * layer.outputs > 1 << 20;
    linear(x, layer, rows, threads, StoreEpilogue{out, layer.outputs, layer.outputs, large});
}

// One new token per row: from `hidden`, its embedding, to `logits`.
void decode_step(const DecodeStepArgs& step) {
    AttentionArgs attention = step.attention;
    int rows = attention.rows, threads = attention.threads, width = step.head.inputs;
    auto norm_hidden = [&](const bf16* weight) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int row = 0; row < rows; row++) {
            bf16* to = step.normed + int64_t(row) * padded(width);
            rmsnorm(step.hidden + int64_t(row) * width, weight, to, width, attention.epsilon);
        }
    };
    auto add_to_hidden = [&](int row, int column, f32x16 low, f32x16 high) {
        float* to = step.hidden + int64_t(row) * width + column;
        auto add = [&](f32x16 x, int begin) {
            int left = width - column - begin;
            __mmask16 mask = left >= TILE ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
            __m512 sum = _mm512_maskz_loadu_ps(mask, to + begin) + __m512(x);
            _mm512_mask_storeu_ps(to + begin, mask, sum);
        };
        add(low, 0);
        add(high, TILE);
    };
    for (int index = 0; index < step.layer_count; index++) {
        const Layer& layer = step.layers[index];
        norm_hidden(layer.input_norm);
        int row_stride = attention.qkv_row_stride;
        linear(step.normed, layer.qkv, rows, threads, StoreEpilogue{step.qkv, row_stride, row_stride, false});
        attention.layer = index;
        attention.query_norm = layer.query_norm;
        attention.key_norm = layer.key_norm;
        attention.own_keys = static_cast<bf16*>(step.attention.own_keys) + index * step.own_layer_stride;
        attention.own_values = static_cast<bf16*>(step.attention.own_values) + index * step.own_layer_stride;
        decode_attention<bf16>(attention);
        linear(step.attended, layer.output, rows, threads, add_to_hidden);
        norm_hidden(layer.inner_norm);
        int gated_row_stride = padded(layer.down.inputs);
        linear(step.normed, layer.gate_up, rows, threads, [&](int row, int column, f32x16 gate, f32x16 up) {
            store(silu(gate) * up, step.gated + int64_t(row) * gated_row_stride + column / 2);
        });
        linear(step.gated, layer.down, rows, threads, add_to_hidden);
    }
    norm_hidden(step.norm);
    linear(step.normed, step.head, step.logits, rows, threads);
}

}  // namespace

#else

namespace {

inline void prepack_weight(const bf16*, int, int, void*, int) {}
inline void linear(const bf16*, const Linear&, bf16*, int, int) {}
inline void decode_step(const DecodeStepArgs&) {}

}  // namespace

#endif
