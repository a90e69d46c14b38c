// Vectors of 16 floats and bf16, in the compilers' own vector extensions: one source for every
// instruction set. Where AVX512-BF16 exists it multiplies; elsewhere bf16 is widened first.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace forerun {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline Floats splat(float value) { return value - Floats{}; }

inline Words splat(uint32_t value) { return value - Words{}; }

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load(const bf16* from) {
#if defined(__AVX512F__)  // one instruction, which compilers do not find in what follows
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#else
    const Halves halves = *reinterpret_cast<const Halves*>(from);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    const uint32_t word = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
}

inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }

// Round to nearest, ties to even, like torch; NaN stays NaN.
inline void store(bf16* to, Floats value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Words nan = (Words)(value != value);
    const Words halves = (rounded & ~nan) | (quiet & nan);
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)halves));
#else
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(halves, Halves);
#endif
}

// Always the same tree of additions, so that a sum does not depend on who asks for it.
inline float sum(Floats v) {
    float lane[kLanes];
    store(lane, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats v) {
    float lane[kLanes];
    store(lane, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

// e^x to about one unit in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
// Below -87 the result is 0, above 88 infinity; NaN stays NaN.
inline Floats exponential(Floats x) {
    const Floats log2e = splat(1.44269504088896341f);
    const Floats shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (x * log2e + shift) - shift;
    const Floats r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    Floats p = splat(1.f / 5040);
    p = p * r + splat(1.f / 720);
    p = p * r + splat(1.f / 120);
    p = p * r + splat(1.f / 24);
    p = p * r + splat(1.f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.f);
    p = p * r + splat(1.f);
    const Words scale = (Words)(__builtin_convertvector(n, Ints) + 127) << 23;
    Floats result = p * (Floats)scale;
    result = x < splat(-87.f) ? Floats{} : result;
    result = x > splat(88.f) ? splat(INFINITY) : result;
    return x != x ? x : result;
}

// To a few units in the last place: a power series near 0, where the quotient would cancel.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats size = larger(x, -x), e = exponential(size * splat(-2.f));
    const Floats far = (splat(1.f) - e) / (splat(1.f) + e), z = x * x;
    Floats p = splat(-1382.f / 155925);
    p = p * z + splat(62.f / 2835);
    p = p * z + splat(-17.f / 315);
    p = p * z + splat(2.f / 15);
    p = p * z + splat(-1.f / 3);
    const Floats near = x + x * z * p;
    return size < splat(0.3f) ? near : x < Floats{} ? -far : far;
}

// Caps smoothly at -cap and cap; 0 is no cap.
inline Floats capped(Floats x, float cap) {
    return cap == 0 ? x : hyperbolic_tangent(x / splat(cap)) * splat(cap);
}

#if defined(__clang__)
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

// Sixteen vectors to their transpose. A step interleaves vector i with vector i + 8, which moves the
// top bit of an element's row to the bottom of its column and the top bit of its column to the
// bottom of its row; four steps exchange row and column.
inline void transpose(Words (&rows)[kLanes]) {
    for (int step = 0; step < 4; ++step) {
        Words woven[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            const Words a = rows[i], b = rows[i + kLanes / 2];
            woven[2 * i] =
                FORERUN_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            woven[2 * i + 1] =
                FORERUN_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < kLanes; ++i) rows[i] = woven[i];
    }
}

// Compilers like to load a value again where it is used; in inner loops that is the bottleneck.
inline void keep_in_register(Words& words) {
#if defined(__AVX512F__)
    asm("" : "+v"(words));
#else
    (void)words;
#endif
}

// Weights and activations meet in words of four bytes: one fp32 value, or two bf16 values that are
// neighbours along the inner dimension.
template <class T>
constexpr int kDepth = 4 / sizeof(T);

inline Floats multiply_add(Floats sum, Words weights, uint32_t activation, const float*) {
    return sum + (Floats)weights * (Floats)splat(activation);
}

inline Floats multiply_add(Floats sum, Words weights, uint32_t activation, const bf16*) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights,
                                    (__m512bh)_mm512_set1_epi32(int(activation)));
#else
    const Words pair = splat(activation);
    sum += (Floats)(weights << 16) * (Floats)(pair << 16);
    return sum + (Floats)(weights & 0xffff0000u) * (Floats)(pair & 0xffff0000u);
#endif
}

}  // namespace forerun
