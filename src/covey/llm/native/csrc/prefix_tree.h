// Prefix attention: its arguments, the prefix tree of sequences, and how the work is cut into tasks.
//
// A sequence is a run of tokens that several rollouts may share; it continues its parent. A token attends to all tokens
// of its ancestors and, causally, to those of its own sequence.
//
// Shapes: N tokens, H heads, K key-value heads, D head width, S sequences.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Tokens `first` to `first + length` of the packed row.
struct Sequence {
    int32_t first, length, parent;  // parent -1: none
};

// bindings.py declares the same fields. `dout` and what follows it are null in the forward pass.
struct PrefixAttentionArgs {
    const void *query, *key, *value;  // [N, H D], [N, K D], [N, K D], before rotation
    const void *cosine, *sine;        // [N, D]
    void* out;                        // [N, H D]
    float* logsumexp;                 // [N, H], of the scores; written forward, read backward
    const void* dout;                 // [N, H D]
    void *dquery, *dkey, *dvalue;     // as query, key and value
    const Sequence* sequences;        // [S] in depth-first order
    int32_t sequence_count, heads, kv_heads, head_dim, threads;
    float scaling;
};

// Tokens `begin` to `end` of a sequence, counted from its first.
struct TokenRange {
    int sequence, begin, end;
};

// Ranges whose queries one thread computes for one key-value head; no sequence occurs twice.
typedef std::vector<TokenRange> Part;

// The ancestors of a sequence, root first, and the sequence itself.
inline std::vector<int> ancestors_of(const Sequence* sequences, int sequence) {
    std::vector<int> path;
    for (; sequence >= 0; sequence = sequences[sequence].parent) path.insert(path.begin(), sequence);
    return path;
}

// Cut all tokens into parts with about the same number of scores. The cut, and so the order of all sums, depends on the
// shapes and the number of threads alone.
inline std::vector<Part> split_into_parts(const PrefixAttentionArgs& args) {
    constexpr int STEP = 16;
    std::vector<int64_t> ancestor_tokens(args.sequence_count);
    auto cost = [&](int s, int64_t begin, int64_t end) {
        return ancestor_tokens[s] * (end - begin) + (end * end - begin * begin) / 2;
    };
    int64_t total = 0;
    for (int s = 0; s < args.sequence_count; s++) {
        int parent = args.sequences[s].parent;
        ancestor_tokens[s] = parent < 0 ? 0 : ancestor_tokens[parent] + args.sequences[parent].length;
        total += cost(s, 0, args.sequences[s].length);
    }
    int64_t target = total * args.kv_heads / (8 * args.threads) + 1, part_cost = 0;
    std::vector<Part> parts(1);
    for (int s = 0; s < args.sequence_count; s++) {
        int length = args.sequences[s].length;
        for (int begin = 0; begin < length;) {
            if (begin || (part_cost && part_cost + cost(s, begin, length) / 2 > target))
                parts.emplace_back(), part_cost = 0;
            int end = length;
            if (cost(s, begin, length) > 2 * target)
                for (end = std::min(begin + STEP, length); end < length && cost(s, begin, end) < target;)
                    end = std::min(end + STEP, length);
            parts.back().push_back({s, begin, end});
            part_cost += cost(s, begin, end);
            begin = end;
        }
    }
    return parts;
}

// For every sequence, the parts that contribute to the gradients of its keys and values.
inline std::vector<std::vector<int>> contributors_of(const PrefixAttentionArgs& args, const std::vector<Part>& parts) {
    std::vector<std::vector<int>> contributors(args.sequence_count);
    for (int part = 0; part < int(parts.size()); part++) {
        for (TokenRange range : parts[part]) {
            for (int sequence : ancestors_of(args.sequences, range.sequence)) {
                std::vector<int>& known = contributors[sequence];
                if (known.empty() || known.back() != part) known.push_back(part);
            }
        }
    }
    return contributors;
}

}  // namespace
