// Attention of one new token per row to its prompt, which it shares with its group, and to its own earlier tokens.
//
// A task is some rows that share a prompt, with the query heads that share a key-value head. Queries of several rows
// are multiplied by the prompt's keys and values together. Each byte of the rows' own tokens is read once, so reading
// takes as long as the products; while one row is computed, the data of the next rows are prefetched.
//
// Shapes: R rows, H heads, K key-value heads, M = H / K, D head width, P prompt tokens.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kv_cache.h"
#include "rmsnorm_swiglu.h"
#include "simd.h"

namespace {

// x cos + rotate_half(x) sin.
template <typename Value>
inline void rotate(float* x, const Value* cosine, const Value* sine, int width) {
    int half = width / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = load(x + i), b = load(x + half + i);
        store(a * load(cosine + i) - b * load(sine + i), x + i);
        store(b * load(cosine + half + i) + a * load(sine + half + i), x + half + i);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * to_float(cosine[i]) - b * to_float(sine[i]);
        x[i + half] = b * to_float(cosine[i + half]) + a * to_float(sine[i + half]);
    }
}

// Where everything lies for one layer's attention of one new token per row. bindings.py declares the same fields.
struct Attention {
    const void *qkv, *cosine, *sine;       // [R, (H + 2 K) D], [R, D], [R, D]
    const void *query_norm, *key_norm;     // [D], or null
    const int64_t *prompt_keys;            // [R] addresses of [layers, K] prompts of kv_cache.h
    const int64_t *prompt_values;          // [R] likewise
    const int32_t *prompt_lengths;         // [R]
    void *own_keys, *own_values;           // of this layer: [slots, K], each with room for `capacity` tokens
    const int32_t *slots, *decoded;        // [R]: where a row's own tokens lie, and how many there are
    void *out;                             // [R, H D]
    int32_t qkv_row_stride, out_row_stride;          // from one row to the next
    int32_t rows, heads, kv_heads, width, capacity, layer, threads;
    float scaling, epsilon;
};

struct Rows {
    int first, count;
};

// Cut into equal parts of at most `most` rows.
template <typename Visit>
inline void cut(Rows rows, int most, Visit visit) {
    int parts = (rows.count + most - 1) / most;
    for (int part = 0; part < parts; part++) {
        int begin = rows.count * part / parts, end = rows.count * (part + 1) / parts;
        visit(Rows{rows.first + begin, end - begin});
    }
}

// Rows of which 16 queries, what a product takes at a time, are of one key-value head.
inline int rows_together(const Attention& shape) { return std::max(1, 16 / (shape.heads / shape.kv_heads)); }

// Rows that share a prompt, in parts that are small enough for all threads to end at the same time.
inline std::vector<Rows> rows_of_tasks(const Attention& shape) {
    int most = std::max(rows_together(shape), shape.rows * shape.kv_heads / (8 * shape.threads));
    std::vector<Rows> found;
    for (int first = 0, end; first < shape.rows; first = end) {
        for (end = first + 1; end < shape.rows && shape.prompt_keys[end] == shape.prompt_keys[first];) end++;
        cut({first, end - first}, most, [&](Rows part) { found.push_back(part); });
    }
    return found;
}

// One thread's work on one task after another.
template <typename Value>
class DecodeAttention {
  public:
    explicit DecodeAttention(const Attention& shape)
        : shape(shape), width(shape.width), stride(padded(width)), queries(shape.heads / shape.kv_heads),
          query(width), prepared(width), key(width) {}

    // The task after this one, where there is one, has `next_rows` and `next_head`.
    void operator()(Rows rows, int head, Rows next_rows, int next_head) {
        ahead.clear();
        for (int r = 1; r < rows.count; r++) own_of(rows.first + r, head).fetch_by(ahead);
        if (next_rows.count) {
            prompt_of(next_rows.first, next_head).fetch_by(ahead);
            own_of(next_rows.first, next_head).fetch_by(ahead);
        }
        KVBlock<Value> prompt = prompt_of(rows.first, head);
        cut(rows, rows_together(shape), [&](Rows some) { attend_some(some, some.first - rows.first, head, prompt); });
    }

  private:
    const Attention& shape;
    const int width, stride, queries;
    Ahead ahead;
    Queries<Value> query;
    std::vector<float> prepared, total;
    std::vector<Value> key;
    std::vector<Floats> score_memory, own_memory, blended_memory;

    // `begun` rows of the task have been worked on.
    void attend_some(Rows rows, int begun, int head, const KVBlock<Value>& shared) {
        int prompt = shape.prompt_lengths[rows.first], gap = padded(prompt), count = rows.count * queries;
        float* scores = scratch<float>(score_memory, size_t(count) * gap);
        float* blended = scratch<float>(blended_memory, size_t(count) * stride);
        total.resize(count);
        query.resize(count);
        for (int q = 0; q < count; q++)
            prepare(rows.first + q / queries, head * queries + q % queries, shape.query_norm, query.row(q));
        query.turn(count);
        ahead.allow(2 * (begun + 4));  // keys and values of four rows
        shared.score(query, 0, count, scores, gap, ahead);
        for (int r = 0; r < rows.count; r++) {
            int row = rows.first + r, q = r * queries;
            ahead.allow(2 * (begun + r + 4));
            KVBlock<Value> own = own_of(row, head);
            append(row, head, own);
            int tokens = shape.decoded[row] + 1, row_stride = padded(tokens);
            float* own_scores = scratch<float>(own_memory, size_t(queries) * row_stride);
            own.score(query, q, queries, own_scores, row_stride, ahead);
            for (int m = 0; m < queries; m++) {
                total[q + m] = softmax_inplace({scores + size_t(q + m) * gap, prompt, gap},
                    {own_scores + size_t(m) * row_stride, tokens, row_stride}, shape.scaling);
                ahead.some();
            }
            own.blend(own_scores, row_stride, queries, blended + size_t(q) * stride, false, ahead);
        }
        shared.blend(scores, gap, count, blended, true, ahead);
        for (int q = 0; q < count; q++) {
            const float* from = blended + size_t(q) * stride;
            size_t row = rows.first + q / queries;
            Value* to = static_cast<Value*>(shape.out) + row * shape.out_row_stride;
            to += (head * queries + q % queries) * width;
            int d = 0;
            for (; d + LANES <= width; d += LANES) store(load(from + d) / total[q], to + d);
            for (; d < width; d++) from_float(from[d] / total[q], &to[d]);
        }
    }

    KVBlock<Value> prompt_of(int row, int head) const {
        int tokens = shape.prompt_lengths[row];
        size_t place = (size_t(shape.layer) * shape.kv_heads + head) * KVBlock<Value>::size(tokens, width);
        return {reinterpret_cast<Value*>(shape.prompt_keys[row]) + place,
            reinterpret_cast<Value*>(shape.prompt_values[row]) + place, tokens, width};
    }

    // What a row has decoded.
    KVBlock<Value> own_of(int row, int head) const {
        size_t place = (size_t(shape.slots[row]) * shape.kv_heads + head) * KVBlock<Value>::size(shape.capacity, width);
        auto keys = static_cast<Value*>(shape.own_keys), values = static_cast<Value*>(shape.own_values);
        return {keys + place, values + place, shape.decoded[row], width};
    }

    const Value* projected(int row, int place) const {
        return static_cast<const Value*>(shape.qkv) + size_t(row) * shape.qkv_row_stride + size_t(place) * width;
    }

    // A query or key, normalised where the model does that, and rotated; a number of `Value`'s.
    void prepare(int row, int place, const void* norm_weight, float* to) const {
        const Value* from = projected(row, place);
        auto norm = static_cast<const Value*>(norm_weight);
        for (int d = 0; d < width; d++) to[d] = to_float(from[d]);
        if (norm) {
            float scale = inverse_root_mean_square(to, width, shape.epsilon);
            for (int d = 0; d < width; d++) to[d] *= scale * to_float(norm[d]);
        }
        auto cosine = static_cast<const Value*>(shape.cosine), sine = static_cast<const Value*>(shape.sine);
        rotate(to, cosine + size_t(row) * width, sine + size_t(row) * width, width);
    }

    // Key and value of the new token.
    void append(int row, int head, KVBlock<Value>& own) {
        prepare(row, shape.heads + head, shape.key_norm, prepared.data());
        for (int d = 0; d < width; d++) from_float(prepared[d], &key[d]);
        own.append(key.data(), projected(row, shape.heads + shape.kv_heads + head));
    }
};

template <typename Value>
void attend(const Attention& shape) {
    std::vector<Rows> rows = rows_of_tasks(shape);
    int tasks = int(rows.size()) * shape.kv_heads;
    std::atomic<int> unclaimed{0};
#pragma omp parallel num_threads(shape.threads)
    {
        DecodeAttention<Value> attending(shape);
        Tiles tiles;
        auto rows_of = [&](int task) { return task < tasks ? rows[task / shape.kv_heads] : Rows{}; };
        for (int task = unclaimed++; task < tasks;) {
            int next = unclaimed++;
            attending(rows_of(task), task % shape.kv_heads, rows_of(next), next % shape.kv_heads);
            task = next;
        }
    }
}

}  // namespace
