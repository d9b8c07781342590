// One decoding step of all layers in one call, on processors with AMX or AVX512-BF16. On others native_layers.py makes
// the products with oneDNN and calls the kernels between them one by one.
//
// Weights are prepacked as tiles in the order in which they are read, because with few rows reading them dominates.
//
// Shapes: R rows, W hidden width, M outputs, N inputs of a linear layer.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "decode_attention.h"
#include "rmsnorm_swiglu.h"
#include "amx.h"
#include "simd.h"

namespace {

// A linear layer. bindings.py declares the same fields, here and below.
struct Linear {
    const void* weight;  // [M / 32, N / 32, 2] tiles, the right factors of x W'
    const bf16* bias;    // [padded(M)], or null
    int32_t outputs, inputs;
};

struct Layer {
    const bf16 *input_norm, *query_norm, *key_norm, *inner_norm;  // those in the middle may be null
    Linear qkv, output, gate_up, down;  // of `gate_up`, 16 outputs of the gate and 16 that it opens for alternate
};

// Matrices have room for a multiple of 16 rows, and their rows for a multiple of 32 numbers, 0 past the width.
struct Step {
    const Layer* layers;
    const bf16* norm;
    Linear head;
    Attention attention;     // of the first layer
    int64_t own_per_layer;   // numbers from one layer's own keys, or values, to the next one's
    float* hidden;           // [R, W], of the tokens' embeddings
    bf16 *normed, *qkv, *attended, *gated, *logits;
    int32_t layer_count;
};

}  // namespace

#if MULTIPLIES_PAIRS

namespace {

// Weights [M, N] as tiles; past both ends there is 0.
void prepack_weight(const bf16* weight, int outputs, int inputs, void* tiles, int threads) {
    auto to = static_cast<__m512i*>(tiles);
    int steps = squares(inputs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int square = 0; square < squares(outputs); square++) {
        for (int step = 0; step < steps; step++) {
            int left = inputs - step * SIDE;
            __mmask32 there = left >= SIDE ? ~0u : (1u << left) - 1;
            for (int half = 0; half < 2; half++) {
                __m512i* tile = to + ((size_t(square) * steps + step) * 2 + half) * TILE;
                for (int i = 0; i < TILE; i++) {
                    int output = square * SIDE + half * TILE + i;
                    const bf16* from = weight + int64_t(output) * inputs + step * SIDE;
                    tile[i] = output < outputs ? _mm512_maskz_loadu_epi16(there, from) : __m512i{};
                }
                transpose(tile);
            }
        }
    }
}

constexpr int AHEAD = 8 * 2 * TILE;  // vectors of weights, that are fetched before they are needed

#ifdef HAVE_TILES
// sums[2, 2, 16, 16] = 32 rows of x by 32 outputs; or, without BOTH, the first 16 rows. `right` are the outputs' tiles;
// where they are `fresh`, what comes some steps later is fetched in time.
template <bool BOTH>
inline void multiply_square(const bf16* x, int row_stride, const __m512i* right, int steps, bool fresh, float* sums) {
    constexpr int BYTES = 64;
    int64_t row = int64_t(row_stride) * sizeof(bf16);
    compiler_barrier(x);
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) _tile_zero(2);
    if (BOTH) _tile_zero(3);
    for (int step = 0; step < steps; step++, x += SIDE, right += 2 * TILE) {
        if (fresh)
            for (int i = 0; i < 2 * TILE; i++) _mm_prefetch(right + AHEAD + i, _MM_HINT_T1);
        _tile_loadd(4, x, row);
        _tile_loadd(6, right, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + TILE, BYTES);
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

// The same of some rows, in vectors: a word of a row, two of its numbers, meets those of 32 outputs.
template <int ROWS>
inline void multiply_rows(const bf16* x, int row_stride, const __m512i* right, int steps, bool fresh, float* sums) {
    __m512 low[ROWS] = {}, high[ROWS] = {};
    for (int step = 0; step < steps; step++, x += SIDE, right += 2 * TILE) {
        if (fresh)
            for (int i = 0; i < 2 * TILE; i++) _mm_prefetch(right + AHEAD + i, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int pair = 0; pair < TILE; pair++) {
            auto left = __m512bh(right[pair]), other = __m512bh(right[TILE + pair]);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                int word;
                std::memcpy(&word, x + int64_t(i) * row_stride + 2 * pair, sizeof word);
                auto both = __m512bh(_mm512_set1_epi32(word));
                low[i] = _mm512_dpbf16_ps(low[i], both, left);
                high[i] = _mm512_dpbf16_ps(high[i], both, other);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        store(Floats(low[i]), sums + i * TILE);
        store(Floats(high[i]), sums + 256 + i * TILE);
    }
}

// sums[2, 2, 16, 16] = so many rows of x, at most 32, by 32 outputs.
inline void multiply_some(const bf16* x, int row_stride, const __m512i* right, int steps, int rows, bool fresh, float* sums) {
#ifdef HAVE_TILES
    if (may_use_tiles()) {
        if (rows > TILE) return multiply_square<true>(x, row_stride, right, steps, fresh, sums);
        return multiply_square<false>(x, row_stride, right, steps, fresh, sums);
    }
#endif
    int row = 0;
    auto take = [&](auto together) {
        for (; row + together() <= rows; row += together()) {
            float* to = sums + row / TILE * 512 + row % TILE * TILE;
            multiply_rows<together()>(x + int64_t(row) * row_stride, row_stride, right, steps, fresh && row == 0, to);
        }
    };
    take(std::integral_constant<int, 8>());
    take(std::integral_constant<int, 4>());
    take(std::integral_constant<int, 2>());
    take(std::integral_constant<int, 1>());
}

// x W' + b; `finish` is given a row, the first of 32 outputs, and two vectors of them.
template <typename Finish>
void multiply(const bf16* x, const Linear& linear, int rows, int threads, Finish finish) {
    int steps = squares(linear.inputs), row_stride = padded(linear.inputs);
#pragma omp parallel num_threads(threads)
    {
        Tiles tiles;
        alignas(64) float sums[4 * TILE * TILE];
#pragma omp for schedule(static) nowait
        for (int square = 0; square < squares(linear.outputs); square++) {
            auto right = static_cast<const __m512i*>(linear.weight) + int64_t(square) * steps * 2 * TILE;
            Floats low_bias = {}, high_bias = {};
            const bf16* bias = linear.bias + square * SIDE;
            if (linear.bias) low_bias = load(bias), high_bias = load(bias + TILE);
            for (int row = 0; row < rows; row += SIDE) {
                int some = std::min(SIDE, rows - row);
                multiply_some(x + int64_t(row) * row_stride, row_stride, right, steps, some, row == 0, sums);
                for (int i = 0; i < some; i++) {
                    const float* sum = sums + i / TILE * 512 + i % TILE * TILE;
                    finish(row + i, square * SIDE, load(sum) + low_bias, load(sum + 256) + high_bias);
                }
            }
        }
        _mm_sfence();  // what went past the caches is there for the other threads
    }
}

// Stored as they are, in rows `row_stride` apart. What nobody reads soon goes past the caches.
struct Store {
    bf16* out;
    int64_t row_stride;
    int width;
    bool past;

    void operator()(int row, int column, Floats low, Floats high) const {
        auto both = __m512i(_mm512_cvtne2ps_pbh(high, low));
        bf16* to = out + row * row_stride + column;
        if (column + SIDE > width) _mm512_mask_storeu_epi16(to, (1u << (width - column)) - 1, both);
        else if (past && reinterpret_cast<uintptr_t>(to) % sizeof both == 0)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
        else _mm512_storeu_si512(to, both);
    }
};

void multiply(const bf16* x, const Linear& linear, bf16* out, int rows, int threads) {
    bool much = int64_t(rows) * linear.outputs > 1 << 20;
    multiply(x, linear, rows, threads, Store{out, linear.outputs, linear.outputs, much});
}

void decode(const Step& step) {
    Attention attention = step.attention;
    int rows = attention.rows, threads = attention.threads, width = step.head.inputs;
    auto normalise_by = [&](const bf16* weight) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int row = 0; row < rows; row++) {
            bf16* to = step.normed + int64_t(row) * padded(width);
            normalise(step.hidden + int64_t(row) * width, weight, to, width, attention.epsilon);
        }
    };
    auto add = [&](int row, int column, Floats low, Floats high) {
        float* to = step.hidden + int64_t(row) * width + column;
        auto some = [&](Floats x, int begin) {
            int left = width - column - begin;
            __mmask16 there = left >= TILE ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
            __m512 sum = _mm512_maskz_loadu_ps(there, to + begin) + __m512(x);
            _mm512_mask_storeu_ps(to + begin, there, sum);
        };
        some(low, 0);
        some(high, TILE);
    };
    for (int number = 0; number < step.layer_count; number++) {
        const Layer& layer = step.layers[number];
        normalise_by(layer.input_norm);
        int row_stride = attention.qkv_row_stride;
        multiply(step.normed, layer.qkv, rows, threads, Store{step.qkv, row_stride, row_stride, false});
        attention.layer = number;
        attention.query_norm = layer.query_norm;
        attention.key_norm = layer.key_norm;
        attention.own_keys = static_cast<bf16*>(step.attention.own_keys) + number * step.own_per_layer;
        attention.own_values = static_cast<bf16*>(step.attention.own_values) + number * step.own_per_layer;
        attend<bf16>(attention);
        multiply(step.attended, layer.output, rows, threads, add);
        normalise_by(layer.inner_norm);
        int gated_row_stride = padded(layer.down.inputs);
        multiply(step.normed, layer.gate_up, rows, threads, [&](int row, int column, Floats gate, Floats up) {
            store(silu(gate) * up, step.gated + int64_t(row) * gated_row_stride + column / 2);
        });
        multiply(step.gated, layer.down, rows, threads, add);
    }
    normalise_by(step.norm);
    multiply(step.normed, step.head, step.logits, rows, threads);
}

}  // namespace

#else

namespace {

inline void prepack_weight(const bf16*, int, int, void*, int) {}
inline void multiply(const bf16*, const Linear&, bf16*, int, int) {}
inline void decode(const Step&) {}

}  // namespace

#endif
