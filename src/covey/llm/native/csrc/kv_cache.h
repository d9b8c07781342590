// Blocks of the KV cache, of a prompt or of a row's own tokens, for one key-value head; and the queries that read them.
//
// Stored in the order in which they are read. For vectors: keys in blocks of PAD tokens, [D][PAD] each, and values as
// [P][padded(D)], both in pieces (simd.h). For tiles (bf16 on processors with AMX): both as [P][padded(D)].
//
// Shapes: D head width, P tokens, Q queries.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "simd.h"

namespace {

template <typename Value>
inline bool in_tiles() {
    return std::is_same<Value, bf16>::value && may_use_tiles();
}

// Memory that will be read soon, fetched a few lines at a time while other work is done.
class Ahead {
  public:
    void clear() { parts.clear(), part = allowed = 0; }
    void add(const void* from, size_t bytes) {
        parts.push_back({static_cast<const char*>(from), static_cast<const char*>(from) + bytes});
    }
    int size() const { return int(parts.size()); }
    // From now on, parts before this one may be fetched: caches hold only so much.
    void allow(int end) { allowed = std::min(end, size()); }
    // Some more lines than a core waits for at a time, into the second cache.
    void some() {
        for (int lines = 24; lines && part < allowed;) {
            Part& here = parts[part];
            if (here.at < here.end) __builtin_prefetch(here.at, 0, 2), here.at += 64, lines--;
            else part++;
        }
    }

  private:
    struct Part {
        const char *at, *end;
    };
    std::vector<Part> parts;
    int part = 0, allowed = 0;
};

// Calls work(4 or fewer as a type, first of them) until all are done: so many serve the registers best.
template <typename Work>
inline void some_at_a_time(int count, Work work) {
    int m = 0;
    for (; m + 4 <= count; m += 4) work(std::integral_constant<int, 4>(), m);
    if (count - m == 3) work(std::integral_constant<int, 3>(), m);
    if (count - m == 2) work(std::integral_constant<int, 2>(), m);
    if (count - m == 1) work(std::integral_constant<int, 1>(), m);
}

// scores[m][t] = query[m] . key[t] for t < tokens.
template <typename Value, int M>
inline void score(const float* query, int stride, int width, const Value* keys, int tokens, float* scores, int row_stride,
    Ahead& ahead) {
    for (int t = 0; t < tokens; t += PAD) {
        Floats low[M] = {}, high[M] = {};
        for (int d = 0; d < width; d++, keys += PAD) {
            Floats a, b;
            load_piece(keys, a, b);
            if (d % LANES == 0) ahead.some();
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

// out[m] += sum_t weights[m][t] value[t].
template <typename Value, int M>
inline void blend(const float* weights, int row_stride, const Value* values, int stride, int tokens, float* out,
    Ahead& ahead) {
    for (int d = 0; d < stride; d += PAD) {
        Floats low[M], high[M];
        for (int m = 0; m < M; m++) {
            low[m] = load(out + m * stride + d);
            high[m] = load(out + m * stride + d + LANES);
        }
        for (int t = 0; t < tokens; t++) {
            Floats a, b;
            load_piece(values + size_t(t) * stride + d, a, b);
            if (t % LANES == 0) ahead.some();
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

// The queries of some rows, as numbers and, for tiles, as right factors of products.
template <typename Value>
class Queries {
  public:
    explicit Queries(int width) : stride(padded(width)) {}

    // Makes place for `count` of them.
    void resize(int count) {
        scratch<float>(numbers, size_t(count) * stride);
        if (in_tiles<Value>()) scratch<Value>(factors, size_t(padded(count)) * stride);
    }
    float* row(int q) { return reinterpret_cast<float*>(numbers.data()) + size_t(q) * stride; }
    const float* row(int q) const { return reinterpret_cast<const float*>(numbers.data()) + size_t(q) * stride; }

#ifdef HAVE_TILES
    // To be called when all rows are there; what a row holds past the head's width is 0.
    void turn(int count) {
        if (!in_tiles<Value>()) return;
        for (int first = 0; first < count; first += TILE) {
            for (int step = 0; step < stride / SIDE; step++) {
                __m512i* tile = tiles(first / TILE) + step * TILE;
                for (int i = 0; i < TILE; i++) {
                    const float* from = row(std::min(first + i, count - 1)) + step * SIDE;
                    tile[i] = __m512i(_mm512_cvtne2ps_pbh(load(from + LANES), load(from)));
                }
                transpose(tile);
            }
        }
    }
    __m512i* tiles(int block) { return reinterpret_cast<__m512i*>(factors.data()) + size_t(block) * stride / 2; }
    const __m512i* tiles(int block) const { return const_cast<Queries*>(this)->tiles(block); }
#else
    void turn(int) {}
#endif

  private:
    int stride;
    std::vector<Floats> numbers, factors;
};

template <typename Value>
class KVBlock {
  public:
    KVBlock(void* keys, void* values, int tokens, int width)
        : tokens(tokens), width(width), stride(padded(width)), keys(static_cast<Value*>(keys)),
          values(static_cast<Value*>(values)) {}

    // Numbers that the keys of so many tokens take, and the values.
    static size_t size(int tokens, int width) { return size_t(padded(tokens)) * padded(width); }

    void fetch_by(Ahead& ahead) const {
        size_t key_count = in_tiles<Value>() ? size_t(tokens) * stride : size_t(padded(tokens)) * width;
        ahead.add(keys, key_count * sizeof(Value));
        ahead.add(values, size_t(tokens) * stride * sizeof(Value));
    }

    // One more token.
    void append(const Value* key, const Value* value) {
        int t = tokens++;
        Value *key_to = keys + size_t(t) * stride, *value_to = values + size_t(t) * stride;
        if (in_tiles<Value>()) {
            std::copy(key, key + width, key_to);
            std::copy(value, value + width, value_to);
            std::fill(key_to + width, key_to + stride, Value{});
            std::fill(value_to + width, value_to + stride, Value{});
            return;
        }
        int slot = place_of(t % PAD, key);
        for (int d = 0; d < width; d++) keys[size_t(t / PAD * width + d) * PAD + slot] = key[d];
        for (int d = 0; d < width; d++) value_to[place_of(d, key)] = value[d];
    }

    // scores[Q, padded(P)] = queries . keys, in rows `row_stride` apart; past the tokens they are left undefined.
    void score(const Queries<Value>& queries, int first, int count, float* scores, int row_stride, Ahead& ahead) const {
        if (in_tiles<Value>()) return score_tiles(queries, first, count, scores, row_stride, ahead);
        some_at_a_time(count, [&](auto number, int q) {
            ::score<Value, decltype(number)::value>(
                queries.row(first + q), stride, width, keys, tokens, scores + size_t(q) * row_stride, row_stride, ahead);
        });
    }

    // out[Q, padded(D)] = weights[Q, padded(P)] values, or that is added to it; weights past the tokens are 0.
    void blend(const float* weights, int row_stride, int count, float* out, bool add, Ahead& ahead) const {
        if (in_tiles<Value>()) return blend_tiles(weights, row_stride, count, out, add, ahead);
        if (!add) std::fill(out, out + size_t(count) * stride, 0.0f);
        some_at_a_time(count, [&](auto number, int q) {
            ::blend<Value, decltype(number)::value>(
                weights + size_t(q) * row_stride, row_stride, values, stride, tokens, out + size_t(q) * stride, ahead);
        });
    }

  private:
    int tokens;
    const int width, stride;
    Value *keys, *values;

#ifdef HAVE_TILES
    // Keys are left factors as they lie; so the product has the tokens' scores in rows, and is turned.
    void score_tiles(const Queries<Value>& queries, int first, int count, float* scores, int row_stride, Ahead& ahead)
        const {
        constexpr int BYTES = SIDE * sizeof(Value);
        int steps = stride / SIDE;
        for (int q = first; q < first + count; q += TILE - q % TILE) {
            int columns = std::min(TILE - q % TILE, first + count - q);
            const __m512i* right = queries.tiles(q / TILE);
            for (int t = 0; t < tokens; t += TILE) {
                __m512i square[TILE];
                compiler_barrier(right);
                _tile_zero(0);
                for (int step = 0; step < steps; step++) {
                    _tile_loadd(4, keys + size_t(t) * stride + step * SIDE, stride * sizeof(Value));
                    _tile_loadd(6, right + step * TILE, BYTES);
                    _tile_dpbf16ps(0, 4, 6);
                }
                ahead.some();
                _tile_stored(0, square, sizeof *square);
                transpose(square);
                for (int i = 0; i < columns; i++)
                    _mm512_storeu_si512(scores + size_t(q - first + i) * row_stride + t, square[q % TILE + i]);
            }
        }
    }

    // Of values, two tokens at a time become pairs; the processor does that best in the halves of four numbers, whose
    // columns are put in order in the product.
    void blend_tiles(const float* weights, int row_stride, int count, float* out, bool add, Ahead& ahead) const {
        constexpr int BYTES = SIDE * sizeof(Value);
        thread_local std::vector<Floats> memory;
        const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        int all = padded(tokens);
        Value* left = scratch<Value>(memory, size_t(count + TILE) * all);
        for (int q = 0; q < count; q++)
            for (int t = 0; t < all; t += LANES)
                store(load(weights + size_t(q) * row_stride + t), left + size_t(q) * all + t);
        for (int d = 0; d < stride; d += SIDE) {
            for (int q = 0; q < count; q += TILE) {
                _tile_zero(0);
                _tile_zero(1);
                for (int t = 0; t < all; t += SIDE) {
                    __m512i low[TILE], high[TILE];
                    for (int i = 0; i < TILE; i++) {
                        const Value* pair = values + size_t(t + 2 * i) * stride + d;
                        __m512i even = t + 2 * i < tokens ? _mm512_loadu_si512(pair) : __m512i{};
                        __m512i odd = t + 2 * i + 1 < tokens ? _mm512_loadu_si512(pair + stride) : __m512i{};
                        low[i] = _mm512_unpacklo_epi16(even, odd);
                        high[i] = _mm512_unpackhi_epi16(even, odd);
                    }
                    ahead.some();
                    compiler_barrier(low);
                    compiler_barrier(high);
                    _tile_loadd(4, left + size_t(q) * all + t, all * sizeof(Value));
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
                    Floats first = _mm512_permutex2var_ps(low[i], lower, high[i]);
                    Floats second = _mm512_permutex2var_ps(low[i], upper, high[i]);
                    store(add ? load(to) + first : first, to);
                    store(add ? load(to + LANES) + second : second, to + LANES);
                }
            }
        }
    }
#else
    void score_tiles(const Queries<Value>&, int, int, float*, int, Ahead&) const {}
    void blend_tiles(const float*, int, int, float*, bool, Ahead&) const {}
#endif
};

// Keeps one layer's keys and values [K, P, D] of a prompt.
template <typename Value>
void store_prompt_kv(const Value* keys, const Value* values, Value* kept_keys, Value* kept_values, int kv_heads, int tokens,
    int width) {
    for (int head = 0; head < kv_heads; head++) {
        size_t place = head * KVBlock<Value>::size(tokens, width);
        KVBlock<Value> kept(kept_keys + place, kept_values + place, 0, width);
        for (int t = 0; t < tokens; t++) {
            size_t from = (size_t(head) * tokens + t) * width;
            kept.append(keys + from, values + from);
        }
    }
}

}  // namespace
