// AMX set-up and the tile geometry of all matrix products.
//
// An AMX tile is 16 rows of 64 bytes. TDPBF16PS multiplies two tiles of bf16 and accumulates 16 x 16 sums in fp32. Its
// second operand is in VNNI layout: row p of the tile holds, for each of 16 columns, the elements 2 p and 2 p + 1.
//
// HAVE_AMX is defined if the compiler targets AMX with AVX512-BF16 on Linux; `amx_enabled` says whether the operating
// system grants it. A thread that uses tiles holds a `TileConfig`. HAVE_AVX512_BF16 (true or false) says whether there
// is the dot product of bf16 pairs on vectors.

#pragma once

#include "simd.h"

namespace {

constexpr int TILE = 16;         // rows of a tile, and columns of a tile of fp32 sums
constexpr int BLOCK = 2 * TILE;  // side of the block of 2 x 2 tiles that a micro-kernel accumulates in registers

inline int blocks(int count) { return (count + BLOCK - 1) / BLOCK; }

// Transpose 16 rows of 16 words in place.
inline void transpose(u32x16* rows) {
#ifdef __AVX512F__
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int distance = 8; distance; distance /= 2) {
        __m512i bit = _mm512_set1_epi32(distance), other = _mm512_set1_epi32(16);
        __mmask16 set = _mm512_test_epi32_mask(lanes, bit);
        __m512i partner = _mm512_xor_si512(lanes, bit);
        __m512i to_low = _mm512_mask_or_epi32(lanes, set, partner, other);
        __m512i to_high = _mm512_mask_or_epi32(partner, set, lanes, other);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & distance) continue;
            __m512i left = __m512i(rows[i]), right = __m512i(rows[i | distance]);
            rows[i | distance] = u32x16(_mm512_permutex2var_epi32(left, to_high, right));
            rows[i] = u32x16(_mm512_permutex2var_epi32(left, to_low, right));
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
inline void transpose(__m512i* rows) { transpose(reinterpret_cast<u32x16*>(rows)); }
#endif

}  // namespace

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAVE_AVX512_BF16 true
#else
#define HAVE_AVX512_BF16 false
#endif

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux allows a process to use tile data only after it has requested permission.
inline bool amx_enabled() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// Writes through other pointers happen before the tile instructions that follow: GCC 12 does not know that these read
// memory.
inline void compiler_barrier(const void* written) { asm volatile("" ::"r"(written) : "memory"); }

// Configures the calling thread's eight tiles as 16 rows of 64 bytes, and releases them at the end of the scope.
struct TileConfig {
    TileConfig() {
        if (!amx_enabled()) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64, shape.rows[tile] = TILE;
        compiler_barrier(&shape);
        _tile_loadconfig(&shape);
    }
    ~TileConfig() {
        if (amx_enabled()) _tile_release();
    }
    TileConfig(const TileConfig&) = delete;
};

}  // namespace

#else

namespace {

inline bool amx_enabled() { return false; }
struct TileConfig {
    ~TileConfig() {}
};

}  // namespace

#endif
