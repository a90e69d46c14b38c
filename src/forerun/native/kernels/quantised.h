// Weights of 8 or 4 bits times activations of 8 bits.
//
// Inputs come in groups of 16, 32 or 64. Of every output a group has one scale, an fp16 number as in GGUF
// files, and in some matrices a minimum, which is added to its weights; of every row of activations it has
// a scale of its own. The products of a group are added up as integers,
// which is exact in any order, and the groups in ascending order as floats: what a row computes is the
// same to the bit on every processor's path here, alone and among other rows.
//
// A panel is [group][word][64 outputs] with the group's 64 scales, and minima, behind its words. A word
// holds four int8 inputs, or eight inputs of 4 bits: the low halves of its bytes are the first four, the
// high halves the others, each with 8 added unless there are minima.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "interface.h"
#include "matmul.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace forerun {

constexpr int kRunInputs = 32;  // the most that are summed without a look at the group: see `Int4`
constexpr int kLargestInt8 = 127;

// ------------------------------------------------------------------------------------------- fp16

// Rounded to nearest, ties to even. Too large becomes infinite.
inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // subnormal: the addition rounds at its last bit
        float tiny;
        std::memcpy(&tiny, &bits, 4);
        return sign | uint16_t(int(std::nearbyint(tiny * 16777216.f)));
    }
    return sign | uint16_t((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline float from_half(uint16_t half) {
    const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    if ((half & 0x7c00) == 0x7c00) value = half & 0x3ff ? NAN : INFINITY;
    return half & 0x8000 ? -value : value;
}

// ------------------------------------------------------------------------------- products of a word
//
// `Lanes` is a vector of the processor, one int32 per output. Each type of weights says how the words
// of one run of 32 inputs are multiplied: `begin`, `add` for every word, and `end` gives the sum of
// products; first and last get the sum of the run's activations.
//
// The paths with VNNI multiply unsigned weights with signed activations: int8 weights have 128 added
// there, int4 weights have 8 added anyway, and `begin` takes away as many times the sum of the
// activations. AVX2's instruction for bytes adds pairs of products in 16 bits and would clip them:
// 2 x 128 x 127 of int8 (the sign moved to the activation) and 8 x 15 x 127 of int4 do fit.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define FORERUN_VNNI 1
using Lanes = __m512i;
inline Lanes lanes_of(int32_t value) { return _mm512_set1_epi32(value); }
inline Lanes load_lanes(const void* from) { return _mm512_load_si512(from); }
inline Lanes low_nibbles(Lanes w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Lanes high_nibbles(Lanes w) { return low_nibbles(_mm512_srli_epi16(w, 4)); }
inline Lanes with_128_added(Lanes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Lanes add_products(Lanes sum, Lanes w, Lanes x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Lanes add_lanes(Lanes a, Lanes b) { return _mm512_add_epi32(a, b); }
#elif defined(__AVXVNNI__)
#define FORERUN_VNNI 1
using Lanes = __m256i;
inline Lanes with_128_added(Lanes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
inline Lanes add_products(Lanes sum, Lanes w, Lanes x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#elif defined(__AVX2__)
using Lanes = __m256i;
#else
using Lanes = SumInts;
inline Lanes lanes_of(int32_t value) { return value - Lanes{}; }
inline Lanes load_lanes(const void* from) { return *static_cast<const Lanes*>(from); }
inline Lanes add_lanes(Lanes a, Lanes b) { return a + b; }
inline int32_t byte_of(int32_t word, int index) { return int8_t(uint32_t(word) >> (8 * index)); }
#endif

#if defined(__AVX2__) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__))
inline Lanes lanes_of(int32_t value) { return _mm256_set1_epi32(value); }
inline Lanes load_lanes(const void* from) { return _mm256_load_si256(static_cast<const Lanes*>(from)); }
inline Lanes low_nibbles(Lanes w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Lanes high_nibbles(Lanes w) { return low_nibbles(_mm256_srli_epi16(w, 4)); }
inline Lanes add_lanes(Lanes a, Lanes b) { return _mm256_add_epi32(a, b); }

// Compilers delay additions of integers and then lack registers for all the products.
inline Lanes kept(Lanes sum) {
    asm("" : "+x"(sum));
    return sum;
}
#endif

typedef float LaneFloats __attribute__((vector_size(sizeof(Lanes)), aligned(4), may_alias));
typedef int32_t LaneInts __attribute__((vector_size(sizeof(Lanes)), aligned(4), may_alias));
constexpr int kLaneOutputs = sizeof(Lanes) / 4;

inline LaneFloats load_halves(const uint16_t* from) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (LaneFloats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return (LaneFloats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    LaneFloats each{};
    for (int i = 0; i < kLaneOutputs; ++i) each[i] = from_half(from[i]);
    return each;
#endif
}

inline int32_t word_of(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

struct Int8 {
    static constexpr int kBits = 8;
    static constexpr int kInputs = 4;  // of a word
#if defined(FORERUN_VNNI)
    struct Word { Lanes raised; };
    static Lanes begin(int32_t sum) { return lanes_of(-128 * sum); }
    static Word take(Lanes w) { return {with_128_added(w)}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {
        return add_products(sum, w.raised, lanes_of(word_of(x)));
    }
    static Lanes end(Lanes sum, int32_t) { return sum; }
#elif defined(__AVX2__)
    struct Word { Lanes size, sign; };
    static Lanes begin(int32_t) { return _mm256_setzero_si256(); }
    static Word take(Lanes w) { return {_mm256_abs_epi8(w), w}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {
        const Lanes signed_x = _mm256_sign_epi8(lanes_of(word_of(x)), w.sign);
        const Lanes pairs = _mm256_maddubs_epi16(w.size, signed_x);
        return kept(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }
    static Lanes end(Lanes sum, int32_t) { return sum; }
#else
    struct Word { Lanes w; };
    static Lanes begin(int32_t) { return Lanes{}; }
    static Word take(Lanes w) { return {w}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {
        for (int i = 0; i < 4; ++i)
            sum += ((Lanes)((SumWords)w.w << (24 - 8 * i)) >> 24) * int32_t(x[i]);
        return sum;
    }
    static Lanes end(Lanes sum, int32_t) { return sum; }
#endif
};

struct Int4 {
    static constexpr int kBits = 4;
    static constexpr int kInputs = 8;
#if defined(FORERUN_VNNI)
    struct Word { Lanes low, high; };
    static Lanes begin(int32_t sum) { return lanes_of(-8 * sum); }
    static Word take(Lanes w) { return {low_nibbles(w), high_nibbles(w)}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {
        sum = add_products(sum, w.low, lanes_of(word_of(x)));
        return add_products(sum, w.high, lanes_of(word_of(x + 4)));
    }
    static Lanes end(Lanes sum, int32_t) { return sum; }
#elif defined(__AVX2__)
    struct Word { Lanes low, high; };
    static Lanes begin(int32_t) { return _mm256_setzero_si256(); }
    static Word take(Lanes w) { return {low_nibbles(w), high_nibbles(w)}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {  // in 16 bits until `end`
        const Lanes low = _mm256_maddubs_epi16(w.low, lanes_of(word_of(x)));
        const Lanes high = _mm256_maddubs_epi16(w.high, lanes_of(word_of(x + 4)));
        return kept(_mm256_add_epi16(sum, _mm256_add_epi16(low, high)));
    }
    static Lanes end(Lanes sum, int32_t total) {
        return add_lanes(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), lanes_of(-8 * total));
    }
#else
    struct Word { Lanes w; };
    static Lanes begin(int32_t sum) { return lanes_of(-8 * sum); }
    static Word take(Lanes w) { return {w}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {
        for (int i = 0; i < 4; ++i) {
            sum += (Lanes)((SumWords)w.w >> (8 * i) & 15) * int32_t(x[i]);
            sum += (Lanes)((SumWords)w.w >> (8 * i + 4) & 15) * int32_t(x[4 + i]);
        }
        return sum;
    }
    static Lanes end(Lanes sum, int32_t) { return sum; }
#endif
};

// ------------------------------------------------------------------------------------- activations

// Rows of activations in 8 bits, padded with zeros to whole groups of their matrix.
class QuantisedRows {
  public:
    // Makes room for rows of the inputs of any of the matrices it was called for.
    void fit(int num_rows, const Matrix& matrix) {
        const auto grow = [](auto& vector, size_t size) {
            if (vector.size() < size) vector.resize(size);
        };
        const size_t num_inputs = matrix.num_groups * matrix.group;
        grow(values_, num_rows * num_inputs);
        grow(scales_, size_t(num_rows) * matrix.num_groups);
        grow(sums_, num_rows * num_inputs / std::min(matrix.group, kRunInputs));
    }

    // Quantises a row of `width` activations, a multiple of kLanes; NaN and infinity make the scale
    // of their group NaN.
    template <class T>
    void set(int row, const T* x, int width, const Matrix& matrix) {
        int8_t* values = &values_[size_t(row) * matrix.num_groups * matrix.group];
        const int run_inputs = std::min(matrix.group, kRunInputs);
        for (int group = 0; group < matrix.num_groups; ++group) {
            const int begin = group * matrix.group, end = begin + matrix.group;
            Floats top{}, nan{};
            for (int i = begin; i < std::min(end, width); i += kLanes) {
                const Floats v = load(x + i);
                top = larger(top, larger(v, -v));
                nan += v - v;
            }
            const float most = largest(top);
            const bool is_zero = !(most > 1e-30f);
            scales_[size_t(row) * matrix.num_groups + group] =
                (is_zero ? 0 : most / kLargestInt8) + sum(nan);
            const Floats inverse = splat(is_zero || most > 3e38f ? 0 : kLargestInt8 / most);
            for (int run = begin; run < end; run += run_inputs) {
                SumInts total{};
                for (int i = run; i < run + run_inputs; i += kLanes)
                    total += rounded(i < width ? load(x + i) * inverse : Floats{}, values + i);
                int32_t sum = 0;
                for (int lane = 0; lane < kNative; ++lane) sum += total[lane];
                sums_[(size_t(row) * matrix.num_groups * matrix.group + run) / run_inputs] = sum;
            }
        }
    }

    const int8_t* values() const { return values_.data(); }
    const float* scales() const { return scales_.data(); }
    const int32_t* sums() const { return sums_.data(); }

  private:
    typedef int8_t Bytes __attribute__((vector_size(kNative), aligned(1), may_alias));

    // To the nearest integers, which are stored; NaN becomes 0. Returns the sums of the parts' lanes.
    static SumInts rounded(Floats x, int8_t* to) {
        SumInts total{};
        for (int p = 0; p < kParts; ++p) {
            const Sums shift = all_sums(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
            const Sums part = x.part[p], whole = (part + shift) - shift;
            const SumInts ints = __builtin_convertvector(part == part ? whole : Sums{}, SumInts);
            *reinterpret_cast<Bytes*>(to + p * kNative) = __builtin_convertvector(ints, Bytes);
            total += ints;
        }
        return total;
    }

    std::vector<int8_t> values_;    // [row][inputs]
    std::vector<float> scales_;     // [row][groups]
    std::vector<int32_t> sums_;     // [row][runs]
};

// -------------------------------------------------------------------------------------- a panel

// The most rows, and the vectors of outputs beside them, of which the sums stay in registers.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int kQuantisedTile = 6;
constexpr int lanes_beside(int num_rows) { return num_rows <= 3 ? 4 : 2; }
#else
constexpr int kQuantisedTile = 8;
constexpr int lanes_beside(int num_rows) { return num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1; }
#endif
constexpr int kFetchBytes = 8192;  // how far ahead of the weights memory is read

// Groups are of kRuns runs of kRun inputs. Where the panel ends, `next` is fetched: the panel that the thread
// comes to then.
template <class Kind, int kRun, int kRuns, bool kMinima, int kRows>
inline void quantised_tile(const QuantisedRows& x, int first_row, const Matrix& matrix,
                           const char* panel, const char* next, float* sums) {
    constexpr int kWidth = lanes_beside(kRows), kWords = kRun / Kind::kInputs;
    // With minima the words of 4 bits are what they are, with nothing added to be taken away.
    constexpr bool kRaised = !(kMinima && Kind::kBits == 4);
    const size_t stride = size_t(matrix.num_groups) * matrix.group, group_bytes = matrix.group_bytes();
    const char* end = panel + matrix.num_groups * group_bytes;
    for (int i = 0; i < kRows * kPanel; i += kLanes) store(sums + i, Floats{});
    for (int group = 0; group < matrix.num_groups; ++group, panel += group_bytes) {
        const int8_t* from = x.values() + first_row * stride + size_t(group) * matrix.group;
        const int32_t* totals = x.sums() + (first_row * stride + size_t(group) * matrix.group) / kRun;
        const auto total_of = [&](int r, int run) { return totals[r * (stride / kRun) + run]; };
        const float* scales = x.scales() + size_t(first_row) * matrix.num_groups + group;
        const uint16_t* weight_scales = reinterpret_cast<const uint16_t*>(panel + matrix.word_bytes());
        const char* ahead = panel + kFetchBytes;
        if (ahead >= end) ahead = next ? next + (ahead - end) : end - group_bytes;
        for (size_t line = 0; line < group_bytes; line += kLine) __builtin_prefetch(ahead + line, 0, 3);
        for (int first = 0; first < kPanel; first += kWidth * kLaneOutputs) {
            Lanes products[kRows][kWidth];
            for (int run = 0; run < kRuns; ++run) {
                Lanes part[kRows][kWidth];
                for (int r = 0; r < kRows; ++r)
                    for (auto& lanes : part[r]) lanes = Kind::begin(kRaised ? total_of(r, run) : 0);
                for (int u = 0; u < kWords; ++u) {
                    const char* words = panel + (size_t(run * kWords + u) * kPanel + first) * 4;
                    typename Kind::Word w[kWidth];
                    for (int v = 0; v < kWidth; ++v) w[v] = Kind::take(load_lanes(words + v * sizeof(Lanes)));
                    for (int r = 0; r < kRows; ++r)
                        for (int v = 0; v < kWidth; ++v)
                            part[r][v] = Kind::add(part[r][v], w[v],
                                                   from + r * stride + run * kRun + u * Kind::kInputs);
                }
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kWidth; ++v) {
                        const Lanes done = Kind::end(part[r][v], kRaised ? total_of(r, run) : 0);
                        products[r][v] = run ? add_lanes(products[r][v], done) : done;
                    }
            }
            for (int v = 0; v < kWidth; ++v) {
                const int output = first + v * kLaneOutputs;
                const LaneFloats weight_scale = load_halves(weight_scales + output);
                LaneFloats minimum{};
                if constexpr (kMinima) minimum = load_halves(weight_scales + kPanel + output);
                for (int r = 0; r < kRows; ++r) {
                    const float row_scale = scales[size_t(r) * matrix.num_groups];
                    const LaneFloats whole = __builtin_convertvector((LaneInts)products[r][v], LaneFloats);
                    LaneFloats product = whole * (weight_scale * row_scale);
                    if constexpr (kMinima) {
                        static_assert(kRuns == 1);
                        product += minimum * (float(total_of(r, 0)) * row_scale);
                    }
                    *reinterpret_cast<LaneFloats*>(sums + r * kPanel + output) += product;
                }
            }
        }
    }
}

using QuantisedTile = void (*)(const QuantisedRows&, int, const Matrix&, const char*, const char*, float*);

template <class Kind, int kRun, int kRuns, bool kMinima, size_t... kIndices>
constexpr std::array<QuantisedTile, kQuantisedTile> tiles_of(std::index_sequence<kIndices...>) {
    return {quantised_tile<Kind, kRun, kRuns, kMinima, int(kIndices) + 1>...};
}

// sums[row][kPanel] = x[first_row + row] . panel
inline void multiply_panel(const QuantisedRows& x, int first_row, int num_rows, const Matrix& matrix,
                           int panel, int next_panel, float* sums) {
    using Rows = std::make_index_sequence<kQuantisedTile>;
    // By the inputs of a group: 16, 32 and 64; then with minima 16 and 32.
    static constexpr std::array<QuantisedTile, kQuantisedTile> kTiles[2][5] = {
        {tiles_of<Int8, 16, 1, false>(Rows{}), tiles_of<Int8, 32, 1, false>(Rows{}),
         tiles_of<Int8, 32, 2, false>(Rows{}), tiles_of<Int8, 16, 1, true>(Rows{}),
         tiles_of<Int8, 32, 1, true>(Rows{})},
        {{}, tiles_of<Int4, 32, 1, false>(Rows{}), tiles_of<Int4, 32, 2, false>(Rows{}), {},
         tiles_of<Int4, 32, 1, true>(Rows{})}};
    const auto& tiles = kTiles[matrix.bits == 4][matrix.group / 32 + 3 * matrix.has_minima];
    const int num_tiles = (num_rows + kQuantisedTile - 1) / kQuantisedTile;
    for (int t = 0; t < num_tiles; ++t) {
        const int begin = int(int64_t(num_rows) * t / num_tiles);
        const int end = int(int64_t(num_rows) * (t + 1) / num_tiles);
        const char *from = reinterpret_cast<const char*>(matrix.panel(panel)), *next = nullptr;
        if (next_panel >= 0) next = reinterpret_cast<const char*>(matrix.panel(next_panel));
        tiles[end - begin - 1](x, first_row + begin, matrix, from, next, sums + begin * kPanel);
    }
}

// ------------------------------------------------------------------------------- weights in and out

// One output's weights of a group, as multiples of its scale.
struct QuantisedGroup {
    uint16_t scale, minimum;  // fp16
    int8_t values[64];
};

// The group's scale is the one of least squared error among a few: the largest weight's, which int8
// keeps, and smaller ones, which clip it. The range of 4 bits is -8 to 7, so the scale may be negative.
inline QuantisedGroup quantise_group(const float* x, int size, int bits) {
    Sums lows{}, highs{}, nans{};
    for (int i = 0; i < size; i += kNative) {
        const Sums v = load_sums(x + i);
        lows = v < lows ? v : lows, highs = v > highs ? v : highs, nans += v - v;
    }
    float low = 0, high = 0, nan = 0;
    for (int lane = 0; lane < kNative; ++lane)
        low = std::min(low, lows[lane]), high = std::max(high, highs[lane]), nan += nans[lane];
    QuantisedGroup best{to_half(nan == 0 ? 0.f : NAN), 0, {}};
    const float most = std::max(-low, high);
    if (nan != 0 || most == 0) return best;
    const int top = bits == 8 ? kLargestInt8 : 7;
    const Sums zero{}, first = zero - float(bits == 8 ? top : 8), last = zero + float(top);
    const Sums shift = zero + 12582912.f;  // as in `QuantisedRows`
    const auto whole = [&](Sums scaled) {
        const Sums rounded = (scaled + shift) - shift, raised = rounded > first ? rounded : first;
        return raised < last ? raised : last;
    };
    const int num_tried = bits == 8 ? 1 : 9;
    float least = INFINITY;
    for (int tried = 0; tried < num_tried; ++tried) {
        const float divisor = top + 0.375f * tried;
        uint16_t half = to_half(most / divisor);
        if (from_half(half) * (divisor + 0.5f) < most) ++half;  // very small ones have few bits
        if (bits == 4 && high > -low) half |= 0x8000;
        const float scale = from_half(half), inverse = 1 / scale;
        Sums errors[kParts] = {};  // the same sum on every processor
        for (int i = 0; i < size; i += kLanes)
            for (int p = 0; p < kParts; ++p) {
                const Sums given = load_sums(x + i + p * kNative);
                const Sums error = whole(given * inverse) * scale - given;
                errors[p] += error * error;
            }
        float lanes[kLanes];
        for (int p = 0; p < kParts; ++p) store_sums(lanes + p * kNative, errors[p]);
        const float error = sum(load(lanes));
        if (error < least) least = error, best.scale = half;
    }
    const float inverse = 1 / from_half(best.scale);
    for (int i = 0; i < size; i += kNative) {
        float lanes[kNative];
        store_sums(lanes, whole(load_sums(x + i) * inverse));
        for (int lane = 0; lane < kNative; ++lane) best.values[i + lane] = int8_t(lanes[lane]);
    }
    return best;
}

inline void put_group(const Matrix& matrix, int place, int group, const QuantisedGroup& from) {
    const int lane = place % kPanel, size = matrix.group, bits = matrix.bits;
    const size_t num_bytes = matrix.group_bytes();
    char* to = reinterpret_cast<char*>(matrix.words + size_t(place / kPanel) * matrix.panel_words) +
               group * num_bytes;
    const uint32_t added = matrix.has_minima ? 0 : 0x08080808u;
    const auto nibbles = [added](uint32_t bytes) { return (bytes & 0x0f0f0f0fu) ^ added; };
    for (int i = 0, word = lane; i < size; i += 32 / bits, word += kPanel) {
        uint32_t parts[2];
        std::memcpy(parts, from.values + i, bits == 8 ? 4 : 8);
        if (bits == 4) parts[0] = nibbles(parts[0]) | nibbles(parts[1]) << 4;
        std::memcpy(to + size_t(word) * 4, parts, 4);
    }
    uint16_t* scales = reinterpret_cast<uint16_t*>(to + matrix.word_bytes());
    scales[lane] = from.scale;
    if (matrix.has_minima) scales[kPanel + lane] = from.minimum;
}

inline QuantisedGroup group_of(const Matrix& matrix, int place, int group) {
    const int lane = place % kPanel;
    const char* from = reinterpret_cast<const char*>(matrix.panel(place / kPanel)) + group * matrix.group_bytes();
    QuantisedGroup found;
    const int added = matrix.has_minima ? 0 : 8;
    for (int i = 0; i < matrix.group; ++i) {
        if (matrix.bits == 8) {
            found.values[i] = int8_t(from[(size_t(i / 4) * kPanel + lane) * 4 + i % 4]);
        } else {
            const uint8_t byte = uint8_t(from[(size_t(i / 8) * kPanel + lane) * 4 + i % 4]);
            found.values[i] = int8_t((i % 8 < 4 ? byte & 15 : byte >> 4) - added);
        }
    }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(from + matrix.word_bytes());
    found.scale = scales[lane];
    found.minimum = matrix.has_minima ? scales[kPanel + lane] : 0;
    return found;
}

// Quantises one output's weights.
inline void put_output(const Matrix& matrix, int place, const float* from, int num_inputs) {
    float x[64];
    for (int group = 0; group < matrix.num_groups; ++group) {
        const int begin = group * matrix.group, given = std::min(matrix.group, num_inputs - begin);
        std::fill(std::copy(from + begin, from + begin + std::max(given, 0), x), x + 64, 0.f);
        put_group(matrix, place, group, quantise_group(x, matrix.group, matrix.bits));
    }
}

}  // namespace forerun
