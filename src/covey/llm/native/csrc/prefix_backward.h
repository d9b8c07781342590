// Prefix attention: the backward pass of one tile of queries (arXiv 2307.08691, algorithm 2).
//
// For 32 keys at a time, scores and weights p = exp(scaling s - logsumexp) are recomputed; then
// ds = p (dout v' - delta) scaling with delta = sum of dout * out, dV += p dout, dK += ds q, and at the end dQ = ds' k.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "prefix_queries.h"

namespace {

template <typename Scalar>
class PrefixBackward {
  public:
    // Write dQ of the tile, and add its dK and dV to the levels of the path.
    void operator()(PrefixQueries<Scalar>& queries) {
        const PrefixRows<Scalar>& rows = queries.rows;
        int count = queries.count, keys = queries.keys;
        size_t strip = size_t(BLOCK) * count;  // 32 keys with all queries
        float *scores = scratch<float>(score_memory, strip), *dweights = scratch<float>(dweight_memory, strip);
        weights = scratch<Scalar>(weight_memory, strip), dscores = scratch<Scalar>(dscore_memory, strip);
        dscores_by_key = scratch<Scalar>(by_key_memory, size_t(count) * keys);
        logsumexp = scratch<float>(logsumexp_memory, 2 * size_t(count)), delta = logsumexp + count;
        load_logsumexp_and_delta(queries);
        for (int level = 0, base = 0; level < queries.path.depth(); base += queries.visible_keys(level++)) {
            PrefixLevel<Scalar>& here = queries.path.level(level);
            for (int key = 0; key < queries.visible_keys(level); key += BLOCK) {
                for (int column = 0; column < count; column += BLOCK) {
                    size_t block = block_offset(0, column, count / BLOCK);
                    queries.score(level, key, column, scores + block);
                    gemm_block(here.value + tile_offset<Scalar>(key, 0, rows.dim_tiles), rows.dim_tiles,
                        queries.dout + tile_offset<Scalar>(column, 0, rows.dim_tiles), rows.dim_tiles, rows.dim_tiles,
                        false, dweights + block);
                }
                softmax_backward(scores, dweights, base + key, count, keys, rows.args.scaling);
                accumulate(weights, queries.dout_by_token, key, count, rows.padded_dim, here.dvalue);
                accumulate(dscores, queries.query_by_token, key, count, rows.padded_dim, here.dkey);
            }
        }
        queries.for_each_query(queries.multiply_by_keys(dscores_by_key), [&](int query, float* dquery) {
            rows.store_dquery(queries.token_of(query), queries.row_of(query), dquery);
        });
    }

  private:
    std::vector<f32x16> score_memory, dweight_memory, weight_memory, dscore_memory, by_key_memory, logsumexp_memory;
    Scalar *weights = nullptr, *dscores = nullptr;  // [32 keys, count], A operands
    Scalar* dscores_by_key = nullptr;               // [keys, count], B operand
    float *logsumexp = nullptr, *delta = nullptr;   // [count]

    // Weights and gradients of scores, from scores and gradients of weights, of 32 keys.
    void softmax_backward(const float* scores, const float* dweights, int key, int count, int keys, float scaling) {
        int across = count / TILE_K<Scalar>, k_tiles = keys / TILE_K<Scalar>;
        for (int column = 0; column < count; column += TILE) {
            f32x16 column_logsumexp = load(logsumexp + column), column_delta = load(delta + column);
            for (int i = 0; i < BLOCK; i += 2) {
                f32x16 pair[2];
                for (int j = 0; j < 2; j++) {
                    size_t from = block_offset(i + j, column, count / BLOCK);
                    f32x16 weight = exponential(load(scores + from) * scaling - column_logsumexp);
                    pair[j] = weight * (load(dweights + from) - column_delta) * scaling;
                    size_t to = tile_offset<Scalar>(i + j, column, across);
                    store(weight, weights + to);
                    store(pair[j], dscores + to);
                }
                store_pair(pair[0], pair[1], dscores_by_key + pair_offset<Scalar>(key + i, column, k_tiles));
            }
        }
    }

    // Add a [32 keys, count] times b [count, padded D] to the rows of `sums` from `key` on.
    void accumulate(const Scalar* a, const Scalar* b, int key, int count, int padded_dim, float* sums) const {
        int k_tiles = count / TILE_K<Scalar>;
        for (int d = 0; d < padded_dim; d += BLOCK)
            gemm_block(a, k_tiles, b + tile_offset<Scalar>(d, 0, k_tiles), k_tiles, k_tiles, true,
                sums + block_offset(key, d, padded_dim / BLOCK));
    }

    // Padding gets a logsumexp of infinity, so its weights are 0.
    void load_logsumexp_and_delta(const PrefixQueries<Scalar>& queries) {
        const PrefixAttentionArgs& args = queries.rows.args;
        int head_dim = queries.rows.head_dim, group = queries.rows.group;
        std::fill_n(logsumexp, queries.count, INFINITY);
        std::fill_n(delta, queries.count, 0.0f);
        for (int query = queries.first; query < queries.last; query++) {
            size_t row = queries.row_of(query);
            auto out = static_cast<const Scalar*>(args.out) + row * head_dim;
            auto dout = static_cast<const Scalar*>(args.dout) + row * head_dim;
            if (query % group == 0)
                prefetch_row(out + size_t(PREFETCH_TOKENS) * args.heads * head_dim, group * head_dim);
            f32x16 products = {};
            float remainder = 0;
            int d = 0;
            for (; d + LANES <= head_dim; d += LANES) products += load(out + d) * load(dout + d);
            for (; d < head_dim; d++) remainder += to_float(out[d]) * to_float(dout[d]);
            logsumexp[query - queries.first] = args.logsumexp[row];
            delta[query - queries.first] = remainder + reduce_add(products);
        }
    }
};

}  // namespace
