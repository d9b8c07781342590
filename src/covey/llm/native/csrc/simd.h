// Vectors of 16 floats in the compiler's own vector type, which becomes AVX-512, two AVX or four NEON registers, and
// the two types that tensors are stored in: `bf16`, the upper half of a float, and `float`.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline float to_float(float x) { return x; }

// Numbers in memory that begins with a cache line; what was there is lost when there is not enough.
template <typename Number>
inline Number* scratch(std::vector<Floats>& memory, size_t count) {
    size_t wanted = (count * sizeof(Number) + sizeof(Floats) - 1) / sizeof(Floats);
    if (memory.size() < wanted) memory.resize(wanted);
    return reinterpret_cast<Number*>(memory.data());
}

// To nearest, ties to even; NaN stays NaN.
inline void from_float(float x, bf16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void from_float(float x, float* to) { *to = x; }

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Floats load(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
#ifdef __AVX512BF16__
    Words words = Words(_mm512_cvtepu16_epi32(__m256i(halves))) << 16;  // which GCC makes four instructions of
#else
    Words words = __builtin_convertvector(halves, Words) << 16;
#endif
    Floats x;
    std::memcpy(&x, &words, sizeof x);
    return x;
}

// Keys and values lie in pieces of two vectors. In a piece of bf16 the halves alternate: element 2 i is number i,
// element 2 i + 1 number 16 + i. One load then gives both vectors by a shift and a mask; widening takes six
// instructions. store_prompt_kv arranges keys and values in the same way.
constexpr int PAD = 2 * LANES;
inline int padded(int count) { return (count + PAD - 1) / PAD * PAD; }

inline int place_of(int number, const bf16*) {
    int inside = number % PAD;
    return number - inside + 2 * (inside % LANES) + inside / LANES;
}
inline int place_of(int number, const float*) { return number; }

inline void load_piece(const bf16* from, Floats& low, Floats& high) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    Words left = words << 16, right = words & 0xffff0000u;
    std::memcpy(&low, &left, sizeof low);
    std::memcpy(&high, &right, sizeof high);
}
inline void load_piece(const float* from, Floats& low, Floats& high) {
    low = load(from);
    high = load(from + LANES);
}

inline void store(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }
inline void store(Floats x, bf16* to) {
#ifdef __AVX512BF16__
    __m256bh nearest = _mm512_cvtneps_pbh(__m512(x));
    std::memcpy(to, &nearest, sizeof nearest);
#else
    Words bits;
    std::memcpy(&bits, &x, sizeof bits);
    Words nearest = bits + 0x7fff + ((bits >> 16) & 1);
    Halves halves = __builtin_convertvector((x == x ? nearest : Words{} + 0x7fc00000u) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

constexpr float IMPOSSIBLE = -3e38f;  // a logit that has no mass

inline Floats broadcast(float x) { return Floats{} + x; }

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

// One number of all: halves are joined until there is one.
template <typename Join>
inline float joined(Floats x, Join join) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight a, b;
    std::memcpy(&a, &x, sizeof a);
    std::memcpy(&b, reinterpret_cast<char*>(&x) + sizeof a, sizeof b);
    a = join(a, b);
    Four c, d;
    std::memcpy(&c, &a, sizeof c);
    std::memcpy(&d, reinterpret_cast<char*>(&a) + sizeof c, sizeof d);
    c = join(c, d);
    return join(join(c[0], c[1]), join(c[2], c[3]));
}
inline float sum(Floats x) {
    return joined(x, [](auto a, auto b) { return a + b; });
}
inline float largest(Floats x) {
    return joined(x, [](auto a, auto b) { return a > b ? a : b; });
}

// exp(x) for x <= 0, to about 1 ulp, NaN for NaN: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (coefficients of
// Cephes' expf).
inline Floats exponential(Floats x) {
#ifdef __AVX512F__
    const __m512 least = __m512(broadcast(-87.3f));
    Floats y = _mm512_max_ps(least, __m512(x));  // the second where one is NaN
    Floats n = _mm512_roundscale_ps(__m512(y * 1.44269504088896341f), 0);
#else
    Floats y = greater(x, broadcast(-87.3f));
    Floats n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
#endif
    Floats r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(__m512(x), least, _CMP_NLT_UQ), __m512(p), __m512(n));
#else
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    Floats known = x < broadcast(-87.3f) ? broadcast(0.0f) : p * scale;
    return x == x ? known : x;
#endif
}

}  // namespace
