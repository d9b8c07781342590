// SIMD helpers: vectors of 16 floats, loads and stores in both storage types, horizontal reductions, exp.
//
// Vectors are the compiler's own vector types: one AVX-512, two AVX or four NEON registers. Intrinsics are
// used only if the generic form compiles to more instructions. Storage types, `Scalar` in all templates, are `float`
// and `bf16`, the upper half of a float; all arithmetic is in fp32.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

#ifdef __AVX512F__
constexpr int REGISTER_BYTES = 64;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

// Call work(part of the result, that part of the argument) for each register.
template <typename To, typename From, typename Work>
inline void each_register(To& to, const From& from, Work work) {
    work(to, from);
}
template <typename Vector>
inline Vector select(i32x16 mask, Vector a, Vector b) {
    return mask ? a : b;
}
#else
#ifdef __AVX2__
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

// 16 numbers in several registers. GCC computes with a vector type that is wider than a register through memory.
template <typename Number>
struct Registers {
    static constexpr int COUNT = LANES * sizeof(Number) / REGISTER_BYTES;
    typedef Number Register __attribute__((vector_size(REGISTER_BYTES)));
    Register registers[COUNT];

    Registers() = default;
    Registers(Number x) {
        for (Register& all : registers) all = x - Register{};  // keeps the sign of 0
    }
    Number& operator[](int lane) { return reinterpret_cast<Number*>(registers)[lane]; }

#define OPERATOR(op, Result)                                                                        \
    friend inline Registers<Result> operator op(const Registers& a, const Registers& b) {           \
        Registers<Result> result;                                                                   \
        for (int i = 0; i < COUNT; i++) result.registers[i] = a.registers[i] op b.registers[i];     \
        return result;                                                                              \
    }
    OPERATOR(+, Number)
    OPERATOR(-, Number)
    OPERATOR(*, Number)
    OPERATOR(/, Number)
    OPERATOR(&, Number)
    OPERATOR(<<, Number)
    OPERATOR(>>, Number)
    OPERATOR(<, int32_t)
    OPERATOR(>, int32_t)
    OPERATOR(==, int32_t)
#undef OPERATOR
    Registers operator-() const {
        Registers result;
        for (int i = 0; i < COUNT; i++) result.registers[i] = -registers[i];
        return result;
    }
    Registers& operator+=(const Registers& b) { return *this = *this + b; }
    Registers& operator/=(const Registers& b) { return *this = *this / b; }
};
typedef Registers<float> f32x16;
typedef Registers<int32_t> i32x16;
typedef Registers<uint32_t> u32x16;

template <typename To, typename From, typename Work>
inline void each_register(To& to, const From& from, Work work) {
    for (int i = 0; i < To::COUNT; i++) work(to.registers[i], from.registers[i]);
}
template <typename Number>
inline Registers<Number> select(const i32x16& mask, const Registers<Number>& a, const Registers<Number>& b) {
    Registers<Number> result;
    for (int i = 0; i < result.COUNT; i++)
        result.registers[i] = mask.registers[i] ? a.registers[i] : b.registers[i];
    return result;
}
#endif

// The same bits as a vector of another type.
template <typename To, typename From>
inline To bits_as(const From& from) {
    To to;
    each_register(to, from, [](auto& part, const auto& bits) { part = std::decay_t<decltype(part)>(bits); });
    return to;
}

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

// At least `count` numbers of `memory`, aligned to a cache line. Growing the buffer discards its contents.
template <typename Number>
inline Number* scratch(std::vector<f32x16>& memory, size_t count) {
    size_t vectors = (count * sizeof(Number) + sizeof(f32x16) - 1) / sizeof(f32x16);
    if (memory.size() < vectors) memory.resize(vectors);
    return reinterpret_cast<Number*>(memory.data());
}

// Round to nearest, ties to even; NaN stays NaN.
inline void from_float(float x, bf16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void from_float(float x, float* to) { *to = x; }

template <typename Vector>
inline Vector load_as(const void* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// 16 words from memory. Each register is copied by itself, because GCC copies larger objects through smaller registers.
template <typename Vector>
inline Vector load_words(const void* from) {
    Vector x;
    auto bytes = static_cast<const char*>(from);
    each_register(x, x, [&](auto& part, auto&) {
        std::memcpy(&part, bytes, sizeof part);
        bytes += sizeof part;
    });
    return x;
}

inline f32x16 load(const float* from) { return load_words<f32x16>(from); }
inline f32x16 load(const bf16* from) {
#ifdef __AVX512BF16__
    __m512i words = _mm512_cvtepu16_epi32(load_as<__m256i>(from));  // GCC compiles the generic form to four
    return f32x16(_mm512_slli_epi32(words, 16));
#else
    typedef uint16_t Halves __attribute__((vector_size(REGISTER_BYTES / 2)));
    u32x16 words;
    each_register(words, words, [&](auto& part, auto&) {
        part = __builtin_convertvector(load_as<Halves>(from), std::decay_t<decltype(part)>);
        from += sizeof(Halves) / sizeof(bf16);
    });
    return bits_as<f32x16>(words << 16);
#endif
}

// The KV cache pads dimensions to pairs of vectors. In bf16 the two vectors of a pair are interleaved: element 2 i is
// number i, element 2 i + 1 is number 16 + i. One load, a shift and a mask then give both vectors in fp32; widening two
// contiguous halves takes six instructions.
constexpr int PAD = 2 * LANES;
inline int padded(int count) { return (count + PAD - 1) / PAD * PAD; }

inline int interleaved_index(int number, const bf16*) {
    int lane = number % PAD;
    return number - lane + 2 * (lane % LANES) + lane / LANES;
}
inline int interleaved_index(int number, const float*) { return number; }

inline void load_interleaved(const bf16* from, f32x16& low, f32x16& high) {
    u32x16 words = load_words<u32x16>(from);
    low = bits_as<f32x16>(words << 16);
    high = bits_as<f32x16>(words & 0xffff0000u);
}
inline void load_interleaved(const float* from, f32x16& low, f32x16& high) {
    low = load(from);
    high = load(from + LANES);
}

inline void store(f32x16 x, float* to) {
    each_register(x, x, [&](auto& part, auto&) {
        std::memcpy(to, &part, sizeof part);
        to += sizeof part / sizeof(float);
    });
}
inline void store(f32x16 x, bf16* to) {
#ifdef __AVX512BF16__
    __m256bh nearest = _mm512_cvtneps_pbh(__m512(x));
    std::memcpy(to, &nearest, sizeof nearest);
#else
    typedef uint16_t Halves __attribute__((vector_size(REGISTER_BYTES / 2)));
    u32x16 bits = bits_as<u32x16>(x), nearest = bits + 0x7fff + ((bits >> 16) & 1);
    u32x16 words = select(x == x, nearest, u32x16{} + 0x7fc00000u) >> 16;
    each_register(words, words, [&](auto& part, auto&) {
        Halves halves = __builtin_convertvector(part, Halves);
        std::memcpy(to, &halves, sizeof halves);
        to += sizeof halves / sizeof(bf16);
    });
#endif
}

inline f32x16 broadcast(float x) { return f32x16{} + x; }

inline f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// Horizontal reduction by a tree: the upper half is combined with the lower until one number is left.
template <typename Combine>
inline float reduce(f32x16 x, Combine combine) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x8 a, b;
    std::memcpy(&a, &x, sizeof a);
    std::memcpy(&b, reinterpret_cast<char*>(&x) + sizeof a, sizeof b);
    a = combine(a, b);
    f32x4 c, d;
    std::memcpy(&c, &a, sizeof c);
    std::memcpy(&d, reinterpret_cast<char*>(&a) + sizeof c, sizeof d);
    c = combine(c, d);
    return combine(combine(c[0], c[1]), combine(c[2], c[3]));
}
inline float reduce_add(f32x16 x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}
inline float reduce_max(f32x16 x) {
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// exp(x) for x <= 0, to about 1 ulp, NaN for NaN: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (coefficients of
// Cephes' expf). Below -87.3, where the result would be denormal, it is 0.
inline __attribute__((always_inline)) f32x16 exponential(f32x16 x) {
#ifdef __AVX512F__
    const __m512 min_x = __m512(broadcast(-87.3f));
    f32x16 y = _mm512_max_ps(min_x, __m512(x));  // returns its second operand if one is NaN
    f32x16 n = _mm512_roundscale_ps(__m512(y * 1.44269504088896341f), 0);
#else
    f32x16 y = max(x, broadcast(-87.3f));
    f32x16 n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
#endif
    f32x16 r = y - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(__m512(x), min_x, _CMP_NLT_UQ), __m512(p), __m512(n));
#else
    i32x16 exponent;
    each_register(exponent, n, [](auto& part, const auto& of_n) {
        part = __builtin_convertvector(of_n, std::decay_t<decltype(part)>);
    });
    f32x16 scale = bits_as<f32x16>((exponent + 127) << 23);
    f32x16 result = select(x < broadcast(-87.3f), broadcast(0.0f), p * scale);
    return select(x == x, result, x);
#endif
}

}  // namespace
