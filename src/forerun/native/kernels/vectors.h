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

// Compilers keep vectors that are wider than a register in memory, and compare them lane by lane: so 16 lanes are
// kParts vectors of the processor's own width.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;

typedef float Sums __attribute__((vector_size(kNative * 4), aligned(4), may_alias));
typedef uint32_t SumWords __attribute__((vector_size(kNative * 4), aligned(4), may_alias));
typedef int32_t SumInts __attribute__((vector_size(kNative * 4), aligned(4), may_alias));
typedef uint16_t SumHalves __attribute__((vector_size(kNative * 2), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline Sums load_sums(const float* from) { return *reinterpret_cast<const Sums*>(from); }

inline Sums load_sums(const bf16* from) {
#if defined(__AVX512F__)  // one instruction, which compilers do not find in what follows
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Sums)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#else
    const SumHalves halves = *reinterpret_cast<const SumHalves*>(from);
    return (Sums)(__builtin_convertvector(halves, SumWords) << 16);
#endif
}

inline void store_sums(float* to, Sums value) { *reinterpret_cast<Sums*>(to) = value; }

inline Sums all_sums(float value) { return value - Sums{}; }

// Round to nearest, ties to even, like torch; NaN stays NaN.
inline void store_sums(bf16* to, Sums value) {
    const SumWords bits = (SumWords)value;
    const SumWords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const SumWords quiet = (bits >> 16) | 0x40;
    const SumWords nan = (SumWords)(value != value);
    const SumWords halves = (rounded & ~nan) | (quiet & nan);
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)halves));
#else
    *reinterpret_cast<SumHalves*>(to) = __builtin_convertvector(halves, SumHalves);
#endif
}

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    const uint32_t word = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
}

// 16 floats, with the operators of one part.
struct Floats {
    Sums part[kParts];
};

// All bits of a lane are set, or none.
struct Masks {
    SumInts part[kParts];
};

template <class Result, class Operation>
inline Result by_part(Operation&& operation) {
    Result result;
    for (int p = 0; p < kParts; ++p) result.part[p] = operation(p);
    return result;
}

inline Floats operator+(Floats a, Floats b) { return by_part<Floats>([&](int p) { return a.part[p] + b.part[p]; }); }
inline Floats operator-(Floats a, Floats b) { return by_part<Floats>([&](int p) { return a.part[p] - b.part[p]; }); }
inline Floats operator*(Floats a, Floats b) { return by_part<Floats>([&](int p) { return a.part[p] * b.part[p]; }); }
inline Floats operator/(Floats a, Floats b) { return by_part<Floats>([&](int p) { return a.part[p] / b.part[p]; }); }
inline Floats operator-(Floats a) { return by_part<Floats>([&](int p) { return -a.part[p]; }); }
inline Masks operator|(Masks a, Masks b) { return by_part<Masks>([&](int p) { return a.part[p] | b.part[p]; }); }
inline Masks operator==(Floats a, Floats b) { return by_part<Masks>([&](int p) { return a.part[p] == b.part[p]; }); }
inline Masks operator!=(Floats a, Floats b) { return by_part<Masks>([&](int p) { return a.part[p] != b.part[p]; }); }
inline Masks operator>=(Floats a, Floats b) { return by_part<Masks>([&](int p) { return a.part[p] >= b.part[p]; }); }
inline Floats& operator+=(Floats& a, Floats b) { return a = a + b; }

inline bool any(Masks mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask.part[0], (__m512i)mask.part[0]);
#endif
    SumInts all = mask.part[0];
    for (int p = 1; p < kParts; ++p) all |= mask.part[p];
    uint64_t words[kNative / 2], found = 0;
    std::memcpy(words, &all, sizeof words);
    for (uint64_t word : words) found |= word;
    return found != 0;
}

inline Floats splat(float value) { return by_part<Floats>([&](int) { return all_sums(value); }); }

template <class T>
inline Floats load(const T* from) {
    return by_part<Floats>([&](int p) { return load_sums(from + p * kNative); });
}

template <class T>
inline void store(T* to, Floats value) {
    for (int p = 0; p < kParts; ++p) store_sums(to + p * kNative, value.part[p]);
}

// Always the same tree of additions, so that a sum does not depend on who asks for it.
inline float sum(Floats v) {
    float lane[kLanes];
    store(lane, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

inline Floats larger(Floats a, Floats b) {
    return by_part<Floats>([&](int p) { return a.part[p] > b.part[p] ? a.part[p] : b.part[p]; });
}

inline float largest(Floats v) {
    float lane[kLanes];
    store(lane, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

// e^x to about one unit in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
// Below -87 the result is 0, above 88 infinity; NaN stays NaN.
inline Sums exponential(Sums x) {
    const Sums log2e = all_sums(1.44269504088896341f);
    const Sums shift = all_sums(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const Sums n = (x * log2e + shift) - shift;
    const Sums r = (x - n * all_sums(0.693359375f)) - n * all_sums(-2.12194440e-4f);
    Sums p = all_sums(1.f / 5040);
    p = p * r + all_sums(1.f / 720);
    p = p * r + all_sums(1.f / 120);
    p = p * r + all_sums(1.f / 24);
    p = p * r + all_sums(1.f / 6);
    p = p * r + all_sums(0.5f);
    p = p * r + all_sums(1.f);
    p = p * r + all_sums(1.f);
    const SumWords scale = (SumWords)(__builtin_convertvector(n, SumInts) + 127) << 23;
    Sums result = p * (Sums)scale;
    result = x < all_sums(-87.f) ? Sums{} : result;
    result = x > all_sums(88.f) ? all_sums(INFINITY) : result;
    return x != x ? x : result;
}

inline Floats exponential(Floats x) {
    return by_part<Floats>([&](int p) { return exponential(x.part[p]); });
}

// To a few units in the last place: a power series near 0, where the quotient would cancel.
inline Sums hyperbolic_tangent(Sums x) {
    const Sums size = x > -x ? x : -x, e = exponential(size * all_sums(-2.f));
    const Sums far = (all_sums(1.f) - e) / (all_sums(1.f) + e), z = x * x;
    Sums p = all_sums(-1382.f / 155925);
    p = p * z + all_sums(62.f / 2835);
    p = p * z + all_sums(-17.f / 315);
    p = p * z + all_sums(2.f / 15);
    p = p * z + all_sums(-1.f / 3);
    const Sums near = x + x * z * p;
    return size < all_sums(0.3f) ? near : x < Sums{} ? -far : far;
}

// Caps smoothly at -cap and cap; 0 is no cap.
inline Floats capped(Floats x, float cap) {
    if (cap == 0) return x;
    return by_part<Floats>([&](int p) { return hyperbolic_tangent(x.part[p] / all_sums(cap)) * all_sums(cap); });
}

// ------------------------------------------------------------------------------ loops that multiply

// What these loops add to must stay in registers.

// At most so many rows share what is read, and so many vectors of 16 beside them: with 32 registers
// 6 x 4 sums, 4 vectors and a broadcast, with 16 registers half as wide 6 x 2, 2 and 2.
constexpr int kMaxRows = 6;
constexpr int vectors_beside(int num_rows) {
    return kNative == 16 || num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1;
}

// Compilers like to load a value again where it is used, or to compute on it before it is broadcast; in
// inner loops that is the bottleneck.
inline void keep_in_register(SumWords& words) {
#if defined(__AVX2__)
    asm("" : "+v"(words));
#else
    (void)words;
#endif
}

// Weights and activations meet in words of four bytes: one fp32 value, or two bf16 values that are
// neighbours along the inner dimension.
template <class T>
constexpr int kDepth = 4 / sizeof(T);

inline Sums factors(SumWords words, const float*) { return (Sums)words; }

inline Sums multiply_add(Sums sum, Sums a, Sums b) { return sum + a * b; }

inline Sums add_product(Sums sum, Sums a, Sums b) {
#if defined(__FMA__)  // written out, because compilers copy the sums and then have too few registers for them
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

// The first or second bf16 value of words in memory.
inline Sums half_of(const uint32_t* words, int half) {
    const SumWords found = *reinterpret_cast<const SumWords*>(words);
    return half == 0 ? (Sums)(found << 16) : (Sums)(found & 0xffff0000u);
}

#if defined(__AVX512BF16__)
inline SumWords factors(SumWords words, const bf16*) { return words; }

inline Sums multiply_add(Sums sum, SumWords a, SumWords b) {
    return (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
struct SumPairs {
    Sums even, odd;
};

// A word of two bf16 activations that were widened beforehand.
struct WidePair {
    float even, odd;
};

template <>
inline constexpr int kDepth<WidePair> = 1;

inline SumPairs factors(SumWords words, const bf16*) {
    return {(Sums)(words << 16), (Sums)(words & 0xffff0000u)};
}

inline SumPairs factors(SumWords words, const WidePair*) { return factors(words, (const bf16*)nullptr); }

inline Sums multiply_add(Sums sum, SumPairs a, SumPairs b) {
    return add_product(add_product(sum, a.even, b.even), a.odd, b.odd);
}

// Both pointers count as changed after `sum`, so that loads of the next half are not hoisted: there they would
// displace sums from registers.
inline Sums block_hoisting(Sums sum, const uint32_t*& words, const WidePair*& pairs) {
#if defined(__AVX2__)
    asm("" : "+v"(sum), "+r"(words), "+r"(pairs));
#endif
    return sum;
}
#endif

// What words in memory are multiplied with, and one word of a row for all lanes.
template <class T>
inline auto factors_of(const uint32_t* words, const T* type) {
    SumWords found = *reinterpret_cast<const SumWords*>(words);
    keep_in_register(found);
    return factors(found, type);
}

inline SumWords spread_word(const void* word) {
    uint32_t one;
    std::memcpy(&one, word, 4);
    SumWords all = one - SumWords{};
    keep_in_register(all);
    return all;
}

template <class T>
inline auto spread(const T* word) {
    return factors(spread_word(word), word);
}

#if !defined(__AVX512BF16__)
inline SumPairs spread(const WidePair* pair) {
    return {(Sums)spread_word(&pair->even), (Sums)spread_word(&pair->odd)};
}
#endif

template <class T>
using Factors = decltype(factors(SumWords{}, static_cast<const T*>(nullptr)));

}  // namespace forerun
