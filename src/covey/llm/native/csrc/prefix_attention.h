// Attention over a prefix tree, forward and backward: completions continue their prompt, prompts a common prefix. Tiled
// as in FlashAttention: scores exist for some queries at a time, in a core's cache (arXiv 2205.14135), and are
// recomputed in the backward pass from their logsumexp (arXiv 2307.08691, algorithm 2).
//
// In all products keys are rows and queries are columns, so that softmax reduces over rows, 16 columns at a time.
//
// Shapes: N tokens, H heads, K key-value heads, M = H / K, D head width, S sequences.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "decode_attention.h"
#include "gemm.h"
#include "simd.h"

namespace {

// Tokens `first` to `first + length`. They attend to themselves, to all of `parent`, and to all of its ancestors.
struct Sequence {
    int32_t first, length, parent;  // -1: none
};

// bindings.py declares the same fields. Of gradients, and of what only they need, addresses may be null.
struct SharedAttention {
    const void *query, *key, *value;  // [N, H D], [N, K D], [N, K D], before rotation
    const void *cosine, *sine;        // [N, D]
    void* out;                        // [N, H D]
    float* logsumexp;                    // [N, H] log sum exp of the scores
    const void* dout;
    void *dquery, *dkey, *dvalue;
    const Sequence* sequences;  // [S], each behind its parent, and what continues it next
    int32_t count, heads, kv_heads, width, threads;
    float scaling;
};

// Tokens `begin` to `end` of a sequence, counted from its first.
struct TokenRange {
    int sequence, begin, end;
};

constexpr int QUERIES = 128;  // at a time: their scores with a few hundred keys stay in the second cache

// The transpose of `rotate`, for gradients: rounded once.
template <typename Value>
inline void rotate_back(float* x, const Value* cosine, const Value* sine, int width) {
    int half = width / 2;
    auto turn = [&](auto a, auto b, auto c, auto s) { return a * c + b * s; };
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats left = load(x + i), right = load(x + half + i);
        store(turn(left, right, load(cosine + i), load(sine + half + i)), x + i);
        store(turn(right, -left, load(cosine + half + i), load(sine + i)), x + half + i);
    }
    for (; i < half; i++) {
        float left = x[i], right = x[half + i];
        x[i] = turn(left, right, to_float(cosine[i]), to_float(sine[half + i]));
        x[half + i] = turn(right, -left, to_float(cosine[half + i]), to_float(sine[i]));
    }
}

template <typename Value>
inline void widen_row(const Value* from, int count, float* to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(load(from + i), to + i);
    for (; i < count; i++) to[i] = to_float(from[i]);
}
template <typename Value>
inline void narrow_row(const float* from, int count, Value* to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(load(from + i), to + i);
    for (; i < count; i++) from_float(from[i], &to[i]);
}

// Rows of one head are far apart in memory, so the processor does not prefetch them.
constexpr int SOON = 16;  // tokens
template <typename Value>
inline void fetch_row(const Value* from, int count) {
    for (int i = 0; i < count; i += 64 / int(sizeof(Value))) __builtin_prefetch(from + i);
}

// The ancestors of a sequence, root first, and the sequence itself.
inline std::vector<int> ancestors_of(const Sequence* sequences, int sequence) {
    std::vector<int> line;
    for (; sequence >= 0; sequence = sequences[sequence].parent) line.insert(line.begin(), sequence);
    return line;
}

// All tokens, cut into tasks with about the same number of scores; no task has a sequence twice. The cut, and so the
// result, depends on the shapes and the number of threads alone.
inline std::vector<std::vector<TokenRange>> parts_of(const SharedAttention& shape) {
    constexpr int STEP = 16;
    std::vector<int64_t> before(shape.count);
    auto cost = [&](int s, int64_t begin, int64_t end) {
        return before[s] * (end - begin) + (end * end - begin * begin) / 2;
    };
    int64_t total = 0;
    for (int s = 0; s < shape.count; s++) {
        int parent = shape.sequences[s].parent;
        before[s] = parent < 0 ? 0 : before[parent] + shape.sequences[parent].length;
        total += cost(s, 0, shape.sequences[s].length);
    }
    int64_t share = total * shape.kv_heads / (8 * shape.threads) + 1, spent = 0;
    std::vector<std::vector<TokenRange>> parts(1);
    for (int s = 0; s < shape.count; s++) {
        int length = shape.sequences[s].length;
        for (int begin = 0; begin < length;) {
            if (begin || (spent && spent + cost(s, begin, length) / 2 > share)) parts.emplace_back(), spent = 0;
            int end = length;
            if (cost(s, begin, length) > 2 * share)
                for (end = std::min(begin + STEP, length); end < length && cost(s, begin, end) < share;)
                    end = std::min(end + STEP, length);
            parts.back().push_back({s, begin, end});
            spent += cost(s, begin, end);
            begin = end;
        }
    }
    return parts;
}

// Keys and values of a sequence for one key-value head, as factors of products; their gradients, in blocks.
template <typename Value>
struct PrefixLevel {
    int sequence, keys;  // and padding: a multiple of SIDE
    std::vector<Floats> key_memory, turned_memory, value_memory, dkey_memory, dvalue_memory;
    Value *key, *turned, *value;  // turned: values, or where gradients are wanted keys, with tokens in the columns
    float *dkey, *dvalue;
};

// Partial dK and dV, [tokens, 2 D], of a prefix that several tasks share; summed when all have finished.
struct PartialGrad {
    int tokens = 0;
    std::vector<float> numbers;
};

// The work of one thread: one task and one key-value head after another.
template <typename Value>
class PrefixAttention {
  public:
    PrefixAttention(const SharedAttention& shape)
        : shape(shape), width(shape.width), wide(squares(width) * SIDE), deep(wide / ROW<Value>),
          queries(shape.heads / shape.kv_heads), learning(shape.dout) {}

    // `partial_for` returns the partial gradient of a sequence that several tasks share.
    template <typename PartialOf>
    void operator()(const std::vector<TokenRange>& part, int of_head, PartialOf partial_for) {
        head = of_head;
        for (TokenRange stretch : part) {
            push(stretch, partial_for);
            int end = stretch.end * queries;
            for (int query = stretch.begin * queries; query < end; query += QUERIES) {
                load_queries(query, std::min(query + QUERIES, end));
                if (learning) backward();
                else forward();
            }
        }
        pop(0, partial_for);
    }

    // Sum of the partial gradients of a sequence.
    void add_up(int sequence, int head, const std::vector<PartialGrad>& gifts) {
        std::vector<float> sum(2 * wide);
        for (int t = 0; t < shape.sequences[sequence].length; t++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (size_t giver = head; giver < gifts.size(); giver += shape.kv_heads)
                for (int d = 0; t < gifts[giver].tokens && d < 2 * wide; d += LANES)
                    store(load(&sum[d]) + load(&gifts[giver].numbers[size_t(t) * 2 * wide + d]), &sum[d]);
            finish(head, shape.sequences[sequence].first + t, &sum[0], &sum[wide]);
        }
    }

  private:
    const SharedAttention& shape;
    const int width, wide, deep, queries;  // wide: D and padding; deep: tiles of that
    const bool learning;
    int head = 0, depth = 0;
    std::vector<PrefixLevel<Value>> levels;
    // The queries at work: how many and padding, the first of them and one past the last, counted through their
    // sequence's tokens; and the keys that one of them sees, padding included, of all levels together.
    int count = 0, first = 0, last = 0, keys = 0;
    const Value *query = nullptr, *dout = nullptr;  // right factors of scores and of weights' gradients
    std::vector<Floats> row_memory, query_memory, query_pairs, dout_memory, dout_pairs, score_memory, dweight_memory,
        weight_memory, dscore_memory, turned_memory, sum_memory, total_memory;

    // Store the final gradients of a key and a value.
    void finish(int head, int token, float* dkey, const float* dvalue) {
        size_t place = (size_t(token) * shape.kv_heads + head) * width;
        rotate_back(dkey, angles(shape.cosine, token), angles(shape.sine, token), width);
        narrow_row(dkey, width, static_cast<Value*>(shape.dkey) + place);
        narrow_row(dvalue, width, static_cast<Value*>(shape.dvalue) + place);
    }

    const Sequence& own() const { return shape.sequences[levels[depth - 1].sequence]; }
    const Value* angles(const void* table, int token) const {
        return static_cast<const Value*>(table) + size_t(token) * width;
    }

    // Rows `begin` to `end` of a sequence's heads, `together` of them for each token, as a left factor.
    void pack_rows(const void* heads, const Sequence& sequence, int together, int begin, int end, bool rotated, Value* to) {
        float* row = scratch<float>(row_memory, wide);
        std::fill(row + width, row + wide, 0.0f);
        auto from = static_cast<const Value*>(heads);
        for (int i = begin; i < end; i++) {
            int token = sequence.first + i / together;
            const Value* here = from + ((size_t(token) * shape.kv_heads + head) * together + i % together) * width;
            if (i % together == 0) fetch_row(here + size_t(SOON) * shape.kv_heads * together * width, together * width);
            widen_row(here, width, row);
            if (rotated) rotate(row, angles(shape.cosine, token), angles(shape.sine, token), width);
            for (int d = 0; d < wide; d += LANES) store(load(row + d), to + tile_offset<Value>(i - begin, d, deep));
        }
        for (int i = end - begin; i % SIDE; i++)
            for (int d = 0; d < wide; d += LANES) store(Floats{}, to + tile_offset<Value>(i, d, deep));
    }

    template <typename PartialOf>
    void push(TokenRange stretch, PartialOf partial_for) {
        std::vector<int> line = ancestors_of(shape.sequences, stretch.sequence);
        int known = 0;
        while (known < depth && known < int(line.size()) && levels[known].sequence == line[known]) known++;
        pop(known, partial_for);
        for (; depth < int(line.size()); depth++) {
            if (depth == int(levels.size())) levels.emplace_back();
            bool own = depth + 1 == int(line.size());
            open(levels[depth], line[depth], own ? stretch.end : shape.sequences[line[depth]].length);
        }
    }

    void open(PrefixLevel<Value>& level, int number, int tokens) {
        const Sequence& sequence = shape.sequences[number];
        level.sequence = number;
        level.keys = squares(tokens) * SIDE;
        size_t size = size_t(level.keys) * wide;
        level.key = scratch<Value>(level.key_memory, size);
        level.turned = scratch<Value>(level.turned_memory, size);
        level.value = scratch<Value>(level.value_memory, size);
        pack_rows(shape.key, sequence, 1, 0, tokens, true, level.key);
        pack_rows(shape.value, sequence, 1, 0, tokens, false, level.value);
        pair_up(learning ? level.key : level.value, level.keys, wide, level.turned);
        turn(level.turned, size);
        if (!learning) return;
        level.dkey = scratch<float>(level.dkey_memory, size);
        level.dvalue = scratch<float>(level.dvalue_memory, size);
        std::fill_n(level.dkey, size, 0.0f);
        std::fill_n(level.dvalue, size, 0.0f);
    }

    // Pop the levels from `to` on.
    template <typename PartialOf>
    void pop(int to, PartialOf partial_for) {
        while (depth > to) {
            PrefixLevel<Value>& level = levels[--depth];
            if (!learning) continue;
            const Sequence& sequence = shape.sequences[level.sequence];
            PartialGrad* gift = partial_for(level.sequence);
            int tokens = std::min(level.keys, sequence.length);
            if (gift) gift->tokens = tokens, gift->numbers.resize(size_t(tokens) * 2 * wide);
            std::vector<float> some(2 * wide);
            for (int t = 0; t < tokens; t++) {
                float* to = gift ? &gift->numbers[size_t(t) * 2 * wide] : some.data();
                for (int d = 0; d < wide; d += LANES) {
                    size_t place = block_offset(t, d, wide / SIDE);
                    store(load(level.dkey + place), to + d);
                    store(load(level.dvalue + place), to + wide + d);
                }
                if (!gift) finish(head, sequence.first + t, to, to + wide);
            }
        }
    }

    // Number of keys of a level that some current query attends to, with padding.
    int seen_of(int level) const { return level + 1 < depth ? levels[level].keys : squares(newest() + 1) * SIDE; }
    int newest() const { return (last - 1) / queries; }

    // Pack the queries, and the gradients of their outputs, as factors of products.
    void load_queries(int begin, int end) {
        first = begin, last = end, count = squares(end - begin) * SIDE, keys = 0;
        for (int level = 0; level < depth; level++) keys += seen_of(level);
        size_t size = size_t(count) * wide;
        auto factors = [&](const void* heads, bool rotated, std::vector<Floats>& turned, std::vector<Floats>& paired) {
            Value* to = scratch<Value>(turned, size);
            pack_rows(heads, own(), queries, first, last, rotated, to);
            if (learning) pair_up(to, count, wide, scratch<Value>(paired, size));
            turn(to, size);
            return to;
        };
        query = factors(shape.query, true, query_memory, query_pairs);
        if (learning) dout = factors(shape.dout, false, dout_memory, dout_pairs);
    }

    // Scores of 16 keys, from `key` on, with 16 queries, from `column` on; masked ones become -infinity.
    void mask(int level, int key, int column, float* scores) const {
        int all_tokens = shape.sequences[levels[level].sequence].length;
        auto seen_by = [&](int query) {
            return level + 1 < depth ? all_tokens : std::min(query, last - 1) / queries + 1;
        };
        if (key + TILE <= seen_by(first + column)) return;
        Ints seen;
        for (int i = 0; i < LANES; i++) seen[i] = seen_by(first + column + i);
        for (int i = 0; i < TILE; i++) {
            Floats score = load(scores + i * TILE);
            store(Ints{} + key + i < seen ? score : broadcast(-INFINITY), scores + i * TILE);
        }
    }

    // A block of scores.
    void score(int level, int key, int column, float* scores) const {
        multiply_factors(levels[level].key + tile_offset<Value>(key, 0, deep), deep, query + tile_offset<Value>(column, 0, deep),
            deep, deep, false, scores);
        for (int i = 0; i < 4; i++) mask(level, key + i / 2 * TILE, column + i % 2 * TILE, scores + i * TILE * TILE);
    }

    // Product of the keys or values in `turned` with `factors`, a right factor: blocks [D, queries].
    float* blend(const Value* factors) {
        float* sums = scratch<float>(sum_memory, size_t(count) * wide);
        int steps = keys / ROW<Value>;
        for (int d = 0; d < wide; d += SIDE) {
            for (int column = 0; column < count; column += SIDE) {
                for (int level = 0, base = 0; level < depth; base += seen_of(level++)) {
                    int row_stride = levels[level].keys / ROW<Value>;
                    multiply_factors(levels[level].turned + tile_offset<Value>(d, 0, row_stride), row_stride,
                        factors + tile_offset<Value>(column, base, steps), steps, seen_of(level) / ROW<Value>, level > 0,
                        sums + block_offset(d, column, count / SIDE));
                }
            }
        }
        return sums;
    }

    // Call each(query, its sums) for blocks [D, queries].
    template <typename Each>
    void by_query(const float* sums, Each each) {
        float* rows = scratch<float>(row_memory, size_t(TILE) * wide);
        for (int column = 0; column < last - first; column += TILE) {
            for (int d = 0; d < wide; d += TILE) {
                Words tile[TILE];
                std::memcpy(tile, sums + block_offset(d, column, count / SIDE), sizeof tile);
                transpose(tile);
                for (int i = 0; i < TILE; i++) std::memcpy(rows + i * wide + d, &tile[i], sizeof tile[i]);
            }
            for (int i = 0; i < TILE && first + column + i < last; i++) each(first + column + i, rows + i * wide);
        }
    }

    int token_of(int query) const { return own().first + query / queries; }
    size_t place_of(int query) const {
        return (size_t(token_of(query)) * shape.kv_heads + head) * queries + query % queries;
    }

    void forward() {
        int across = count / SIDE, steps = keys / ROW<Value>;
        float* scores = scratch<float>(score_memory, size_t(count) * keys);
        Value* weights = scratch<Value>(turned_memory, size_t(count) * keys);
        for (int level = 0, base = 0; level < depth; base += seen_of(level++))
            for (int key = 0; key < seen_of(level); key += SIDE)
                for (int column = 0; column < count; column += SIDE)
                    score(level, key, column, scores + block_offset(base + key, column, across));
        float* logsumexp = scratch<float>(total_memory, 2 * size_t(count));
        float* shares = logsumexp + count;
        for (int column = 0; column < count; column += TILE) {
            Floats top = broadcast(-INFINITY), total = {};
            for (int key = 0; key < keys; key += TILE) {
                const float* tile = scores + block_offset(key, column, across);
                for (int i = 0; i < TILE; i++) top = greater(load(tile + i * TILE), top);
            }
            for (int key = 0; key < keys; key += TILE) {
                const float* tile = scores + block_offset(key, column, across);
                for (int i = 0; i < TILE; i += 2) {
                    Floats even = exponential((load(tile + i * TILE) - top) * shape.scaling);
                    Floats odd = exponential((load(tile + (i + 1) * TILE) - top) * shape.scaling);
                    total += even + odd;
                    store_pair(even, odd, weights + pair_inside<Value>(key + i, column, steps));
                }
            }
            store(1.0f / total, shares + column);
            for (int i = 0; i < LANES; i++) logsumexp[column + i] = top[i] * shape.scaling + std::log(total[i]);
        }
        by_query(blend(weights), [&](int query, float* sums) {
            for (int d = 0; d < wide; d += LANES) store(load(sums + d) * shares[query - first], sums + d);
            narrow_row(sums, width, static_cast<Value*>(shape.out) + place_of(query) * width);
            shape.logsumexp[place_of(query)] = logsumexp[query - first];
        });
    }

    void backward() {
        int across = count / ROW<Value>, steps = keys / ROW<Value>;
        size_t strip = size_t(SIDE) * count;
        float *scores = scratch<float>(score_memory, strip), *dweights = scratch<float>(dweight_memory, strip);
        Value *weights = scratch<Value>(weight_memory, strip), *dscores = scratch<Value>(dscore_memory, strip);
        Value* turned = scratch<Value>(turned_memory, size_t(count) * keys);
        float *logsumexp = scratch<float>(total_memory, 2 * size_t(count)), *delta = logsumexp + count;
        load_logsumexp_and_delta(logsumexp, delta);
        for (int level = 0, base = 0; level < depth; base += seen_of(level++)) {
            const PrefixLevel<Value>& here = levels[level];
            for (int key = 0; key < seen_of(level); key += SIDE) {
                for (int column = 0; column < count; column += SIDE) {
                    size_t place = block_offset(0, column, count / SIDE);
                    score(level, key, column, scores + place);
                    multiply_factors(here.value + tile_offset<Value>(key, 0, deep), deep,
                        dout + tile_offset<Value>(column, 0, deep), deep, deep, false, dweights + place);
                }
                for (int column = 0; column < count; column += TILE) {
                    Floats total = load(logsumexp + column), mean = load(delta + column);
                    for (int i = 0; i < SIDE; i += 2) {
                        Floats slopes[2];
                        for (int j = 0; j < 2; j++) {
                            size_t from = block_offset(i + j, column, count / SIDE);
                            Floats weight = exponential(load(scores + from) * shape.scaling - total);
                            slopes[j] = weight * (load(dweights + from) - mean) * shape.scaling;
                            size_t to = tile_offset<Value>(i + j, column, across);
                            store(weight, weights + to);
                            store(slopes[j], dscores + to);
                        }
                        store_pair(slopes[0], slopes[1], turned + pair_inside<Value>(base + key + i, column, steps));
                    }
                }
                for (int d = 0; d < wide; d += SIDE) {
                    size_t from = tile_offset<Value>(d, 0, across), to = block_offset(key, d, wide / SIDE);
                    auto add = [&](const Value* left, const std::vector<Floats>& pairs, float* sums) {
                        auto right = reinterpret_cast<const Value*>(pairs.data()) + from;
                        multiply_factors(left, across, right, across, across, true, sums + to);
                    };
                    add(weights, dout_pairs, here.dvalue);
                    add(dscores, query_pairs, here.dkey);
                }
            }
        }
        by_query(blend(turned), [&](int query, float* dquery) {
            int token = token_of(query);
            rotate_back(dquery, angles(shape.cosine, token), angles(shape.sine, token), width);
            narrow_row(dquery, width, static_cast<Value*>(shape.dquery) + place_of(query) * width);
        });
    }

    // Load the logsumexp of every query, and delta = sum of dout * out.
    void load_logsumexp_and_delta(float* logsumexp, float* delta) const {
        std::fill_n(logsumexp, count, INFINITY);
        std::fill_n(delta, count, 0.0f);
        for (int query = first; query < last; query++) {
            size_t place = place_of(query);
            auto out = static_cast<const Value*>(shape.out) + place * width;
            auto dout = static_cast<const Value*>(shape.dout) + place * width;
            if (query % queries == 0) fetch_row(out + size_t(SOON) * shape.heads * width, queries * width);
            Floats products = {};
            float product = 0;
            int d = 0;
            for (; d + LANES <= width; d += LANES) products += load(out + d) * load(dout + d);
            for (; d < width; d++) product += to_float(out[d]) * to_float(dout[d]);
            logsumexp[query - first] = shape.logsumexp[place];
            delta[query - first] = product + sum(products);
        }
    }
};

// Attention of all tokens, or its gradients. Partial gradients of shared prefixes are summed at the end, in order.
template <typename Value>
void prefix_attention(const SharedAttention& shape) {
    std::vector<std::vector<TokenRange>> parts = parts_of(shape);
    int tasks = int(parts.size()) * shape.kv_heads;
    std::vector<std::vector<int>> contributors(shape.count);  // of every sequence, the parts that give it something
    for (int part = 0; part < int(parts.size()); part++)
        for (TokenRange stretch : parts[part])
            for (int sequence : ancestors_of(shape.sequences, stretch.sequence))
                if (contributors[sequence].empty() || contributors[sequence].back() != part) contributors[sequence].push_back(part);
    std::vector<std::vector<PartialGrad>> gifts(shape.count);  // of every sequence with several: [contributors, K]
    for (int s = 0; s < shape.count; s++)
        if (shape.dout && contributors[s].size() > 1) gifts[s].resize(contributors[s].size() * shape.kv_heads);
    std::atomic<int> unclaimed{0};
#pragma omp parallel num_threads(shape.threads)
    {
        Tiles tiles;
        PrefixAttention<Value> sharing(shape);
        for (int task; (task = unclaimed++) < tasks;) {
            int part = task / shape.kv_heads, head = task % shape.kv_heads;
            sharing(parts[part], head, [&](int s) -> PartialGrad* {
                if (gifts[s].empty()) return nullptr;
                size_t giver = std::find(contributors[s].begin(), contributors[s].end(), part) - contributors[s].begin();
                return &gifts[s][giver * shape.kv_heads + head];
            });
        }
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int task = 0; task < shape.count * shape.kv_heads; task++) {
            int s = task / shape.kv_heads, head = task % shape.kv_heads;
            if (!gifts[s].empty()) sharing.add_up(s, head, gifts[s]);
        }
    }
}

}  // namespace
