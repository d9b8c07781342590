// KV cache of one key-value head: blocks of a prompt or of a row's own tokens, and the products of queries with them.
//
// Layouts, in the order in which they are read:
// - vectors: keys as blocks of PAD tokens, [padded(P) / PAD, D, PAD], values as [P, padded(D)]; the PAD numbers of a
//   key's dimension, or of a piece of a value, are interleaved (simd.h).
// - AMX (bf16): keys and values as [P, padded(D)].
//
// Entry points: `KVBlock` (append, score, weighted_sum) and `store_prompt_kv`. Shapes: D head width, P tokens,
// Q queries.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "simd.h"

namespace {

template <typename Scalar>
inline bool uses_amx() {
    return std::is_same<Scalar, bf16>::value && amx_enabled();
}

// Software prefetch of a queue of memory ranges into the second-level cache, a few cache lines at a time between other
// work. Attention while decoding is bound by memory, and its rows are too far apart for the hardware prefetcher.
class Prefetcher {
  public:
    void clear() { ranges.clear(), current = limit = 0; }
    void add(const void* from, size_t bytes) {
        ranges.push_back({static_cast<const char*>(from), static_cast<const char*>(from) + bytes});
    }
    int size() const { return int(ranges.size()); }
    // Allow the ranges before `end`. What is prefetched too early is evicted before it is read.
    void allow(int end) { limit = std::min(end, size()); }
    // Prefetch the next lines: slightly more than a core has outstanding misses.
    void some() {
        for (int lines = 24; lines && current < limit;) {
            Range& range = ranges[current];
            if (range.next < range.end) __builtin_prefetch(range.next, 0, 2), range.next += 64, lines--;
            else current++;
        }
    }

  private:
    struct Range {
        const char *next, *end;
    };
    std::vector<Range> ranges;
    int current = 0, limit = 0;
};

// Call work(rows as an integral_constant, first row) for register blocks of 4 rows, and one of 3, 2 or 1. Without AVX-512
// a row of sums is four registers or more, so the blocks have 2 rows.
template <typename Work>
inline void in_register_blocks(int count, Work work) {
    constexpr int MOST = REGISTER_BYTES == 64 ? 4 : 2;
    int m = 0;
    for (; m + MOST <= count; m += MOST) work(std::integral_constant<int, MOST>(), m);
    if (MOST > 3 && count - m == 3) work(std::integral_constant<int, 3>(), m);
    if (MOST > 2 && count - m == 2) work(std::integral_constant<int, 2>(), m);
    if (count - m == 1) work(std::integral_constant<int, 1>(), m);
}

// scores[m][t] = query[m] . key[t] for t < tokens, on vectors: a vector holds 16 tokens.
template <typename Scalar, int M>
inline void score_simd(const float* query, int stride, int head_dim, const Scalar* keys, int tokens, float* scores,
    int row_stride, Prefetcher& prefetcher) {
    for (int t = 0; t < tokens; t += PAD) {
        f32x16 low[M] = {}, high[M] = {};
        for (int d = 0; d < head_dim; d++, keys += PAD) {
            f32x16 a, b;
            load_interleaved(keys, a, b);
            if (d % LANES == 0) prefetcher.some();
            for (int m = 0; m < M; m++) {
                low[m] += query[m * stride + d] * a;
                high[m] += query[m * stride + d] * b;
            }
        }
        for (int m = 0; m < M; m++) {
            store(low[m], scores + size_t(m) * row_stride + t);
            store(high[m], scores + size_t(m) * row_stride + t + LANES);
        }
    }
}

// out[m] += sum_t weights[m][t] value[t], on vectors: a vector holds 16 dimensions.
template <typename Scalar, int M>
inline void weighted_sum_simd(const float* weights, int row_stride, const Scalar* values, int stride, int tokens,
    float* out, Prefetcher& prefetcher) {
    for (int d = 0; d < stride; d += PAD) {
        f32x16 low[M], high[M];
        for (int m = 0; m < M; m++) {
            low[m] = load(out + m * stride + d);
            high[m] = load(out + m * stride + d + LANES);
        }
        for (int t = 0; t < tokens; t++) {
            f32x16 a, b;
            load_interleaved(values + size_t(t) * stride + d, a, b);
            if (t % LANES == 0) prefetcher.some();
            for (int m = 0; m < M; m++) {
                low[m] += weights[size_t(m) * row_stride + t] * a;
                high[m] += weights[size_t(m) * row_stride + t] * b;
            }
        }
        for (int m = 0; m < M; m++) {
            store(low[m], out + m * stride + d);
            store(high[m], out + m * stride + d + LANES);
        }
    }
}

// Queries [Q, padded(D)] in fp32 and, for AMX, as the B operand of products with keys.
template <typename Scalar>
class Queries {
  public:
    explicit Queries(int head_dim) : stride(padded(head_dim)) {}

    void resize(int count) {
        scratch<float>(numbers, size_t(count) * stride);
        if (uses_amx<Scalar>()) scratch<Scalar>(operand, size_t(padded(count)) * stride);
    }
    float* row(int q) { return reinterpret_cast<float*>(numbers.data()) + size_t(q) * stride; }
    const float* row(int q) const { return reinterpret_cast<const float*>(numbers.data()) + size_t(q) * stride; }

#ifdef HAVE_AMX
    // Pack the B operand. All rows must be written; columns past the head's width are 0.
    void pack(int count) {
        if (!uses_amx<Scalar>()) return;
        for (int first = 0; first < count; first += TILE) {
            for (int step = 0; step < stride / BLOCK; step++) {
                __m512i* tile = tiles(first / TILE) + step * TILE;
                for (int i = 0; i < TILE; i++) {
                    const float* from = row(std::min(first + i, count - 1)) + step * BLOCK;
                    tile[i] = __m512i(_mm512_cvtne2ps_pbh(load(from + LANES), load(from)));
                }
                transpose(tile);
            }
        }
    }
    __m512i* tiles(int strip) { return reinterpret_cast<__m512i*>(operand.data()) + size_t(strip) * stride / 2; }
    const __m512i* tiles(int strip) const { return const_cast<Queries*>(this)->tiles(strip); }
#else
    void pack(int) {}
#endif

  private:
    int stride;
    std::vector<f32x16> numbers, operand;
};

// Keys and values of consecutive tokens.
template <typename Scalar>
class KVBlock {
  public:
    KVBlock(void* keys, void* values, int tokens, int head_dim)
        : tokens(tokens), head_dim(head_dim), stride(padded(head_dim)), keys(static_cast<Scalar*>(keys)),
          values(static_cast<Scalar*>(values)) {}

    // Numbers of storage for the keys of `tokens` tokens; as many for the values.
    static size_t size(int tokens, int head_dim) { return size_t(padded(tokens)) * padded(head_dim); }

    void add_to(Prefetcher& prefetcher) const {
        size_t key_count = uses_amx<Scalar>() ? size_t(tokens) * stride : size_t(padded(tokens)) * head_dim;
        prefetcher.add(keys, key_count * sizeof(Scalar));
        prefetcher.add(values, size_t(tokens) * stride * sizeof(Scalar));
    }

    // Store the key and value [D] of one more token.
    void append(const Scalar* key, const Scalar* value) {
        int t = tokens++;
        Scalar *key_to = keys + size_t(t) * stride, *value_to = values + size_t(t) * stride;
        if (uses_amx<Scalar>()) {
            std::copy(key, key + head_dim, key_to);
            std::copy(value, value + head_dim, value_to);
            std::fill(key_to + head_dim, key_to + stride, Scalar{});
            std::fill(value_to + head_dim, value_to + stride, Scalar{});
            return;
        }
        int column = interleaved_index(t % PAD, key);
        for (int d = 0; d < head_dim; d++) keys[size_t(t / PAD * head_dim + d) * PAD + column] = key[d];
        for (int d = 0; d < head_dim; d++) value_to[interleaved_index(d, key)] = value[d];
    }

    // scores[Q, padded(P)] = queries keys', in rows `row_stride` apart; columns past the tokens are undefined.
    void score(const Queries<Scalar>& queries, int first, int count, float* scores, int row_stride,
        Prefetcher& prefetcher) const {
        if (uses_amx<Scalar>()) return score_amx(queries, first, count, scores, row_stride, prefetcher);
        in_register_blocks(count, [&](auto rows, int q) {
            score_simd<Scalar, decltype(rows)::value>(queries.row(first + q), stride, head_dim, keys, tokens,
                scores + size_t(q) * row_stride, row_stride, prefetcher);
        });
    }

    // out[Q, padded(D)] = weights[Q, padded(P)] values, added to `out` if `accumulate`. Weights past the tokens are 0.
    void weighted_sum(const float* weights, int row_stride, int count, float* out, bool accumulate,
        Prefetcher& prefetcher) const {
        if (uses_amx<Scalar>()) return weighted_sum_amx(weights, row_stride, count, out, accumulate, prefetcher);
        if (!accumulate) std::fill(out, out + size_t(count) * stride, 0.0f);
        in_register_blocks(count, [&](auto rows, int q) {
            weighted_sum_simd<Scalar, decltype(rows)::value>(weights + size_t(q) * row_stride, row_stride, values,
                stride, tokens, out + size_t(q) * stride, prefetcher);
        });
    }

  private:
    int tokens;
    const int head_dim, stride;
    Scalar *keys, *values;

#ifdef HAVE_AMX
    // Stored keys are A operands without packing, so the product has tokens in rows; it is transposed afterwards.
    void score_amx(const Queries<Scalar>& queries, int first, int count, float* scores, int row_stride,
        Prefetcher& prefetcher) const {
        constexpr int BYTES = BLOCK * sizeof(Scalar);
        int k_tiles = stride / BLOCK;
        for (int q = first; q < first + count; q += TILE - q % TILE) {
            int columns = std::min(TILE - q % TILE, first + count - q);
            const __m512i* b = queries.tiles(q / TILE);
            for (int t = 0; t < tokens; t += TILE) {
                __m512i product[TILE];
                compiler_barrier(b);
                _tile_zero(0);
                for (int k = 0; k < k_tiles; k++) {
                    _tile_loadd(4, keys + size_t(t) * stride + k * BLOCK, stride * sizeof(Scalar));
                    _tile_loadd(6, b + k * TILE, BYTES);
                    _tile_dpbf16ps(0, 4, 6);
                }
                prefetcher.some();
                _tile_stored(0, product, sizeof *product);
                transpose(product);
                for (int i = 0; i < columns; i++)
                    _mm512_storeu_si512(scores + size_t(q - first + i) * row_stride + t, product[q % TILE + i]);
            }
        }
    }

    // Values become a B operand on the fly: two tokens are interleaved by unpacklo and unpackhi, which work within
    // 128-bit lanes; the resulting permutation of columns is undone in the product.
    void weighted_sum_amx(const float* weights, int row_stride, int count, float* out, bool accumulate,
        Prefetcher& prefetcher) const {
        constexpr int BYTES = BLOCK * sizeof(Scalar);
        thread_local std::vector<f32x16> memory;
        const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        int padded_tokens = padded(tokens);
        Scalar* a = scratch<Scalar>(memory, size_t(count + TILE) * padded_tokens);
        for (int q = 0; q < count; q++)
            for (int t = 0; t < padded_tokens; t += LANES)
                store(load(weights + size_t(q) * row_stride + t), a + size_t(q) * padded_tokens + t);
        for (int d = 0; d < stride; d += BLOCK) {
            for (int q = 0; q < count; q += TILE) {
                _tile_zero(0);
                _tile_zero(1);
                for (int t = 0; t < padded_tokens; t += BLOCK) {
                    __m512i low[TILE], high[TILE];
                    for (int i = 0; i < TILE; i++) {
                        const Scalar* pair = values + size_t(t + 2 * i) * stride + d;
                        __m512i even = t + 2 * i < tokens ? _mm512_loadu_si512(pair) : __m512i{};
                        __m512i odd = t + 2 * i + 1 < tokens ? _mm512_loadu_si512(pair + stride) : __m512i{};
                        low[i] = _mm512_unpacklo_epi16(even, odd);
                        high[i] = _mm512_unpackhi_epi16(even, odd);
                    }
                    prefetcher.some();
                    compiler_barrier(low);
                    compiler_barrier(high);
                    _tile_loadd(4, a + size_t(q) * padded_tokens + t, padded_tokens * sizeof(Scalar));
                    _tile_loadd(6, low, BYTES);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, high, BYTES);
                    _tile_dpbf16ps(1, 4, 7);
                }
                __m512 low[TILE], high[TILE];
                _tile_stored(0, low, BYTES);
                _tile_stored(1, high, BYTES);
                for (int i = 0; i < std::min(TILE, count - q); i++) {
                    float* to = out + size_t(q + i) * stride + d;
                    f32x16 first = _mm512_permutex2var_ps(low[i], lower, high[i]);
                    f32x16 second = _mm512_permutex2var_ps(low[i], upper, high[i]);
                    store(accumulate ? load(to) + first : first, to);
                    store(accumulate ? load(to + LANES) + second : second, to + LANES);
                }
            }
        }
    }
#else
    void score_amx(const Queries<Scalar>&, int, int, float*, int, Prefetcher&) const {}
    void weighted_sum_amx(const float*, int, int, float*, bool, Prefetcher&) const {}
#endif
};

// Store one layer's keys and values [K, P, D] of a prompt in the cache.
template <typename Scalar>
void store_prompt_kv(const Scalar* keys, const Scalar* values, Scalar* cached_keys, Scalar* cached_values, int kv_heads,
    int tokens, int head_dim) {
    for (int head = 0; head < kv_heads; head++) {
        size_t offset = head * KVBlock<Scalar>::size(tokens, head_dim);
        KVBlock<Scalar> block(cached_keys + offset, cached_values + offset, 0, head_dim);
        for (int t = 0; t < tokens; t++) {
            size_t from = (size_t(head) * tokens + t) * head_dim;
            block.append(keys + from, values + from);
        }
    }
}

}  // namespace
