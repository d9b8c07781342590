// Operations on rows of logits [rows, V]: token sampling, log-probability with entropy, and their gradients.
//
// Vectors only. Softmax sums run over blocks of 256 logits in fp32, then over the block sums in fp64: accurate, and the
// same two-level order in which token_sampling.py inverts the cumulative distribution.
// Entry points: `sample_tokens`, `logprob_entropy`, `logit_gradients`.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

constexpr int SUM_BLOCK = 256;
constexpr float MIN_LOGIT = -3e38f;  // probability 0, but finite: -infinity times a probability of 0 would be NaN

// Call visit(index, 16 logits / temperature) for `count` logits from `z` on. Lanes past the end hold MIN_LOGIT. NaN
// stays NaN.
template <typename Scalar, typename Visit>
inline void for_each_logit(const Scalar* z, int count, float temperature, Visit visit) {
    for (int i = 0; i < count; i += LANES) {
        f32x16 x;
        if (i + LANES <= count) {
            x = load(z + i);
        } else {
            float lanes[LANES];
            for (int lane = 0; lane < LANES; lane++) lanes[lane] = i + lane < count ? to_float(z[i + lane]) : MIN_LOGIT;
            x = load(lanes);
        }
        if (temperature != 1.0f) x /= temperature;
        visit(i, select(x < broadcast(MIN_LOGIT), broadcast(MIN_LOGIT), x));
    }
}

template <typename Scalar>
inline float max_logit(const Scalar* z, int vocabulary, float temperature) {
    f32x16 top = broadcast(MIN_LOGIT);
    for_each_logit(z, vocabulary, temperature, [&](int, f32x16 x) { top = max(x, top); });
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, top[i]);
    return highest;
}

// Inverse-CDF sampling, min {v : sum_{w <= v} p_w > u}: first over the block sums, then within the block. The token of a
// row without a distribution (a logit is NaN or +infinity, or all are -infinity) is 0, its log-probability NaN.
template <typename Scalar>
void sample_tokens(const Scalar* logits, const double* uniforms, float temperature, int64_t* tokens, float* logprobs,
    int rows, int vocabulary, int threads) {
    int blocks = (vocabulary + SUM_BLOCK - 1) / SUM_BLOCK;
#pragma omp parallel num_threads(threads)
    {
        std::vector<double> block_cdf(blocks);
        std::vector<float> block_weights(SUM_BLOCK);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            const Scalar* z = logits + size_t(row) * vocabulary;
            float highest = max_logit(z, vocabulary, temperature);
            auto for_each_weight = [&](int block, auto visit) {
                int from = block * SUM_BLOCK;
                for_each_logit(z + from, std::min(SUM_BLOCK, vocabulary - from), temperature,
                    [&](int i, f32x16 x) { visit(i, exponential(x - highest)); });
            };
            double total = 0;
            for (int block = 0; block < blocks; block++) {
                f32x16 sum = {};
                for_each_weight(block, [&](int, f32x16 weight) { sum += weight; });
                block_cdf[block] = total += reduce_add(sum);
            }
            if (!(highest > MIN_LOGIT) || !std::isfinite(total)) {
                tokens[row] = 0;
                logprobs[row] = NAN;
                continue;
            }
            double target = uniforms[row] * total;
            auto begin = block_cdf.begin();
            int block = std::min<int>(std::upper_bound(begin, block_cdf.end(), target) - begin, blocks - 1);
            std::fill(block_weights.begin(), block_weights.end(), 0.0f);
            for_each_weight(block, [&](int i, f32x16 weight) { store(weight, &block_weights[i]); });
            double cumulative = block ? block_cdf[block - 1] : 0.0;
            int chosen = 0;
            for (int i = 0; i < SUM_BLOCK; i++) {
                if (block_weights[i] > 0) chosen = i;  // by rounding the target may lie past the last possible token
                cumulative += block_weights[i];
                if (cumulative > target) break;
            }
            tokens[row] = int64_t(block) * SUM_BLOCK + chosen;
            logprobs[row] = to_float(z[tokens[row]]) / temperature - highest - float(std::log(total));
        }
    }
}

// For every row: log p of its token, entropy, and logsumexp of the logits.
template <typename Scalar>
void logprob_entropy(const Scalar* logits, const int64_t* tokens, float temperature, float* logprobs, float* entropies,
    float* logsumexps, int rows, int vocabulary, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const Scalar* z = logits + size_t(row) * vocabulary;
        float highest = max_logit(z, vocabulary, temperature);
        double total = 0, product = 0;
        for (int from = 0; from < vocabulary; from += SUM_BLOCK) {
            f32x16 sum = {}, weighted_sum = {};
            for_each_logit(z + from, std::min(SUM_BLOCK, vocabulary - from), temperature, [&](int, f32x16 x) {
                f32x16 shifted = x - highest, weight = exponential(shifted);
                sum += weight;
                weighted_sum += weight * shifted;
            });
            total += reduce_add(sum);
            product += reduce_add(weighted_sum);
        }
        float log_total = float(std::log(total));
        logsumexps[row] = highest + log_total;
        entropies[row] = log_total - float(product / total);
        logprobs[row] = to_float(z[tokens[row]]) / temperature - highest - log_total;
    }
}

// Replace logits [rows, width] by their gradients, for a slice of the vocabulary that begins with token `first`:
// d log p_token / dz = [token] - p and dH / dz = -p (log p + H), divided by the temperature. `dlogprobs` and
// `dentropies` may be null.
template <typename Scalar>
void logit_gradients(Scalar* logits, const int64_t* tokens, const float* logsumexps, const float* entropies,
    const float* dlogprobs, const float* dentropies, float temperature, int64_t first, int rows, int width,
    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        Scalar* z = logits + size_t(row) * width;
        float dlogprob = dlogprobs ? dlogprobs[row] : 0.0f, dentropy = dentropies ? dentropies[row] : 0.0f;
        float entropy = entropies[row], logsumexp = logsumexps[row];
        auto gradient_of_others = [&](f32x16 x) {
            f32x16 logp = x - logsumexp;
            return exponential(logp) * (-dlogprob - dentropy * (logp + entropy));
        };
        int64_t token = tokens[row] - first;
        float of_token = 0;
        bool in_slice = token >= 0 && token < width;
        if (in_slice) of_token = gradient_of_others(broadcast(to_float(z[token]) / temperature))[0] + dlogprob;
        for_each_logit(z, width, temperature, [&](int i, f32x16 x) {
            f32x16 gradient = gradient_of_others(x) / temperature;
            if (i + LANES <= width) store(gradient, z + i);
            else
                for (int lane = 0; i + lane < width; lane++) from_float(gradient[lane], &z[i + lane]);
        });
        if (in_slice) from_float(of_token / temperature, &z[token]);
    }
}

}  // namespace
