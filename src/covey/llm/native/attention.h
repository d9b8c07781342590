// Attention of one new token per row to its prompt, which it shares with its group, and to its own earlier tokens.
//
// Shapes: R rows, H heads, K key-value heads, M = H / K, D head width, P prompt tokens.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "layers.h"
#include "vectors.h"

namespace {

// x cos + rotate_half(x) sin, each product rounded as transformers does.
template <typename Value>
inline void rotate(float* x, const Value* cosine, const Value* sine, int width) {
    int half = width / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = load(x + i), b = load(x + half + i);
        Floats left = rounded<Value>(a * load(cosine + i)) - rounded<Value>(b * load(sine + i));
        Floats right = rounded<Value>(b * load(cosine + half + i)) + rounded<Value>(a * load(sine + half + i));
        store(rounded<Value>(left), x + i);
        store(rounded<Value>(right), x + half + i);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = rounded<Value>(rounded<Value>(a * widen(cosine[i])) - rounded<Value>(b * widen(sine[i])));
        x[i + half] =
            rounded<Value>(rounded<Value>(b * widen(cosine[i + half])) + rounded<Value>(a * widen(sine[i + half])));
    }
}

// scores[m][t] = query[m] . key[t] for t < tokens, from keys that lie in blocks of PAD tokens, [D][PAD] each: what is
// read together lies together.
template <typename Value, int M>
inline void score(const float* query, int width, const Value* keys, int tokens, float* scores, int pitch) {
    for (int t = 0; t < tokens; t += PAD) {
        Floats low[M] = {}, high[M] = {};
        for (int d = 0; d < width; d++, keys += PAD) {
            Floats a, b;
            load_piece(keys, a, b);
            for (int m = 0; m < M; m++) {
                low[m] += query[m * width + d] * a;
                high[m] += query[m * width + d] * b;
            }
        }
        for (int m = 0; m < M; m++) {
            store(low[m], scores + m * pitch + t);
            store(high[m], scores + m * pitch + t + LANES);
        }
    }
}

// out[m] += sum_t weights[m][t] value[t], values lie as [tokens][stride].
template <typename Value, int M>
inline void blend(const float* weights, int pitch, const Value* values, int stride, int tokens, float* out) {
    for (int d = 0; d < stride; d += PAD) {
        Floats low[M], high[M];
        for (int m = 0; m < M; m++) {
            low[m] = load(out + m * stride + d);
            high[m] = load(out + m * stride + d + LANES);
        }
        for (int t = 0; t < tokens; t++) {
            Floats a, b;
            load_piece(values + size_t(t) * stride + d, a, b);
            for (int m = 0; m < M; m++) {
                low[m] += weights[m * pitch + t] * a;
                high[m] += weights[m * pitch + t] * b;
            }
        }
        for (int m = 0; m < M; m++) {
            store(low[m], out + m * stride + d);
            store(high[m], out + m * stride + d + LANES);
        }
    }
}

// exp(scores - max) in place; returns its sum. What lies between the two parts and behind them becomes 0.
inline float soften(float* scores, int first, int gap, int second, int pitch) {
    auto forbid = [&](int from, int to) { std::fill(scores + from, scores + to, -INFINITY); };
    forbid(first, gap);
    forbid(gap + second, pitch);
    Floats top = all(-INFINITY);
    for (int t = 0; t < pitch; t += LANES) top = greater(load(scores + t), top);
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, top[i]);
    Floats total = {};
    for (int t = 0; t < pitch; t += LANES) {
        Floats mass = exponential(load(scores + t) - highest);
        total += mass;
        store(mass, scores + t);
    }
    return sum(total);
}

// Where everything lies for one layer's attention of one new token per row. library.py declares the same fields.
struct Attention {
    const void *qkv, *cosine, *sine;       // [R, (H + 2 K) D], [R, D], [R, D]
    const void *query_norm, *key_norm;     // [D], or null
    const int64_t *prompt_keys;            // [R] addresses of [layers, K, padded(P) / PAD, D, PAD]
    const int64_t *prompt_values;          // [R] addresses of [layers, K, P, padded(D)]
    const int32_t *prompt_lengths;         // [R]
    void *own_keys;                        // of this layer: [slots, K, capacity / PAD, D, PAD]
    void *own_values;                      // of this layer: [slots, K, capacity, padded(D)]
    const int32_t *slots, *decoded;        // [R]: where a row's own tokens lie, and how many there are
    void *out;                             // [R, H D]
    int32_t rows, heads, kv_heads, width, capacity, layer, threads;
    float scaling, epsilon;
};

// Some query heads of one row that share a key-value head. Keys lie in blocks of PAD tokens, values as
// [tokens][padded(D)].
template <typename Value, int M>
void attend_heads(const float* query, const Attention& shape, const Value* prompt_keys, const Value* prompt_values,
    int prompt, const Value* own_keys, const Value* own_values, int own, std::vector<float>& scratch, Value* out) {
    int gap = padded(prompt), pitch = gap + padded(own), stride = padded(shape.width);
    scratch.resize(size_t(M) * (pitch + stride));
    float* scores = scratch.data();
    float* blended = scores + size_t(M) * pitch;
    score<Value, M>(query, shape.width, prompt_keys, prompt, scores, pitch);
    score<Value, M>(query, shape.width, own_keys, own, scores + gap, pitch);
    std::fill(blended, blended + M * stride, 0.0f);
    float total[M];
    for (int m = 0; m < M; m++) total[m] = soften(scores + size_t(m) * pitch, prompt, gap, own, pitch);
    blend<Value, M>(scores, pitch, prompt_values, stride, prompt, blended);
    blend<Value, M>(scores + gap, pitch, own_values, stride, own, blended);
    for (int m = 0; m < M; m++) {
        const float* from = blended + m * stride;
        Value* to = out + m * shape.width;
        int d = 0;
        for (; d + LANES <= shape.width; d += LANES) store(load(from + d) / total[m], to + d);
        for (; d < shape.width; d++) narrow(from[d] / total[m], &to[d]);
    }
}

template <typename Value>
void attend(const Attention& shape) {
    auto qkv = static_cast<const Value*>(shape.qkv);
    auto cosine = static_cast<const Value*>(shape.cosine), sine = static_cast<const Value*>(shape.sine);
    auto own_keys = static_cast<Value*>(shape.own_keys), own_values = static_cast<Value*>(shape.own_values);
    int rows = shape.rows;
    int width = shape.width, stride = padded(width), queries = shape.heads / shape.kv_heads;
    size_t row_stride = size_t(shape.heads + 2 * shape.kv_heads) * width;
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> query(size_t(queries) * width), key(width), scratch;
#pragma omp for schedule(dynamic, 4)
        for (int task = 0; task < rows * shape.kv_heads; task++) {
            int head = task / rows, row = task % rows;  // neighbours read the same prompt
            const Value* mine = qkv + row * row_stride;
            const Value* cosines = cosine + size_t(row) * width;
            const Value* sines = sine + size_t(row) * width;
            auto prepare = [&](const Value* from, const void* norm_weight, float* to) {
                auto norm = static_cast<const Value*>(norm_weight);
                for (int d = 0; d < width; d++) to[d] = widen(from[d]);
                if (norm) {
                    float scale = inverse_root_mean_square(to, width, shape.epsilon);
                    for (int d = 0; d < width; d++)
                        to[d] = rounded<Value>(rounded<Value>(to[d] * scale) * widen(norm[d]));
                }
                rotate(to, cosines, sines, width);
            };
            for (int m = 0; m < queries; m++) {
                float* to = query.data() + size_t(m) * width;
                prepare(mine + size_t(head * queries + m) * width, shape.query_norm, to);
                for (int d = 0; d < width; d++) to[d] *= shape.scaling;
            }
            prepare(mine + size_t(shape.heads + head) * width, shape.key_norm, key.data());

            size_t place = size_t(shape.slots[row]) * shape.kv_heads + head;
            Value* keys = own_keys + place * width * shape.capacity;
            Value* values = own_values + place * stride * shape.capacity;
            int now = shape.decoded[row], prompt = shape.prompt_lengths[row];
            prefetch(keys, size_t(padded(now + 1)) * width * sizeof(Value));  // arrives while the prompt is read
            prefetch(values, size_t(now) * stride * sizeof(Value));
            const Value* value = mine + size_t(shape.heads + shape.kv_heads + head) * width;
            int slot = place_of(now % PAD, value);
            for (int d = 0; d < width; d++) narrow(key[d], &keys[size_t(now / PAD * width + d) * PAD + slot]);
            for (int d = 0; d < width; d++) values[size_t(now) * stride + place_of(d, value)] = value[d];

            size_t part = size_t(shape.layer) * shape.kv_heads + head;
            const Value* shared_keys =
                reinterpret_cast<const Value*>(shape.prompt_keys[row]) + part * width * padded(prompt);
            const Value* shared_values =
                reinterpret_cast<const Value*>(shape.prompt_values[row]) + part * prompt * stride;
            for (int m = 0; m < queries;) {
                Value* to = static_cast<Value*>(shape.out) + (size_t(row) * shape.heads + head * queries + m) * width;
                const float* from = query.data() + size_t(m) * width;
                auto some = [&](auto count) {
                    attend_heads<Value, decltype(count)::value>(
                        from, shape, shared_keys, shared_values, prompt, keys, values, now + 1, scratch, to);
                    m += decltype(count)::value;
                };
                int left = queries - m;
                if (left >= 4) some(std::integral_constant<int, 4>());
                else if (left == 3) some(std::integral_constant<int, 3>());
                else if (left == 2) some(std::integral_constant<int, 2>());
                else some(std::integral_constant<int, 1>());
            }
        }
    }
}

}  // namespace
