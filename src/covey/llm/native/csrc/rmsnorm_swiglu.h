// RMSNorm (with the residual add fused in) and SwiGLU, forward and backward, and the softmax of decode attention.
//
// Each is one pass over memory; rows are [rows, W], contiguous. Vectors only; the remainder of a row is scalar.
// Entry points: `add_rmsnorm`, `rmsnorm_backward`, `swiglu`, `swiglu_backward`; within other kernels `rmsnorm`,
// `inverse_rms`, `softmax_inplace`, `silu`.
//
// Shapes: W hidden width.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

// 1 / sqrt(mean(x^2) + epsilon).
inline float inverse_rms(const float* x, int width, float epsilon) {
    f32x16 squares = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = reduce_add(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / width + epsilon);
}

// out = weight * x / rms(x). Returns 1 / rms(x).
template <typename Scalar>
inline float rmsnorm(const float* x, const Scalar* weight, Scalar* out, int width, float epsilon) {
    float scale = inverse_rms(x, width, epsilon);
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(load(x + i) * scale * load(weight + i), out + i);
    for (; i < width; i++) from_float(x[i] * scale * to_float(weight[i]), &out[i]);
    return scale;
}

// total = hidden + added, if `added` is not null; out = weight * total / rms(total); scales = 1 / rms of every row, if
// `scales` is not null. `Residual` is fp32 for the residual stream, because bf16 would round small updates away.
template <typename Residual, typename Scalar>
void add_rmsnorm(const Residual* hidden, const Scalar* added, Residual* total, const Scalar* weight, Scalar* out,
    float* scales, int rows, int width, float epsilon, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(width);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            size_t begin = size_t(row) * width;
            int i = 0;
            for (; i + LANES <= width; i += LANES) {
                f32x16 sum = load(hidden + begin + i);
                if (added) store(sum += load(added + begin + i), total + begin + i);
                store(sum, &x[i]);
            }
            for (; i < width; i++) {
                x[i] = to_float(hidden[begin + i]);
                if (added) from_float(x[i] += to_float(added[begin + i]), &total[begin + i]);
            }
            float scale = rmsnorm(x.data(), weight, out + begin, width, epsilon);
            if (scales) scales[row] = scale;
        }
    }
}

// With n = x * scale: dx = scale * (w dy - n mean(w dy n)) + dresidual, where `dresidual`, the gradient that reached x
// past the norm, may be null. `dadded`, if not null, receives dx once more in the type of the addend. dw is the sum
// over rows of dy n: every thread writes its partial sum to `dweights` [threads, W]. The rows of a thread depend on
// their number alone, so the sum is reproducible.
template <typename Residual, typename Scalar>
void rmsnorm_backward(const Residual* x, const Scalar* weight, const float* scales, const Scalar* dy,
    const Residual* dresidual, Residual* dx, Scalar* dadded, float* dweights, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; part++) {
        float* dweight = dweights + size_t(part) * width;
        std::fill(dweight, dweight + width, 0.0f);
        std::vector<float> n(width), dn(width);
        for (int row = int(int64_t(rows) * part / threads); row < int(int64_t(rows) * (part + 1) / threads); row++) {
            size_t begin = size_t(row) * width;
            const Residual* from = x + begin;
            const Scalar* dout = dy + begin;
            float scale = scales[row], remainder = 0;
            f32x16 products = {};
            int i = 0;
            for (; i + LANES <= width; i += LANES) {
                f32x16 normed = load(from + i) * scale, upstream = load(dout + i);
                f32x16 dnormed = upstream * load(weight + i);
                store(load(dweight + i) + upstream * normed, dweight + i);
                products += dnormed * normed;
                store(normed, &n[i]);
                store(dnormed, &dn[i]);
            }
            for (; i < width; i++) {
                n[i] = to_float(from[i]) * scale;
                dn[i] = to_float(dout[i]) * to_float(weight[i]);
                dweight[i] += to_float(dout[i]) * n[i];
                remainder += dn[i] * n[i];
            }
            float mean = (remainder + reduce_add(products)) / width;
            for (i = 0; i + LANES <= width; i += LANES) {
                f32x16 gradient = (load(&dn[i]) - load(&n[i]) * mean) * scale;
                if (dresidual) gradient += load(dresidual + begin + i);
                store(gradient, dx + begin + i);
                if (dadded) store(gradient, dadded + begin + i);
            }
            for (; i < width; i++) {
                float gradient = (dn[i] - n[i] * mean) * scale;
                if (dresidual) gradient += to_float(dresidual[begin + i]);
                from_float(gradient, &dx[begin + i]);
                if (dadded) from_float(gradient, &dadded[begin + i]);
            }
        }
    }
}

// Scores of `tokens` tokens in memory padded to `end`, a multiple of LANES.
struct PaddedScores {
    float* scores;
    int tokens, end;
};

// Replace the scores of two parts by exp(scaling (scores - max)), with the maximum over both, and padding by 0. Returns
// the sum.
inline float softmax_inplace(PaddedScores first, PaddedScores second, float scaling) {
    f32x16 top = broadcast(-INFINITY), total = {};
    for (PaddedScores part : {first, second}) {
        std::fill(part.scores + part.tokens, part.scores + part.end, -INFINITY);
        for (int t = 0; t < part.end; t += LANES) top = max(load(part.scores + t), top);
    }
    float highest = reduce_max(top);
    for (PaddedScores part : {first, second}) {
        for (int t = 0; t < part.end; t += LANES) {
            f32x16 weight = exponential((load(part.scores + t) - highest) * scaling);
            total += weight;
            store(weight, part.scores + t);
        }
    }
    return reduce_add(total);
}

// silu(x) = x sigmoid(x), and its derivative.
inline f32x16 sigmoid(f32x16 x) {
    f32x16 e = exponential(select(x > broadcast(0.0f), -x, x));
    return select(x > broadcast(0.0f), broadcast(1.0f), e) / (1.0f + e);
}
inline f32x16 silu(f32x16 x) { return x * sigmoid(x); }
inline f32x16 silu_derivative(f32x16 x) {
    f32x16 y = sigmoid(x);
    return y * (1.0f + x * (1.0f - y));
}

// out = silu(gate) * up. The rows of `gates` and `ups` are `stride` apart, so they may be halves of one matrix.
template <typename Scalar>
void swiglu(const Scalar* gates, const Scalar* ups, int stride, Scalar* out, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const Scalar* gate = gates + size_t(row) * stride;
        const Scalar* up = ups + size_t(row) * stride;
        Scalar* to = out + size_t(row) * width;
        int i = 0;
        for (; i + LANES <= width; i += LANES) store(silu(load(gate + i)) * load(up + i), to + i);
        for (; i < width; i++) from_float(silu(broadcast(to_float(gate[i])))[0] * to_float(up[i]), &to[i]);
    }
}

// dgate = dout up silu'(gate), dup = dout silu(gate), over `count` numbers.
template <typename Scalar>
void swiglu_backward(const Scalar* gates, const Scalar* ups, const Scalar* dout, Scalar* dgates, Scalar* dups,
    int64_t count, int threads) {
    int64_t vectorised = count / LANES * LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < vectorised; i += LANES) {
        f32x16 gate = load(gates + i), upstream = load(dout + i);
        store(upstream * silu(gate), dups + i);
        store(upstream * load(ups + i) * silu_derivative(gate), dgates + i);
    }
    for (int64_t i = vectorised; i < count; i++) {
        f32x16 gate = broadcast(to_float(gates[i]));
        float upstream = to_float(dout[i]);
        from_float(upstream * silu(gate)[0], &dups[i]);
        from_float(upstream * to_float(ups[i]) * silu_derivative(gate)[0], &dgates[i]);
    }
}

}  // namespace
