// Prefix attention: a tile of queries, its scores with the keys of the path, and products with weights or gradients.
//
// All products have keys in rows and queries in columns, so softmax reduces along rows, 16 columns at a time, and its
// result is a B operand of the next product. The queries of a token's M heads are adjacent columns.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "prefix_levels.h"

namespace {

constexpr int QUERY_TILE = 128;  // its scores with a few hundred keys stay in the second-level cache

template <typename Scalar>
class PrefixQueries {
  public:
    PrefixRows<Scalar>& rows;
    PrefixPath<Scalar>& path;
    int first = 0, last = 0;  // queries of the last sequence: number i is head i % M of token i / M
    int count = 0, keys = 0;  // columns and rows of the scores: queries, and keys of all levels, padded to BLOCK
    const Scalar *query = nullptr, *dout = nullptr;                    // B operands [padded D, count]
    const Scalar *query_by_token = nullptr, *dout_by_token = nullptr;  // B operands [count, padded D], backward only

    PrefixQueries(PrefixRows<Scalar>& rows, PrefixPath<Scalar>& path) : rows(rows), path(path) {}

    // Pack queries `begin` to `end` and, in the backward pass, the gradients of their outputs.
    void load_queries(int begin, int end) {
        const PrefixAttentionArgs& args = rows.args;
        first = begin, last = end, count = blocks(end - begin) * BLOCK, keys = 0;
        for (int level = 0; level < path.depth(); level++) keys += visible_keys(level);
        query = pack(args.query, true, query_memory, query_by_token_memory, query_by_token);
        if (args.dout) dout = pack(args.dout, false, dout_memory, dout_by_token_memory, dout_by_token);
    }

    int token_of(int query) const { return path.last_sequence().first + query / rows.group; }
    // Row of a query in the matrices [N, H].
    size_t row_of(int query) const { return rows.index(token_of(query), rows.group, query % rows.group); }

    // Keys of a level that some query of the tile attends to, padded to BLOCK.
    int visible_keys(int level) const {
        if (level + 1 < path.depth()) return path.level(level).keys;
        return blocks((last - 1) / rows.group + 1) * BLOCK;
    }

    // scores[32, 32] of keys from `key` on with queries from `column` on, as a C block; masked ones are -infinity.
    void score(int level, int key, int column, float* scores) const {
        int k_tiles = rows.dim_tiles;
        gemm_block(path.level(level).key + tile_offset<Scalar>(key, 0, k_tiles), k_tiles,
            query + tile_offset<Scalar>(column, 0, k_tiles), k_tiles, k_tiles, false, scores);
        for (int i = 0; i < 4; i++)
            mask(level, key + i / 2 * TILE, column + i % 2 * TILE, scores + i * TILE * TILE);
    }

    // [padded D, count] = sum over keys of the levels' `transposed` times `weights` [keys, count], a B operand. The
    // result is C blocks, valid until the next call.
    float* multiply_by_keys(const Scalar* weights) {
        float* sums = scratch<float>(sum_memory, size_t(count) * rows.padded_dim);
        int k_tiles = keys / TILE_K<Scalar>;
        for (int d = 0; d < rows.padded_dim; d += BLOCK) {
            for (int column = 0; column < count; column += BLOCK) {
                for (int level = 0, base = 0; level < path.depth(); base += visible_keys(level++)) {
                    int a_tiles = path.level(level).keys / TILE_K<Scalar>;
                    gemm_block(path.level(level).transposed + tile_offset<Scalar>(d, 0, a_tiles), a_tiles,
                        weights + tile_offset<Scalar>(column, base, k_tiles), k_tiles,
                        visible_keys(level) / TILE_K<Scalar>, level > 0, sums + block_offset(d, column, count / BLOCK));
                }
            }
        }
        return sums;
    }

    // Transpose C blocks [padded D, count] and call visit(query, its row [padded D]) for every query.
    template <typename Visit>
    void for_each_query(const float* sums, Visit visit) {
        int width = rows.padded_dim;
        float* by_query = scratch<float>(by_query_memory, size_t(TILE) * width);
        for (int column = 0; column < last - first; column += TILE) {
            for (int d = 0; d < width; d += TILE) {
                u32x16 tile[TILE];
                std::memcpy(tile, sums + block_offset(d, column, count / BLOCK), sizeof tile);
                transpose(tile);
                for (int i = 0; i < TILE; i++) std::memcpy(by_query + i * width + d, &tile[i], sizeof tile[i]);
            }
            for (int i = 0; i < TILE && first + column + i < last; i++) visit(first + column + i, by_query + i * width);
        }
    }

  private:
    std::vector<f32x16> query_memory, query_by_token_memory, dout_memory, dout_by_token_memory, sum_memory,
        by_query_memory;

    const Scalar* pack(const void* heads, bool rotated, std::vector<f32x16>& memory,
        std::vector<f32x16>& by_token_memory, const Scalar*& by_token) {
        size_t size = size_t(count) * rows.padded_dim;
        Scalar* to = scratch<Scalar>(memory, size);
        rows.pack_rows(heads, path.last_sequence(), rows.group, first, last, rotated, to);
        if (rows.args.dout) {
            Scalar* b = scratch<Scalar>(by_token_memory, size);
            pack_b_from_a(to, count, rows.padded_dim, b);
            by_token = b;
        }
        transpose_tiles(to, size);
        return to;
    }

    // Mask a tile of scores of 16 keys with 16 queries.
    void mask(int level, int key, int column, float* scores) const {
        int all_tokens = path.sequence(level).length;
        auto seen_by = [&](int query) {
            return level + 1 < path.depth() ? all_tokens : std::min(query, last - 1) / rows.group + 1;
        };
        if (key + TILE <= seen_by(first + column)) return;
        i32x16 seen;
        for (int i = 0; i < LANES; i++) seen[i] = seen_by(first + column + i);
        for (int i = 0; i < TILE; i++) {
            f32x16 score = load(scores + i * TILE);
            store(select(i32x16{} + (key + i) < seen, score, broadcast(-INFINITY)), scores + i * TILE);
        }
    }
};

}  // namespace
