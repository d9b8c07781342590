// Entry points of the kernels, a C interface for ctypes (bindings.py declares it); build.py compiles this file.
//
// The kernels are what a language model computes between its matrix products: for one new token per row while sampling,
// forward and backward while training; and the matrix products themselves where that is faster than torch.
//
// file                     contents                                                      instruction sets
// simd.h                   vectors of 16 floats, bf16 conversion, exp                    any; AVX-512
// amx.h                    tile geometry, AMX set-up                                     AMX
// gemm.h                   GEMM micro-kernel on packed operands                          any; AVX512-BF16, AMX
// rmsnorm_swiglu.h         RMSNorm, SwiGLU, softmax                                      any
// logits.h                 sampling, log-probability, entropy                            any
// kv_cache.h               blocks of the KV cache                                        any; AMX
// decode_attention.h       attention of one new token per row                            any; AMX
// decode_step.h            all layers for one new token per row                          AVX512-BF16, AMX
// prefix_attention.h       attention over a prefix tree, forward and backward            any; those of gemm.h
// weight_gradients.h       gradients of linear layers' weights                           AMX
//
// Tensors are stored in bf16 or fp32 and computed on in fp32. Results are rounded once, when they are stored;
// transformers rounds every intermediate result, which takes a bf16 gradient further from the exact one.

#include "decode_attention.h"
#include "decode_step.h"
#include "rmsnorm_swiglu.h"
#include "logits.h"
#include "weight_gradients.h"
#include "prefix_attention.h"

// One set for each storage type.
#define ENTRY_POINTS(Scalar, suffix)                                                                                  \
    extern "C" void add_rmsnorm_##suffix(const float* hidden, const Scalar* added, float* total, const Scalar* weight, \
        Scalar* out, float* scales, int rows, int width, float epsilon, int threads) {                                \
        add_rmsnorm(hidden, added, total, weight, out, scales, rows, width, epsilon, threads);                        \
    }                                                                                                                 \
    extern "C" void rmsnorm_##suffix(const Scalar* x, const Scalar* weight, Scalar* out, float* scales, int rows,     \
        int width, float epsilon, int threads) {                                                                      \
        add_rmsnorm<Scalar, Scalar>(x, nullptr, nullptr, weight, out, scales, rows, width, epsilon, threads);         \
    }                                                                                                                 \
    extern "C" void add_rmsnorm_backward_##suffix(const float* x, const Scalar* weight, const float* scales,          \
        const Scalar* dy, const float* dresidual, float* dx, Scalar* dadded, float* dweights, int rows, int width,    \
        int threads) {                                                                                                \
        rmsnorm_backward(x, weight, scales, dy, dresidual, dx, dadded, dweights, rows, width, threads);               \
    }                                                                                                                 \
    extern "C" void rmsnorm_backward_##suffix(const Scalar* x, const Scalar* weight, const float* scales,             \
        const Scalar* dy, Scalar* dx, float* dweights, int rows, int width, int threads) {                            \
        rmsnorm_backward<Scalar, Scalar>(                                                                             \
            x, weight, scales, dy, nullptr, dx, nullptr, dweights, rows, width, threads);                             \
    }                                                                                                                 \
    extern "C" void swiglu_##suffix(const Scalar* gates, const Scalar* ups, int stride, Scalar* out, int rows,        \
        int width, int threads) {                                                                                     \
        swiglu(gates, ups, stride, out, rows, width, threads);                                                        \
    }                                                                                                                 \
    extern "C" void swiglu_backward_##suffix(const Scalar* gates, const Scalar* ups, const Scalar* dout,              \
        Scalar* dgates, Scalar* dups, int64_t count, int threads) {                                                   \
        swiglu_backward(gates, ups, dout, dgates, dups, count, threads);                                              \
    }                                                                                                                 \
    extern "C" void prefix_attention_##suffix(const PrefixAttentionArgs* args) { prefix_attention<Scalar>(*args); }   \
    extern "C" void store_prompt_kv_##suffix(const Scalar* keys, const Scalar* values, Scalar* cached_keys,           \
        Scalar* cached_values, int kv_heads, int tokens, int head_dim) {                                              \
        store_prompt_kv(keys, values, cached_keys, cached_values, kv_heads, tokens, head_dim);                        \
    }                                                                                                                 \
    extern "C" void decode_attention_##suffix(const AttentionArgs* args) { decode_attention<Scalar>(*args); }         \
    extern "C" void sample_tokens_##suffix(const Scalar* logits, const double* uniforms, float temperature,           \
        int64_t* tokens, float* logprobs, int rows, int vocabulary, int threads) {                                    \
        sample_tokens(logits, uniforms, temperature, tokens, logprobs, rows, vocabulary, threads);                    \
    }                                                                                                                 \
    extern "C" void logprob_entropy_##suffix(const Scalar* logits, const int64_t* tokens, float temperature,          \
        float* logprobs, float* entropies, float* logsumexps, int rows, int vocabulary, int threads) {                \
        logprob_entropy(logits, tokens, temperature, logprobs, entropies, logsumexps, rows, vocabulary, threads);     \
    }                                                                                                                 \
    extern "C" void logit_gradients_##suffix(Scalar* logits, const int64_t* tokens, const float* logsumexps,          \
        const float* entropies, const float* dlogprobs, const float* dentropies, float temperature, int64_t first,    \
        int rows, int width, int threads) {                                                                           \
        logit_gradients(logits, tokens, logsumexps, entropies, dlogprobs, dentropies, temperature, first, rows,       \
            width, threads);                                                                                          \
    }

ENTRY_POINTS(bf16, bf16)
ENTRY_POINTS(float, fp32)

// With AVX512-BF16 only.
extern "C" bool has_avx512_bf16() { return HAVE_AVX512_BF16; }
extern "C" void prepack_weight_bf16(const bf16* weight, int outputs, int inputs, void* tiles, int threads) {
    prepack_weight(weight, outputs, inputs, tiles, threads);
}
extern "C" void linear_bf16(const bf16* x, const Linear* layer, bf16* out, int rows, int threads) {
    linear(x, *layer, out, rows, threads);
}
extern "C" void decode_step_bf16(const DecodeStepArgs* args) { decode_step(*args); }

// With AMX only.
extern "C" bool has_amx() { return amx_enabled(); }
extern "C" void weight_gradients_bf16(const WeightGradientArgs* args) { weight_gradients(*args); }

// Whether attention scores are right: queries filled with 1, 2, ..., one at a time as in decoding, and keys of ones.
static bool scores_are_right() {
    constexpr int HEAD_DIM = BLOCK, TOKENS = 3, COUNT = TILE + 1;
    TileConfig tile_config;
    std::vector<bf16> keys(KVBlock<bf16>::size(PAD, HEAD_DIM)), values(keys.size()), ones(HEAD_DIM);
    for (bf16& one : ones) from_float(1.0f, &one);
    KVBlock<bf16> block(keys.data(), values.data(), 0, HEAD_DIM);
    for (int t = 0; t < TOKENS; t++) block.append(ones.data(), ones.data());
    Queries<bf16> queries(HEAD_DIM);
    queries.resize(COUNT);
    for (int q = 0; q < COUNT; q++) std::fill_n(queries.row(q), HEAD_DIM, q + 1.0f);
    queries.pack(COUNT);
    Prefetcher prefetcher;
    float scores[PAD];
    for (int q = 0; q < COUNT; q++) {
        block.score(queries, q, 1, scores, PAD, prefetcher);
        const float expected = (q + 1) * HEAD_DIM;
        if (std::any_of(scores, scores + TOKENS, [&](float score) { return score != expected; })) return false;
    }
    return true;
}

// build.py calls this in a process of its own before it keeps a library, and refuses one that crashes or miscalculates.
// An int: ctypes reads one if it is told no type, and the upper bytes of a bool may hold anything.
extern "C" int self_test() {
    constexpr int COLUMNS = 2 * PAD, ROWS = 16;
    alignas(64) static float x[COLUMNS], weight[COLUMNS], out[COLUMNS], scale;
    std::fill_n(x, COLUMNS, 2.0f);
    std::fill_n(weight, COLUMNS, 3.0f);
    rmsnorm_fp32(x, weight, out, &scale, 1, COLUMNS, 0.0f, 2);
    if (std::any_of(out, out + COLUMNS, [](float y) { return !(std::abs(y - 3.0f) < 1e-5f); })) return false;
    if (!scores_are_right()) return false;
    if (!has_avx512_bf16()) return true;
    alignas(64) static bf16 ones[COLUMNS * COLUMNS], tiles[COLUMNS * COLUMNS], products[ROWS * COLUMNS];
    for (bf16& one : ones) from_float(1.0f, &one);
    prepack_weight_bf16(ones, COLUMNS, COLUMNS, tiles, 1);
    Linear layer{tiles, nullptr, COLUMNS, COLUMNS};
    linear_bf16(ones, &layer, products, ROWS, 1);
    return std::all_of(products, products + ROWS * COLUMNS, [](bf16 y) { return to_float(y) == COLUMNS; });
}
