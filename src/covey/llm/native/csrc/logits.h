// From logits to a drawn token, to log-probability and entropy, and back to the gradients of the logits.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

// Logits divided by the temperature, `count` of them in vectors from `z` on; what follows the last one never has mass.
template <typename Value, typename Visit>
inline void each_logit(const Value* z, int count, float temperature, Visit visit) {
    for (int i = 0; i < count; i += LANES) {
        Floats x = broadcast(IMPOSSIBLE);
        if (i + LANES <= count) x = load(z + i);
        else
            for (int lane = 0; i + lane < count; lane++) x[lane] = to_float(z[i + lane]);
        if (temperature != 1.0f) x /= temperature;
        visit(i, x < broadcast(IMPOSSIBLE) ? broadcast(IMPOSSIBLE) : x);  // -infinity times a mass of 0 would be NaN; NaN stays
    }
}

template <typename Value>
inline float highest_logit(const Value* z, int vocabulary, float temperature) {
    Floats top = broadcast(IMPOSSIBLE);
    each_logit(z, vocabulary, temperature, [&](int, Floats x) { top = greater(x, top); });
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, top[i]);
    return highest;
}

// Sums over blocks, then over the sums: precise, and what token_sampling.py draws from.
constexpr int BLOCK = 256;

// The token that token_sampling.py draws: min {v : sum_{w <= v} p_w > u}, first among sums over blocks, then in the
// block. Returns the number of rows without a distribution (a logit is NaN or +infinity, or all are -infinity); their
// token is -1.
template <typename Value>
int sample_tokens(const Value* logits, const double* uniforms, float temperature, int64_t* tokens, float* logprobs, int rows,
    int vocabulary, int threads) {
    int blocks = (vocabulary + BLOCK - 1) / BLOCK, failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        std::vector<double> upto(blocks);
        std::vector<float> inside(BLOCK);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            const Value* z = logits + size_t(row) * vocabulary;
            float highest = highest_logit(z, vocabulary, temperature);
            auto masses = [&](int block, auto visit) {
                int from = block * BLOCK;
                each_logit(z + from, std::min(BLOCK, vocabulary - from), temperature,
                    [&](int i, Floats x) { visit(i, exponential(x - highest)); });
            };
            double total = 0;
            for (int block = 0; block < blocks; block++) {
                Floats mass = {};
                masses(block, [&](int, Floats part) { mass += part; });
                upto[block] = total += sum(mass);
            }
            if (!(highest > IMPOSSIBLE) || !std::isfinite(total)) {
                failed++;
                tokens[row] = -1;
                logprobs[row] = NAN;
                continue;
            }
            double wanted = uniforms[row] * total;
            int block = std::min<int>(std::upper_bound(upto.begin(), upto.end(), wanted) - upto.begin(), blocks - 1);
            std::fill(inside.begin(), inside.end(), 0.0f);
            masses(block, [&](int i, Floats part) { store(part, &inside[i]); });
            double reached = block ? upto[block - 1] : 0.0;
            int chosen = 0;
            for (int i = 0; i < BLOCK; i++) {
                if (inside[i] > 0) chosen = i;  // rounding may point past the last possible token: that one is meant
                reached += inside[i];
                if (reached > wanted) break;
            }
            tokens[row] = int64_t(block) * BLOCK + chosen;
            logprobs[row] = to_float(z[tokens[row]]) / temperature - highest - float(std::log(total));
        }
    }
    return failed;
}

// Of every row: log p of its token, entropy, and log sum exp of the logits.
template <typename Value>
void logprob_entropy(const Value* logits, const int64_t* tokens, float temperature, float* logprobs, float* entropies,
    float* log_totals, int rows, int vocabulary, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const Value* z = logits + size_t(row) * vocabulary;
        float highest = highest_logit(z, vocabulary, temperature);
        double total = 0, product = 0;
        for (int from = 0; from < vocabulary; from += BLOCK) {
            Floats mass = {}, masses_times_logits = {};
            each_logit(z + from, std::min(BLOCK, vocabulary - from), temperature, [&](int, Floats x) {
                Floats below = x - highest, part = exponential(below);
                mass += part;
                masses_times_logits += part * below;
            });
            total += sum(mass);
            product += sum(masses_times_logits);
        }
        float log_mass = float(std::log(total));
        log_totals[row] = highest + log_mass;
        entropies[row] = log_mass - float(product / total);
        logprobs[row] = to_float(z[tokens[row]]) / temperature - highest - log_mass;
    }
}

// From the logits of `width` tokens, the first of which is `first`, to their gradients, in place:
// d log p_token / dz = [token] - p and dH / dz = -p (log p + H), divided by the temperature.
template <typename Value>
void logit_gradients(Value* logits, const int64_t* tokens, const float* log_totals, const float* entropies,
    const float* dlogprobs, const float* dentropies, float temperature, int64_t first, int rows, int width,
    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        Value* z = logits + size_t(row) * width;
        float dlogprob = dlogprobs ? dlogprobs[row] : 0.0f, dentropy = dentropies ? dentropies[row] : 0.0f;
        float entropy = entropies[row], log_total = log_totals[row];
        auto slope = [&](Floats x) {
            Floats logp = x - log_total;
            return exponential(logp) * (-dlogprob - dentropy * (logp + entropy));
        };
        int64_t token = tokens[row] - first;
        float of_token = 0;
        bool here = token >= 0 && token < width;
        if (here) of_token = slope(broadcast(to_float(z[token]) / temperature))[0] + dlogprob;
        each_logit(z, width, temperature, [&](int i, Floats x) {
            Floats gradient = slope(x) / temperature;
            if (i + LANES <= width) store(gradient, z + i);
            else
                for (int lane = 0; i + lane < width; lane++) from_float(gradient[lane], &z[i + lane]);
        });
        if (here) from_float(of_token / temperature, &z[token]);
    }
}

}  // namespace
