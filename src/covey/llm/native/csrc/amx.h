// AMX: products of bf16 tiles of 16 rows of 64 bytes, accumulated in fp32, on processors that have them.
//
// The right factor of a product comes as pairs: row p of its tile holds, of 16 columns, the elements 2 p and 2 p + 1.

#pragma once

#include "simd.h"

namespace {

constexpr int TILE = 16;        // rows of a tile, and floats in one
constexpr int SIDE = 2 * TILE;  // of the square of four tiles that is summed up in registers

inline int squares(int count) { return (count + SIDE - 1) / SIDE; }

// 16 rows of 16 words.
inline void transpose(Words* rows) {
#ifdef __AVX512F__
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int distance = 8; distance; distance /= 2) {
        __m512i bit = _mm512_set1_epi32(distance), other = _mm512_set1_epi32(16);
        __mmask16 set = _mm512_test_epi32_mask(lanes, bit);
        __m512i away = _mm512_xor_si512(lanes, bit);
        __m512i to_low = _mm512_mask_or_epi32(lanes, set, away, other);
        __m512i to_high = _mm512_mask_or_epi32(away, set, lanes, other);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & distance) continue;
            __m512i left = __m512i(rows[i]), right = __m512i(rows[i | distance]);
            rows[i | distance] = Words(_mm512_permutex2var_epi32(left, to_high, right));
            rows[i] = Words(_mm512_permutex2var_epi32(left, to_low, right));
        }
    }
#else
    for (int i = 0; i < TILE; i++) {
        for (int j = 0; j < i; j++) {
            uint32_t word = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = word;
        }
    }
#endif
}

#ifdef __AVX512F__
inline void transpose(__m512i* rows) { transpose(reinterpret_cast<Words*>(rows)); }
#endif

}  // namespace

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MULTIPLIES_PAIRS true
#else
#define MULTIPLIES_PAIRS false
#endif

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux lets a process use the tiles after it has asked.
inline bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// What was written is in memory, where tile instructions find it: GCC 12 does not know that they read it.
inline void compiler_barrier(const void* written) { asm volatile("" ::"r"(written) : "memory"); }

// While one lives, its thread may use the tiles.
struct Tiles {
    Tiles() {
        if (!may_use_tiles()) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64, shape.rows[tile] = TILE;
        compiler_barrier(&shape);
        _tile_loadconfig(&shape);
    }
    ~Tiles() {
        if (may_use_tiles()) _tile_release();
    }
    Tiles(const Tiles&) = delete;
};

}  // namespace

#else

namespace {

inline bool may_use_tiles() { return false; }
struct Tiles {
    ~Tiles() {}
};

}  // namespace

#endif
