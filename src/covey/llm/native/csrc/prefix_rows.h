// Prefix attention: rows of queries, keys, values and their gradients, read into A operands and written back.
//
// Matrices are [N, heads, D], so the rows of one head are far apart in memory. Queries and keys are rotated when they
// are read, and their gradients are rotated back when they are written.
//
// Shapes: N tokens, H heads, K key-value heads, M = H / K, D head width.

#pragma once

#include <algorithm>
#include <vector>

#include "decode_attention.h"
#include "gemm.h"
#include "prefix_tree.h"
#include "simd.h"

namespace {

// The transpose of `apply_rope`, for gradients.
template <typename Scalar>
inline void apply_rope_transposed(float* x, const Scalar* cosine, const Scalar* sine, int head_dim) {
    int half = head_dim / 2;
    auto turn = [&](auto a, auto b, auto c, auto s) { return a * c + b * s; };
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        f32x16 left = load(x + i), right = load(x + half + i);
        store(turn(left, right, load(cosine + i), load(sine + half + i)), x + i);
        store(turn(right, -left, load(cosine + half + i), load(sine + i)), x + half + i);
    }
    for (; i < half; i++) {
        float left = x[i], right = x[half + i];
        x[i] = turn(left, right, to_float(cosine[i]), to_float(sine[half + i]));
        x[half + i] = turn(right, -left, to_float(cosine[half + i]), to_float(sine[i]));
    }
}

template <typename Scalar>
inline void widen_row(const Scalar* from, int count, float* to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(load(from + i), to + i);
    for (; i < count; i++) to[i] = to_float(from[i]);
}
template <typename Scalar>
inline void narrow_row(const float* from, int count, Scalar* to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(load(from + i), to + i);
    for (; i < count; i++) from_float(from[i], &to[i]);
}

// The hardware prefetches no rows so far apart, so those PREFETCH_TOKENS ahead are prefetched.
constexpr int PREFETCH_TOKENS = 16;
template <typename Scalar>
inline void prefetch_row(const Scalar* from, int count) {
    for (int i = 0; i < count; i += 64 / int(sizeof(Scalar))) __builtin_prefetch(from + i);
}

// Access to the rows of one key-value head and its M query heads.
template <typename Scalar>
class PrefixRows {
  public:
    const PrefixAttentionArgs& args;
    const int head_dim, padded_dim, dim_tiles;  // padded to BLOCK, and how many tiles along k that is
    const int group;                            // query heads of a key-value head
    int kv_head = 0;

    explicit PrefixRows(const PrefixAttentionArgs& args)
        : args(args), head_dim(args.head_dim), padded_dim(blocks(head_dim) * BLOCK),
          dim_tiles(padded_dim / TILE_K<Scalar>), group(args.heads / args.kv_heads) {}

    // Row of head `member` of the group in a matrix with `heads_per_kv` heads (M or 1) to a key-value head.
    size_t index(int token, int heads_per_kv, int member) const {
        return (size_t(token) * args.kv_heads + kv_head) * heads_per_kv + member;
    }

    // Pack rows `begin` to `end` of a sequence, `heads_per_kv` of them for each token, as an A operand; rows are padded
    // with 0 to a multiple of BLOCK.
    void pack_rows(const void* heads, const Sequence& sequence, int heads_per_kv, int begin, int end, bool rotated,
        Scalar* to) {
        float* row = scratch<float>(row_memory, padded_dim);
        std::fill(row + head_dim, row + padded_dim, 0.0f);
        auto from = static_cast<const Scalar*>(heads);
        for (int i = begin; i < end; i++) {
            int token = sequence.first + i / heads_per_kv;
            const Scalar* here = from + index(token, heads_per_kv, i % heads_per_kv) * head_dim;
            if (i % heads_per_kv == 0)
                prefetch_row(here + size_t(PREFETCH_TOKENS) * args.kv_heads * heads_per_kv * head_dim,
                    heads_per_kv * head_dim);
            widen_row(here, head_dim, row);
            if (rotated) apply_rope(row, angles(args.cosine, token), angles(args.sine, token), head_dim);
            for (int d = 0; d < padded_dim; d += LANES)
                store(load(row + d), to + tile_offset<Scalar>(i - begin, d, dim_tiles));
        }
        for (int i = end - begin; i % BLOCK; i++)
            for (int d = 0; d < padded_dim; d += LANES) store(f32x16{}, to + tile_offset<Scalar>(i, d, dim_tiles));
    }

    // Write the gradient of a rotated query (row `index` of the matrix), which is overwritten.
    void store_dquery(int token, size_t index, float* dquery) const {
        apply_rope_transposed(dquery, angles(args.cosine, token), angles(args.sine, token), head_dim);
        narrow_row(dquery, head_dim, static_cast<Scalar*>(args.dquery) + index * head_dim);
    }

    // Write the gradients of a rotated key, which is overwritten, and of a value.
    void store_dkey_dvalue(int token, float* dkey, const float* dvalue) const {
        size_t offset = index(token, 1, 0) * head_dim;
        apply_rope_transposed(dkey, angles(args.cosine, token), angles(args.sine, token), head_dim);
        narrow_row(dkey, head_dim, static_cast<Scalar*>(args.dkey) + offset);
        narrow_row(dvalue, head_dim, static_cast<Scalar*>(args.dvalue) + offset);
    }

  private:
    std::vector<f32x16> row_memory;

    const Scalar* angles(const void* table, int token) const {
        return static_cast<const Scalar*>(table) + size_t(token) * head_dim;
    }
};

}  // namespace
