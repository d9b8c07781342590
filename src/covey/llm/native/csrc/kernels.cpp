// What a language model does between its matrix products: for one new token per row while sampling (decoder.py), and
// forward and backward in training (fused.py, ../head.py). Here are the entry points, called through ctypes
// (bindings.py).
//
// Tensors are stored in bf16 or fp32 and computed on in fp32. What is computed is rounded once, where it is stored;
// transformers rounds every intermediate result, which takes a bf16 gradient further from the exact one.

#include "decode_attention.h"
#include "decode_step.h"
#include "rmsnorm_swiglu.h"
#include "logits.h"
#include "weight_gradients.h"
#include "prefix_attention.h"

// One set for each storage type.
#define ENTRY_POINTS(Value, suffix)                                                                                 \
    extern "C" void add_and_normalise_##suffix(const float* hidden, const Value* added, float* total,               \
        const Value* weight, Value* out, float* scales, int rows, int width, float epsilon, int threads) {          \
        add_and_normalise(hidden, added, total, weight, out, scales, rows, width, epsilon, threads);                \
    }                                                                                                               \
    extern "C" void normalise_##suffix(const Value* x, const Value* weight, Value* out, float* scales, int rows,    \
        int width, float epsilon, int threads) {                                                                    \
        add_and_normalise<Value, Value>(x, nullptr, nullptr, weight, out, scales, rows, width, epsilon, threads);   \
    }                                                                                                               \
    extern "C" void add_and_normalise_backward_##suffix(const float* x, const Value* weight, const float* scales,   \
        const Value* dy, const float* past, float* dx, Value* dadded, float* dweights, int rows, int width,         \
        int threads) {                                                                                              \
        normalise_backward(x, weight, scales, dy, past, dx, dadded, dweights, rows, width, threads);                \
    }                                                                                                               \
    extern "C" void normalise_backward_##suffix(const Value* x, const Value* weight, const float* scales,           \
        const Value* dy, Value* dx, float* dweights, int rows, int width, int threads) {                            \
        normalise_backward<Value, Value>(                                                                          \
            x, weight, scales, dy, nullptr, dx, nullptr, dweights, rows, width, threads);                           \
    }                                                                                                               \
    extern "C" void swiglu_##suffix(const Value* gates, const Value* ups, int stride, Value* out, int rows, int width,\
        int threads) {                                                                                              \
        swiglu(gates, ups, stride, out, rows, width, threads);                                                        \
    }                                                                                                               \
    extern "C" void swiglu_backward_##suffix(const Value* gates, const Value* ups, const Value* d, Value* dgates,     \
        Value* dups, int64_t count, int threads) {                                                                  \
        swiglu_backward(gates, ups, d, dgates, dups, count, threads);                                                 \
    }                                                                                                               \
    extern "C" void prefix_attention_##suffix(const SharedAttention* attention) {                                    \
        prefix_attention<Value>(*attention);                                                                         \
    }                                                                                                               \
    extern "C" void store_prompt_kv_##suffix(const Value* keys, const Value* values, Value* kept_keys,                     \
        Value* kept_values, int kv_heads, int tokens, int width) {                                                  \
        store_prompt_kv(keys, values, kept_keys, kept_values, kv_heads, tokens, width);                                 \
    }                                                                                                               \
    extern "C" void attend_##suffix(const Attention* attention) { attend<Value>(*attention); }                      \
    extern "C" int sample_tokens_##suffix(const Value* logits, const double* uniforms, float temperature,                  \
        int64_t* tokens, float* logprobs, int rows, int vocabulary, int threads) {                                  \
        return sample_tokens(logits, uniforms, temperature, tokens, logprobs, rows, vocabulary, threads);                  \
    }                                                                                                               \
    extern "C" void logprob_entropy_##suffix(const Value* logits, const int64_t* tokens, float temperature,          \
        float* logprobs, float* entropies, float* log_totals, int rows, int vocabulary, int threads) {              \
        logprob_entropy(logits, tokens, temperature, logprobs, entropies, log_totals, rows, vocabulary, threads);    \
    }                                                                                                               \
    extern "C" void logit_gradients_##suffix(Value* logits, const int64_t* tokens, const float* log_totals,         \
        const float* entropies, const float* dlogprobs, const float* dentropies, float temperature, int64_t first,  \
        int rows, int width, int threads) {                                                                         \
        logit_gradients(logits, tokens, log_totals, entropies, dlogprobs, dentropies, temperature, first, rows,     \
            width, threads);                                                                                        \
    }

ENTRY_POINTS(bf16, bf16)
ENTRY_POINTS(float, fp32)

// On processors that multiply pairs of bf16.
extern "C" bool has_pairs() { return MULTIPLIES_PAIRS; }
extern "C" void prepack_weight_bf16(const bf16* weight, int outputs, int inputs, void* tiles, int threads) {
    prepack_weight(weight, outputs, inputs, tiles, threads);
}
extern "C" void multiply_bf16(const bf16* x, const Linear* linear, bf16* out, int rows, int threads) {
    multiply(x, *linear, out, rows, threads);
}
extern "C" void decode_bf16(const Step* step) { decode(*step); }

// On those with AMX.
extern "C" bool has_tiles() { return may_use_tiles(); }
extern "C" void weight_gradients_bf16(const WeightGradients* shape) { weight_gradients(*shape); }

// Called by build.py in a process of its own before a library is kept: one that crashes or miscalculates is refused.
extern "C" bool self_test() {
    constexpr int WIDTH = 2 * PAD, ROWS = 16;
    alignas(64) static float x[WIDTH], weight[WIDTH], out[WIDTH], scale;
    std::fill_n(x, WIDTH, 2.0f);
    std::fill_n(weight, WIDTH, 3.0f);
    normalise_fp32(x, weight, out, &scale, 1, WIDTH, 0.0f, 2);
    if (std::any_of(out, out + WIDTH, [](float y) { return !(std::abs(y - 3.0f) < 1e-5f); })) return false;
    if (!has_pairs()) return true;
    alignas(64) static bf16 ones[WIDTH * WIDTH], tiles[WIDTH * WIDTH], products[ROWS * WIDTH];
    for (bf16& one : ones) from_float(1.0f, &one);
    prepack_weight_bf16(ones, WIDTH, WIDTH, tiles, 1);
    Linear linear{tiles, nullptr, WIDTH, WIDTH};
    multiply_bf16(ones, &linear, products, ROWS, 1);
    return std::all_of(products, products + ROWS * WIDTH, [](bf16 y) { return to_float(y) == WIDTH; });
}
