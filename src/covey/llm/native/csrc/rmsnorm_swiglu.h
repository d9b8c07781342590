// RMSNorm, softmax and the gated MLP: forward for a decoder; the first and the last forward and backward for training.
//
// Shapes: W hidden width.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

inline float inverse_root_mean_square(const float* x, int width, float epsilon) {
    Floats squares = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / width + epsilon);
}

// out = weight * x / rms(x). Returns 1 / rms(x).
template <typename Value>
inline float normalise(const float* x, const Value* weight, Value* out, int width, float epsilon) {
    float scale = inverse_root_mean_square(x, width, epsilon);
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(load(x + i) * scale * load(weight + i), out + i);
    for (; i < width; i++) from_float(x[i] * scale * to_float(weight[i]), &out[i]);
    return scale;
}

// total = hidden + added, where anything is added; out = weight * total / rms(total). Training keeps 1 / rms of every
// row in `scales`. `Hidden` is fp32 for the sum that runs through all layers, whose small steps bf16 would round away.
template <typename Hidden, typename Value>
void add_and_normalise(const Hidden* hidden, const Value* added, Hidden* total, const Value* weight, Value* out,
    float* scales, int rows, int width, float epsilon, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(width);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            size_t begin = size_t(row) * width;
            int i = 0;
            for (; i + LANES <= width; i += LANES) {
                Floats sum = load(hidden + begin + i);
                if (added) store(sum += load(added + begin + i), total + begin + i);
                store(sum, &x[i]);
            }
            for (; i < width; i++) {
                x[i] = to_float(hidden[begin + i]);
                if (added) from_float(x[i] += to_float(added[begin + i]), &total[begin + i]);
            }
            float scale = normalise(x.data(), weight, out + begin, width, epsilon);
            if (scales) scales[row] = scale;
        }
    }
}

// With n = x * scale: dx = scale * (w dy - n mean(w dy n)), and what reached x past the norm; of dw = sum over rows of
// dy n every thread leaves its part in `dweights` [threads, W]. Which rows a thread has depends on their number alone,
// so the sum is always the same. `dadded`, where it is given, is dx once more, for what was added in another type.
template <typename Hidden, typename Value>
void normalise_backward(const Hidden* x, const Value* weight, const float* scales, const Value* dy, const Hidden* past,
    Hidden* dx, Value* dadded, float* dweights, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; part++) {
        float* dweight = dweights + size_t(part) * width;
        std::fill(dweight, dweight + width, 0.0f);
        std::vector<float> n(width), dn(width);
        for (int row = int(int64_t(rows) * part / threads); row < int(int64_t(rows) * (part + 1) / threads); row++) {
            size_t begin = size_t(row) * width;
            const Hidden* from = x + begin;
            const Value* above = dy + begin;
            float scale = scales[row], product = 0;
            Floats products = {};
            int i = 0;
            for (; i + LANES <= width; i += LANES) {
                Floats normal = load(from + i) * scale, up = load(above + i), down = up * load(weight + i);
                store(load(dweight + i) + up * normal, dweight + i);
                products += down * normal;
                store(normal, &n[i]);
                store(down, &dn[i]);
            }
            for (; i < width; i++) {
                n[i] = to_float(from[i]) * scale;
                dn[i] = to_float(above[i]) * to_float(weight[i]);
                dweight[i] += to_float(above[i]) * n[i];
                product += dn[i] * n[i];
            }
            float mean = (product + sum(products)) / width;
            for (i = 0; i + LANES <= width; i += LANES) {
                Floats down = (load(&dn[i]) - load(&n[i]) * mean) * scale;
                if (past) down += load(past + begin + i);
                store(down, dx + begin + i);
                if (dadded) store(down, dadded + begin + i);
            }
            for (; i < width; i++) {
                float down = (dn[i] - n[i] * mean) * scale;
                if (past) down += to_float(past[begin + i]);
                from_float(down, &dx[begin + i]);
                if (dadded) from_float(down, &dadded[begin + i]);
            }
        }
    }
}

// Scores of some tokens, in memory that goes on to `end`, a multiple of LANES.
struct Seen {
    float* scores;
    int tokens, end;
};

// exp(scaling (scores - max)) in place, over two parts together; returns its sum. Past the tokens there is 0 then.
inline float softmax_inplace(Seen first, Seen second, float scaling) {
    Floats top = broadcast(-INFINITY), total = {};
    for (Seen part : {first, second}) {
        std::fill(part.scores + part.tokens, part.scores + part.end, -INFINITY);
        for (int t = 0; t < part.end; t += LANES) top = greater(load(part.scores + t), top);
    }
    float highest = largest(top);
    for (Seen part : {first, second}) {
        for (int t = 0; t < part.end; t += LANES) {
            Floats mass = exponential((load(part.scores + t) - highest) * scaling);
            total += mass;
            store(mass, part.scores + t);
        }
    }
    return sum(total);
}

// silu(x) = x / (1 + exp(-x)), and its slope.
inline Floats sigmoid(Floats x) {
    Floats e = exponential(x > broadcast(0.0f) ? -x : x);
    return (x > broadcast(0.0f) ? broadcast(1.0f) : e) / (1.0f + e);
}
inline Floats silu(Floats x) { return x * sigmoid(x); }
inline Floats silu_slope(Floats x) {
    Floats y = sigmoid(x);
    return y * (1.0f + x * (1.0f - y));
}

// out = silu(gate) * up; the rows of both lie `stride` apart.
template <typename Value>
void swiglu(const Value* gates, const Value* ups, int stride, Value* out, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const Value* gate = gates + size_t(row) * stride;
        const Value* up = ups + size_t(row) * stride;
        Value* mine = out + size_t(row) * width;
        int i = 0;
        for (; i + LANES <= width; i += LANES) store(silu(load(gate + i)) * load(up + i), mine + i);
        for (; i < width; i++) from_float(silu(broadcast(to_float(gate[i])))[0] * to_float(up[i]), &mine[i]);
    }
}

// dgate = d up silu'(gate), dup = d silu(gate).
template <typename Value>
void swiglu_backward(const Value* gates, const Value* ups, const Value* d, Value* dgates, Value* dups, int64_t count,
    int threads) {
    int64_t whole = count / LANES * LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats gate = load(gates + i), above = load(d + i);
        store(above * silu(gate), dups + i);
        store(above * load(ups + i) * silu_slope(gate), dgates + i);
    }
    for (int64_t i = whole; i < count; i++) {
        Floats gate = broadcast(to_float(gates[i]));
        float above = to_float(d[i]);
        from_float(above * silu(gate)[0], &dups[i]);
        from_float(above * to_float(ups[i]) * silu_slope(gate)[0], &dgates[i]);
    }
}

}  // namespace
