// Prefix attention: the path from the root of the prefix tree to the current sequence, with packed keys and values.
//
// The path is a stack. Tasks visit sequences in depth-first order, so an ancestor's keys and values are packed once for
// all sequences of the task that continue it. In the backward pass a level also accumulates dK and dV in fp32. They are
// written when the level is popped: to the result, or to a partial gradient if several tasks contribute to the
// sequence.

#pragma once

#include <algorithm>
#include <vector>

#include "prefix_rows.h"

namespace {

// One sequence of the path, for one key-value head.
template <typename Scalar>
struct PrefixLevel {
    int sequence, keys;  // keys: padded to BLOCK
    std::vector<f32x16> key_memory, transposed_memory, value_memory, dkey_memory, dvalue_memory;
    Scalar *key, *value;   // [keys, padded D], A operands
    Scalar* transposed;    // [padded D, keys], A operand: values, in the backward pass keys
    float *dkey, *dvalue;  // [keys, padded D], C blocks
};

// Partial dK and dV, [tokens, 2 padded D], of one contributor to a sequence; summed when all tasks have finished.
struct PartialGrad {
    int tokens = 0;
    std::vector<float> numbers;
};

template <typename Scalar>
class PrefixPath {
  public:
    explicit PrefixPath(PrefixRows<Scalar>& rows) : rows(rows), args(rows.args), with_gradients(args.dout) {}

    int depth() const { return length; }
    PrefixLevel<Scalar>& level(int number) { return levels[number]; }
    const PrefixLevel<Scalar>& level(int number) const { return levels[number]; }
    const Sequence& sequence(int number) const { return args.sequences[levels[number].sequence]; }
    const Sequence& last_sequence() const { return sequence(length - 1); }

    // Make the path that of `range.sequence`, of which the tokens up to `range.end` are packed. `partial_for` returns
    // the partial gradient for a sequence, or null if this task is its only contributor.
    template <typename PartialFor>
    void push(TokenRange range, PartialFor partial_for) {
        std::vector<int> path = ancestors_of(args.sequences, range.sequence);
        int common = 0;
        while (common < length && common < int(path.size()) && levels[common].sequence == path[common]) common++;
        pop(common, partial_for);
        for (; length < int(path.size()); length++) {
            if (length == int(levels.size())) levels.emplace_back();
            bool is_last = length + 1 == int(path.size());
            pack(levels[length], path[length], is_last ? range.end : args.sequences[path[length]].length);
        }
    }

    // Shorten the path to `new_length` levels and write the gradients of those that are removed.
    template <typename PartialFor>
    void pop(int new_length, PartialFor partial_for) {
        while (length > new_length) {
            PrefixLevel<Scalar>& level = levels[--length];
            if (!with_gradients) continue;
            const Sequence& sequence = args.sequences[level.sequence];
            PartialGrad* partial = partial_for(level.sequence);
            int tokens = std::min(level.keys, sequence.length), width = rows.padded_dim;
            if (partial) partial->tokens = tokens, partial->numbers.resize(size_t(tokens) * 2 * width);
            std::vector<float> row(2 * width);
            for (int t = 0; t < tokens; t++) {
                float* to = partial ? &partial->numbers[size_t(t) * 2 * width] : row.data();
                for (int d = 0; d < width; d += LANES) {
                    size_t from = block_offset(t, d, width / BLOCK);
                    store(load(level.dkey + from), to + d);
                    store(load(level.dvalue + from), to + width + d);
                }
                if (!partial) rows.store_dkey_dvalue(sequence.first + t, to, to + width);
            }
        }
    }

    // Sum the partial gradients [contributors, K] of a sequence for the current head, in order, and write the result.
    void reduce_partials(int sequence, const std::vector<PartialGrad>& partials) {
        int width = rows.padded_dim;
        std::vector<float> sum(2 * width);
        for (int t = 0; t < args.sequences[sequence].length; t++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (size_t i = rows.kv_head; i < partials.size(); i += args.kv_heads)
                for (int d = 0; t < partials[i].tokens && d < 2 * width; d += LANES)
                    store(load(&sum[d]) + load(&partials[i].numbers[size_t(t) * 2 * width + d]), &sum[d]);
            rows.store_dkey_dvalue(args.sequences[sequence].first + t, &sum[0], &sum[width]);
        }
    }

  private:
    PrefixRows<Scalar>& rows;
    const PrefixAttentionArgs& args;
    const bool with_gradients;
    int length = 0;
    std::vector<PrefixLevel<Scalar>> levels;  // those past `length` keep their memory for the next use

    void pack(PrefixLevel<Scalar>& level, int number, int tokens) {
        const Sequence& sequence = args.sequences[number];
        level.sequence = number;
        level.keys = blocks(tokens) * BLOCK;
        size_t size = size_t(level.keys) * rows.padded_dim;
        level.key = scratch<Scalar>(level.key_memory, size);
        level.transposed = scratch<Scalar>(level.transposed_memory, size);
        level.value = scratch<Scalar>(level.value_memory, size);
        rows.pack_rows(args.key, sequence, 1, 0, tokens, true, level.key);
        rows.pack_rows(args.value, sequence, 1, 0, tokens, false, level.value);
        pack_b_from_a(with_gradients ? level.key : level.value, level.keys, rows.padded_dim, level.transposed);
        transpose_tiles(level.transposed, size);
        if (!with_gradients) return;
        level.dkey = scratch<float>(level.dkey_memory, size);
        level.dvalue = scratch<float>(level.dvalue_memory, size);
        std::fill_n(level.dkey, size, 0.0f);
        std::fill_n(level.dvalue, size, 0.0f);
    }
};

}  // namespace
