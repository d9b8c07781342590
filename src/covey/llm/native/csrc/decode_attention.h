// Decode attention: one new token per row attends to its prompt, which its group shares, and to its own earlier tokens.
// Consecutive rows with the same slot are consecutive tokens of one sequence, each of which attends to those before it.
//
// A task is a range of rows with the same prompt and one key-value head with its query heads. The prompt's keys and
// values meet the queries of several rows in one product; each byte of a row's own cache is read once, so that part is
// bound by memory, and the caches of the next rows are prefetched meanwhile. Softmax is in fp32 over both parts.
//
// Products are on AMX or vectors (kv_cache.h). Entry point: `decode_attention`.
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

// Rotary embedding in place: x cos + rotate_half(x) sin.
template <typename Scalar>
inline void apply_rope(float* x, const Scalar* cosine, const Scalar* sine, int head_dim) {
    int half = head_dim / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        f32x16 a = load(x + i), b = load(x + half + i);
        store(a * load(cosine + i) - b * load(sine + i), x + i);
        store(b * load(cosine + half + i) + a * load(sine + half + i), x + half + i);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * to_float(cosine[i]) - b * to_float(sine[i]);
        x[i + half] = b * to_float(cosine[i + half]) + a * to_float(sine[i + half]);
    }
}

// Arguments for one layer. bindings.py declares the same fields.
struct AttentionArgs {
    const void *qkv, *cosine, *sine;         // [R, (H + 2 K) D], [R, D], [R, D]
    const void *query_norm, *key_norm;       // [D], or null: RMSNorm of each head, as Qwen3 has
    const int64_t *prompt_keys;              // [R] addresses of the prompts' cached keys, [layers, K, ...]
    const int64_t *prompt_values;            // [R] likewise
    const int32_t *prompt_lengths;           // [R]
    void *own_keys, *own_values;             // cache of this layer: [slots, K, ...], for `capacity` tokens each
    const int32_t *slots, *decoded;          // [R]: the slot of a row, and the tokens already in it
    void *out;                               // [R, H D]
    int32_t qkv_row_stride, out_row_stride;  // in numbers
    int32_t rows, heads, kv_heads, head_dim, capacity, layer, threads;
    float scaling, epsilon;
};

struct RowRange {
    int first, count;
};

// Call visit(part) for equal parts of at most `max_rows` rows.
template <typename Visit>
inline void split_evenly(RowRange rows, int max_rows, Visit visit) {
    int parts = (rows.count + max_rows - 1) / max_rows;
    for (int part = 0; part < parts; part++) {
        int begin = rows.count * part / parts, end = rows.count * (part + 1) / parts;
        visit(RowRange{rows.first + begin, end - begin});
    }
}

// Rows whose queries of one key-value head fill the 16 columns of a tile.
inline int rows_per_tile(const AttentionArgs& args) { return std::max(1, 16 / (args.heads / args.kv_heads)); }

// Ranges of rows that share a prompt, small enough to balance the threads. Rows with the same slot stay together, because
// a thread appends their keys and values in order.
inline std::vector<RowRange> split_into_tasks(const AttentionArgs& args) {
    int max_rows = std::max(rows_per_tile(args), args.rows * args.kv_heads / (8 * args.threads));
    std::vector<RowRange> tasks;
    for (int first = 0, end; first < args.rows; first = end) {
        for (end = first + 1; end < args.rows && args.prompt_keys[end] == args.prompt_keys[first];) end++;
        int begin = first;
        split_evenly({first, end - first}, max_rows, [&](RowRange part) {
            int last = std::max(begin, part.first + part.count);
            while (last < end && last > begin && args.slots[last] == args.slots[last - 1]) last++;
            if (last > begin) tasks.push_back({begin, last - begin});
            begin = last;
        });
    }
    return tasks;
}

// The worker of one thread, which computes one task after another.
template <typename Scalar>
class DecodeAttention {
  public:
    explicit DecodeAttention(const AttentionArgs& args)
        : args(args), head_dim(args.head_dim), stride(padded(head_dim)), group(args.heads / args.kv_heads),
          queries(head_dim), rotated_key(head_dim), key(head_dim) {}

    // Compute a task. `next_rows`, empty if there are none, and `next_head` are those of this thread's next task.
    void operator()(RowRange rows, int head, RowRange next_rows, int next_head) {
        prefetcher.clear();
        for (int r = 1; r < rows.count; r++) own_block(rows.first + r, head).add_to(prefetcher);
        if (next_rows.count) {
            prompt_block(next_rows.first, next_head).add_to(prefetcher);
            own_block(next_rows.first, next_head).add_to(prefetcher);
        }
        KVBlock<Scalar> prompt = prompt_block(rows.first, head);
        split_evenly(rows, rows_per_tile(args),
            [&](RowRange part) { attend(part, part.first - rows.first, head, prompt); });
    }

  private:
    const AttentionArgs& args;
    const int head_dim, stride, group;  // group: query heads of a key-value head
    Prefetcher prefetcher;
    Queries<Scalar> queries;
    std::vector<float> rotated_key, softmax_sums;
    std::vector<Scalar> key;
    std::vector<f32x16> prompt_score_memory, own_score_memory, out_memory;

    // Compute some rows of a task, of which `done` rows are finished.
    void attend(RowRange rows, int done, int head, const KVBlock<Scalar>& prompt) {
        int prompt_tokens = args.prompt_lengths[rows.first], prompt_stride = padded(prompt_tokens);
        int count = rows.count * group;
        float* prompt_scores = scratch<float>(prompt_score_memory, size_t(count) * prompt_stride);
        float* out = scratch<float>(out_memory, size_t(count) * stride);
        softmax_sums.resize(count);
        queries.resize(count);
        for (int q = 0; q < count; q++)
            load_rotated(rows.first + q / group, head * group + q % group, args.query_norm, queries.row(q));
        queries.pack(count);
        prefetcher.allow(2 * (done + 4));  // keys and values of four rows
        prompt.score(queries, 0, count, prompt_scores, prompt_stride, prefetcher);
        for (int r = 0; r < rows.count; r++) {
            int row = rows.first + r, q = r * group;
            prefetcher.allow(2 * (done + r + 4));
            KVBlock<Scalar> own = own_block(row, head);
            append_new_token(row, head, own);
            int tokens = args.decoded[row] + 1, row_stride = padded(tokens);
            float* own_scores = scratch<float>(own_score_memory, size_t(group) * row_stride);
            own.score(queries, q, group, own_scores, row_stride, prefetcher);
            for (int m = 0; m < group; m++) {
                softmax_sums[q + m] = softmax_inplace({prompt_scores + size_t(q + m) * prompt_stride, prompt_tokens,
                    prompt_stride}, {own_scores + size_t(m) * row_stride, tokens, row_stride}, args.scaling);
                prefetcher.some();
            }
            own.weighted_sum(own_scores, row_stride, group, out + size_t(q) * stride, false, prefetcher);
        }
        prompt.weighted_sum(prompt_scores, prompt_stride, count, out, true, prefetcher);
        for (int q = 0; q < count; q++) {
            const float* from = out + size_t(q) * stride;
            size_t row = rows.first + q / group;
            Scalar* to = static_cast<Scalar*>(args.out) + row * args.out_row_stride;
            to += (head * group + q % group) * head_dim;
            int d = 0;
            for (; d + LANES <= head_dim; d += LANES) store(load(from + d) / softmax_sums[q], to + d);
            for (; d < head_dim; d++) from_float(from[d] / softmax_sums[q], &to[d]);
        }
    }

    KVBlock<Scalar> prompt_block(int row, int head) const {
        int tokens = args.prompt_lengths[row];
        size_t offset = (size_t(args.layer) * args.kv_heads + head) * KVBlock<Scalar>::size(tokens, head_dim);
        return {reinterpret_cast<Scalar*>(args.prompt_keys[row]) + offset,
            reinterpret_cast<Scalar*>(args.prompt_values[row]) + offset, tokens, head_dim};
    }

    // Cache of the tokens that a row has decoded.
    KVBlock<Scalar> own_block(int row, int head) const {
        size_t block = size_t(args.slots[row]) * args.kv_heads + head;
        size_t offset = block * KVBlock<Scalar>::size(args.capacity, head_dim);
        auto keys = static_cast<Scalar*>(args.own_keys), values = static_cast<Scalar*>(args.own_values);
        return {keys + offset, values + offset, args.decoded[row], head_dim};
    }

    // Head `index` of a row of the fused projection: the queries, then keys, then values.
    const Scalar* projected(int row, int index) const {
        return static_cast<const Scalar*>(args.qkv) + size_t(row) * args.qkv_row_stride + size_t(index) * head_dim;
    }

    // A query or key in fp32, normalised if the model has a norm there, and rotated.
    void load_rotated(int row, int index, const void* norm_weight, float* to) const {
        const Scalar* from = projected(row, index);
        auto norm = static_cast<const Scalar*>(norm_weight);
        for (int d = 0; d < head_dim; d++) to[d] = to_float(from[d]);
        if (norm) {
            float scale = inverse_rms(to, head_dim, args.epsilon);
            for (int d = 0; d < head_dim; d++) to[d] *= scale * to_float(norm[d]);
        }
        auto cosine = static_cast<const Scalar*>(args.cosine), sine = static_cast<const Scalar*>(args.sine);
        apply_rope(to, cosine + size_t(row) * head_dim, sine + size_t(row) * head_dim, head_dim);
    }

    void append_new_token(int row, int head, KVBlock<Scalar>& own) {
        load_rotated(row, args.heads + head, args.key_norm, rotated_key.data());
        for (int d = 0; d < head_dim; d++) from_float(rotated_key[d], &key[d]);
        own.append(key.data(), projected(row, args.heads + args.kv_heads + head));
    }
};

// Rotate queries and keys, append the new keys and values to the cache, attend. Threads take tasks from a counter.
template <typename Scalar>
void decode_attention(const AttentionArgs& args) {
    std::vector<RowRange> ranges = split_into_tasks(args);
    int tasks = int(ranges.size()) * args.kv_heads;
    std::atomic<int> next_task{0};
#pragma omp parallel num_threads(args.threads)
    {
        DecodeAttention<Scalar> attention(args);
        TileConfig tile_config;
        auto rows_of = [&](int task) { return task < tasks ? ranges[task / args.kv_heads] : RowRange{}; };
        for (int task = next_task++; task < tasks;) {
            int next = next_task++;
            attention(rows_of(task), task % args.kv_heads, rows_of(next), next % args.kv_heads);
            task = next;
        }
    }
}

}  // namespace
