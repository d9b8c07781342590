// Prefix attention: the forward pass of one tile of queries, FlashAttention's without its loop over key blocks.
//
// The scores of the tile with all its keys fit into the second-level cache, so softmax takes two passes over them
// instead of the running rescaling of arXiv 2205.14135.

#pragma once

#include <cmath>
#include <vector>

#include "prefix_queries.h"

namespace {

template <typename Scalar>
class PrefixForward {
  public:
    // out = softmax(scaling q k') v, and the logsumexp of every query.
    void operator()(PrefixQueries<Scalar>& queries) {
        const PrefixAttentionArgs& args = queries.rows.args;
        int count = queries.count, keys = queries.keys, k_tiles = keys / TILE_K<Scalar>, depth = queries.path.depth();
        float* scores = scratch<float>(score_memory, size_t(count) * keys);
        Scalar* weights = scratch<Scalar>(weight_memory, size_t(count) * keys);
        for (int level = 0, base = 0; level < depth; base += queries.visible_keys(level++))
            for (int key = 0; key < queries.visible_keys(level); key += BLOCK)
                for (int column = 0; column < count; column += BLOCK)
                    queries.score(level, key, column, scores + block_offset(base + key, column, count / BLOCK));
        float* logsumexp = scratch<float>(logsumexp_memory, 2 * size_t(count));
        float* normalizers = logsumexp + count;
        for (int column = 0; column < count; column += TILE) {
            f32x16 top = broadcast(-INFINITY), total = {};
            for (int key = 0; key < keys; key += TILE) {
                const float* tile = scores + block_offset(key, column, count / BLOCK);
                for (int i = 0; i < TILE; i++) top = max(load(tile + i * TILE), top);
            }
            for (int key = 0; key < keys; key += TILE) {
                const float* tile = scores + block_offset(key, column, count / BLOCK);
                for (int i = 0; i < TILE; i += 2) {
                    f32x16 even = exponential((load(tile + i * TILE) - top) * args.scaling);
                    f32x16 odd = exponential((load(tile + (i + 1) * TILE) - top) * args.scaling);
                    total += even + odd;
                    store_pair(even, odd, weights + pair_offset<Scalar>(key + i, column, k_tiles));
                }
            }
            store(1.0f / total, normalizers + column);
            for (int i = 0; i < LANES; i++) logsumexp[column + i] = top[i] * args.scaling + std::log(total[i]);
        }
        int first = queries.first, head_dim = queries.rows.head_dim, padded_dim = queries.rows.padded_dim;
        queries.for_each_query(queries.multiply_by_keys(weights), [&](int query, float* out) {
            size_t row = queries.row_of(query);
            for (int d = 0; d < padded_dim; d += LANES) store(load(out + d) * normalizers[query - first], out + d);
            narrow_row(out, head_dim, static_cast<Scalar*>(args.out) + row * head_dim);
            args.logsumexp[row] = logsumexp[query - first];
        });
    }

  private:
    std::vector<f32x16> score_memory, weight_memory, logsumexp_memory;
};

}  // namespace
