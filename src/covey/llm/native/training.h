// Attention of training, but for its matrix products: heads laid where the products want them (../blocks.py), and the
// softmax over a prompt and over a sequence's own tokens, forward and backward.
//
// Shapes: N tokens, K key-value heads, M heads side by side for each of them, D head width.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "vectors.h"

namespace {

// `count` numbers, the last vector overlapping the one before it.
template <typename Function>
inline void by_vectors(int count, Function each) {
    for (int i = 0; i + LANES <= count; i += LANES) each(i);
    if (count % LANES && count > LANES) each(count - LANES);
}
template <typename Value>
inline void widen_row(const Value* from, int count, float* to) {
    by_vectors(count, [&](int i) { store(load(from + i), to + i); });
    for (int i = 0; count < LANES && i < count; i++) to[i] = widen(from[i]);
}
template <typename Value>
inline void narrow_row(const float* from, int count, Value* to) {
    by_vectors(count, [&](int i) { store(load(from + i), to + i); });
    for (int i = 0; count < LANES && i < count; i++) narrow(from[i], &to[i]);
}

// The transpose of `rotate`, for gradients: rounded once.
template <typename Value>
inline void rotate_back(float* x, const Value* cosine, const Value* sine, int width) {
    int half = width / 2;
    for (int i = 0; i < half; i++) {
        float left = x[i], right = x[half + i];
        x[i] = left * widen(cosine[i]) + right * widen(sine[half + i]);
        x[half + i] = right * widen(cosine[half + i]) - left * widen(sine[i]);
    }
}

// Between tokens, [N, K M D], and their places, [.., M D]: token n's heads of key-value head k lie at place
// begins[n] + k pitches[n]. Out there they are rotated, where there are angles ([N, D]); on the way back, which
// gradients take, rotated back.
template <typename Value>
void arrange(Value* tokens, Value* places, const Value* cosine, const Value* sine, const int64_t* begins,
    const int64_t* pitches, int count, int kv_heads, int heads, int width, bool back, int threads) {
    size_t chunk = size_t(heads) * width;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(width);
#pragma omp for schedule(static)
        for (int n = 0; n < count; n++) {
            for (int k = 0; k < kv_heads; k++) {
                Value* here = tokens + (size_t(n) * kv_heads + k) * chunk;
                Value* there = places + size_t(begins[n] + k * pitches[n]) * chunk;
                if (!cosine) {
                    std::copy_n(back ? there : here, chunk, back ? here : there);
                    continue;
                }
                const Value *cosines = cosine + size_t(n) * width, *sines = sine + size_t(n) * width;
                for (size_t at = 0; at < chunk; at += width) {
                    widen_row((back ? there : here) + at, width, x.data());
                    if (back) rotate_back(x.data(), cosines, sines, width);
                    else rotate(x.data(), cosines, sines, width);
                    narrow_row(x.data(), width, (back ? here : there) + at);
                }
            }
        }
    }
}

// A block's scores, [K, G, R, queries, M] rows of them: each over the tokens of its group's prompt and over those of its
// own sequence, of which it may see the first `first + query + 1`.
struct Scores {
    const int32_t* prompts;  // [G] tokens of each prompt, or null where there is none
    int32_t kv_heads, groups, rows, first, queries, heads, prompt, own, threads;
    float scaling;
    int64_t count() const { return int64_t(kv_heads) * groups * rows * queries * heads; }
    int seen(int64_t row) const { return int(first + row / heads % queries) + 1; }
    int shared(int64_t row) const { return prompts ? prompts[row / (int64_t(heads) * queries * rows) % groups] : 0; }
};

// softmax(scaling * scores) in place, one over both parts. `rest`, where given, is what rounding took from the scores.
template <typename Value>
void soften_scores(const Scores& shape, Value* prompt_scores, Value* own_scores, const Value* prompt_rest,
    const Value* own_rest) {
    int gap = padded(shape.prompt);
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> scratch(gap + padded(shape.own)), rest(scratch.size());
#pragma omp for schedule(static)
        for (int64_t row = 0; row < shape.count(); row++) {
            Value *prompt = prompt_scores + row * shape.prompt, *own = own_scores + row * shape.own;
            int shared = shape.shared(row), seen = shape.seen(row), pitch = gap + padded(seen);
            widen_row(prompt, shared, scratch.data());
            widen_row(own, seen, scratch.data() + gap);
            if (own_rest) {
                if (shared) widen_row(prompt_rest + row * shape.prompt, shared, rest.data());
                widen_row(own_rest + row * shape.own, seen, rest.data() + gap);
                for (int t = 0; t < pitch; t += LANES) store(load(&scratch[t]) + load(&rest[t]), &scratch[t]);
            }
            Seen of_prompt{scratch.data(), shared, gap}, of_own{scratch.data() + gap, seen, padded(seen)};
            float share = 1.0f / soften(of_prompt, of_own, shape.scaling);
            for (int t = 0; t < pitch; t += LANES) store(load(&scratch[t]) * share, &scratch[t]);
            narrow_row(scratch.data(), shape.prompt, prompt);
            narrow_row(scratch.data() + gap, seen, own);
            std::fill(own + seen, own + shape.own, Value{});
        }
    }
}

// From gradients of the weights to those of the scores, in place: scaling * w (dw - mean dw), the mean weighted by w.
template <typename Value>
void soften_backward(const Scores& shape, const Value* prompt_weights, const Value* own_weights, Value* dprompt,
    Value* down) {
    int gap = padded(shape.prompt), room = gap + padded(shape.own);
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> weights(room), slopes(room);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < shape.count(); row++) {
            int seen = shape.seen(row), pitch = gap + padded(seen);
            auto collect = [&](const Value* shared, const Value* own, std::vector<float>& to) {
                std::fill(to.begin() + shape.prompt, to.begin() + gap, 0.0f);
                std::fill(to.begin() + gap + seen, to.begin() + pitch, 0.0f);
                widen_row(shared + row * shape.prompt, shape.prompt, to.data());
                widen_row(own + row * shape.own, seen, to.data() + gap);
            };
            collect(prompt_weights, own_weights, weights);
            collect(dprompt, down, slopes);
            Floats products = {}, total = {};
            for (int t = 0; t < pitch; t += LANES) {
                products += load(&weights[t]) * load(&slopes[t]);
                total += load(&weights[t]);
            }
            float mean = sum(products) / sum(total);  // stored weights do not quite add up to 1
            for (int t = 0; t < pitch; t += LANES)
                store(load(&weights[t]) * (load(&slopes[t]) - mean) * shape.scaling, &slopes[t]);
            Value* own = down + row * shape.own;
            narrow_row(slopes.data(), shape.prompt, dprompt + row * shape.prompt);
            narrow_row(slopes.data() + gap, seen, own);
            std::fill(own + seen, own + shape.own, Value{});
        }
    }
}

}  // namespace
