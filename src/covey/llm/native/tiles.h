// AMX: products of bf16 tiles of 16 rows of 64 bytes, summed up in fp32, on the processors that have them.
//
// The right factor of a product comes as pairs: row p of its tile holds, of 16 columns, the elements 2 p and 2 p + 1.

#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE = 16;        // rows of a tile, and floats in one
constexpr int SIDE = 2 * TILE;  // of the square of four tiles that is summed up in registers

inline int squares(int count) { return (count + SIDE - 1) / SIDE; }

// Linux lets a process use the tiles after it has asked.
inline bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

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
        _tile_loadconfig(&shape);
    }
    ~Tiles() {
        if (may_use_tiles()) _tile_release();
    }
    Tiles(const Tiles&) = delete;
};

inline void transpose(__m512i* rows) {
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
            __m512i low = _mm512_permutex2var_epi32(rows[i], to_low, rows[i | distance]);
            rows[i | distance] = _mm512_permutex2var_epi32(rows[i], to_high, rows[i | distance]);
            rows[i] = low;
        }
    }
}

}  // namespace

#else

namespace {

inline bool may_use_tiles() { return false; }
struct Tiles {
    ~Tiles() {}
};

}  // namespace

#endif
