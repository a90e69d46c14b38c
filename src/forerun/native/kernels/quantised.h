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
// `Lanes` is a vector of the processor, one int32 per output: the four bytes of a lane are multiplied with a
// word of four activations. Each type of weights says what the sum of a group begins with, from the sums of its
// activations by their byte; how a word is taken apart, once for all rows; how products are added; and
// what the sum is at the end.
//
// The instruction of VNNI multiplies unsigned weights with signed activations: int8 weights have 128 added
// there, int4 weights have 8 added anyway, and sums begin with as many times the activations, negative. AVX2's
// instruction for bytes adds pairs of products in 16 bits and would clip them: 2 x 128 x 127 of int8 (the
// sign moved to the activation) and 2 x 15 x 127 of int4 do fit. Sums of int4 stay in 16 bits, two per lane. They
// may wrap around on the way, but not in the end: 32 x 8 x 127 for 64 inputs, 16 x 15 x 127 with minima.

#if defined(FORERUN_LANE_BYTES)  // set by tests: as with VNNI, by the definition of its instruction
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define FORERUN_LANE_BYTES 64
#define FORERUN_VNNI 1
#elif defined(__AVXVNNI__)
#define FORERUN_LANE_BYTES 32
#define FORERUN_VNNI 1
#elif defined(__AVX2__)
#define FORERUN_LANE_BYTES 32
#define FORERUN_PAIRS 1
#else
#define FORERUN_LANE_BYTES 16
#endif
constexpr int kLaneBytes = FORERUN_LANE_BYTES;

typedef int32_t Lanes __attribute__((vector_size(kLaneBytes), may_alias));
typedef uint32_t LaneWords __attribute__((vector_size(kLaneBytes)));
typedef float LaneFloats __attribute__((vector_size(kLaneBytes), aligned(4), may_alias));
constexpr int kLaneOutputs = kLaneBytes / 4;

inline Lanes lanes_of(int32_t value) { return value - Lanes{}; }

inline int32_t word_of(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

#if defined(FORERUN_PAIRS)
inline Lanes add_pairs(Lanes pairs) {
    return (Lanes)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}

// Compilers delay additions of integers and then lack registers for all the products.
inline Lanes kept(Lanes sum) {
    asm("" : "+x"(sum));
    return sum;
}
#else
// sum + w . x over the four bytes of a lane, w unsigned and x signed.
inline Lanes add_products(Lanes sum, Lanes w, const int8_t* x) {
#if !defined(FORERUN_VNNI)
    for (int i = 0; i < 4; ++i) sum += (Lanes)((LaneWords)w >> (8 * i) & 255) * int32_t(x[i]);
    return sum;
#elif FORERUN_LANE_BYTES == 64
    return (Lanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)lanes_of(word_of(x)));
#else
    return (Lanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)lanes_of(word_of(x)));
#endif
}
#endif

inline LaneFloats load_halves(const uint16_t* from) {
#if FORERUN_LANE_BYTES == 64 && defined(__AVX512F__)
    return (LaneFloats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif FORERUN_LANE_BYTES == 32 && defined(__F16C__)
    return (LaneFloats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    LaneFloats each{};
    for (int i = 0; i < kLaneOutputs; ++i) each[i] = from_half(from[i]);
    return each;
#endif
}

struct Int8 {
    static constexpr int kBits = 8;
#if defined(FORERUN_PAIRS)
    struct Word { Lanes size, sign; };
    static int32_t begin(const int32_t*) { return 0; }
    static Word take(Lanes w, int) { return {(Lanes)_mm256_abs_epi8((__m256i)w), w}; }
    static Lanes add(Lanes sum, const Word& w, const int8_t* x) {
        const __m256i signed_x = _mm256_sign_epi8((__m256i)lanes_of(word_of(x)), (__m256i)w.sign);
        return kept(sum + add_pairs((Lanes)_mm256_maddubs_epi16((__m256i)w.size, signed_x)));
    }
#else
    using Word = Lanes;
    static int32_t begin(const int32_t* x) { return -128 * (x[0] + x[1] + x[2] + x[3]); }
    static Word take(Lanes w, int) { return w ^ lanes_of(int32_t(0x80808080u)); }
    static Lanes add(Lanes sum, Word w, const int8_t* x) { return add_products(sum, w, x); }
#endif
    static Lanes end(Lanes sum) { return sum; }
};

struct Int4 {
    static constexpr int kBits = 4;
    using Word = Lanes;
    static Word take(Lanes w, int half) { return (Lanes)((LaneWords)w >> (4 * half) & 0x0f0f0f0fu); }
#if defined(FORERUN_PAIRS)
    static int32_t begin(const int32_t* x) {
        return int32_t(uint32_t(uint16_t(-8 * (x[0] + x[1]))) | uint32_t(-8 * (x[2] + x[3])) << 16);
    }
    static Lanes add(Lanes sum, Word w, const int8_t* x) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)lanes_of(word_of(x)));
        return kept((Lanes)_mm256_add_epi16((__m256i)sum, pairs));
    }
    static Lanes end(Lanes sum) { return add_pairs(sum); }
#else
    static int32_t begin(const int32_t* x) { return -8 * (x[0] + x[1] + x[2] + x[3]); }
    static Lanes add(Lanes sum, Word w, const int8_t* x) { return add_products(sum, w, x); }
    static Lanes end(Lanes sum) { return sum; }
#endif
};

// ------------------------------------------------------------------------------------- activations

// Rows of activations in 8 bits, padded with zeros to whole groups of their matrix. Rows of a group lie together,
// each with what a product with it needs, so that tiles find them at fixed distances.
class QuantisedRows {
  public:
    struct Group {
        float scale;
        float total;    // of the activations, for minima
        int32_t begin;  // what sums of products begin with
    };

    static constexpr size_t pitch(int group) { return (group + sizeof(Group) + kLine - 1) / kLine * kLine; }

    // Makes room for rows of the inputs of any of the matrices it was called for, always with as many rows.
    void fit(int num_rows, const Matrix& matrix) {
        num_rows_ = num_rows | 1;  // groups that are a power of 2 apart would share places in the cache
        const size_t num_bytes = matrix.num_groups * num_rows_ * pitch(matrix.group) + kLine;
        if (bytes_.size() < num_bytes) bytes_.resize(num_bytes);
    }

    // Quantises a row of `width` activations, a multiple of kLanes; NaN and infinity make the scale
    // of their group NaN.
    template <class T>
    void set(int row, const T* x, int width, const Matrix& matrix) {
        for (int group = 0; group < matrix.num_groups; ++group) {
            int8_t* values = at(row, group, matrix.group);
            const int first = group * matrix.group, given = std::min(matrix.group, width - first);
            SumInts sizes{};  // the bits of numbers without their sign are in the numbers' order
            for (int i = 0; i < given; i += kLanes)
                for (const Sums& part : load(x + first + i).part) {
                    const SumInts size = (SumInts)part & 0x7fffffff;
                    sizes = size > sizes ? size : sizes;
                }
            int32_t most_bits = 0;
            for (int lane = 0; lane < kNative; ++lane) most_bits = std::max(most_bits, sizes[lane]);
            float most;
            std::memcpy(&most, &most_bits, 4);
            const bool is_number = most_bits < 0x7f800000, is_zero = !(most > 1e-30f);
            const Floats inverse = splat(is_zero || most > 3e38f ? 0 : kLargestInt8 / most);
            SumInts total{};
            for (int i = 0; i < matrix.group; i += kLanes)
                total += rounded(i < given ? load(x + first + i) * inverse : Floats{}, values + i);
            int32_t by_byte[4] = {};
            for (int lane = 0; lane < kNative; ++lane) by_byte[lane % 4] += total[lane];
            Group& about = *reinterpret_cast<Group*>(values + matrix.group);
            about.scale = !is_number ? NAN : is_zero ? 0 : most / kLargestInt8;
            about.total = float(by_byte[0] + by_byte[1] + by_byte[2] + by_byte[3]) * about.scale;
            about.begin = matrix.bits == 8 ? Int8::begin(by_byte) : matrix.has_minima ? 0 : Int4::begin(by_byte);
        }
    }

    // The values of a row, and behind them what there is to know of its group.
    const int8_t* at(int row, int group, int size) const {
        return const_cast<QuantisedRows*>(this)->at(row, group, size);
    }

    size_t group_stride(int group) const { return num_rows_ * pitch(group); }

  private:
    typedef int8_t Bytes __attribute__((vector_size(kNative), aligned(1), may_alias));

    int8_t* at(int row, int group, int size) {
        const uintptr_t begin = (reinterpret_cast<uintptr_t>(bytes_.data()) + kLine - 1) / kLine * kLine;
        return reinterpret_cast<int8_t*>(begin) + group * group_stride(size) + row * pitch(size);
    }

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

    std::vector<int8_t> bytes_;  // [group][row][pitch]
    size_t num_rows_ = 0;
};

// -------------------------------------------------------------------------------------- a panel

// The most rows, and the vectors of outputs beside them, of which the sums stay in registers.
constexpr int kQuantisedTile = kLaneBytes == 64 ? 8 : 5;

template <class Kind>
constexpr int lanes_beside(int num_rows) {
    if (kLaneBytes == 64) return num_rows <= 3 ? 4 : 2;
    const int num_words = sizeof(typename Kind::Word) / kLaneBytes;  // beside 3 more registers
    for (int width = 4; width > 1; width /= 2)
        if (width * (num_rows + num_words) + 3 <= 16) return width;
    return 1;
}

// Adds a group's sums of integers, with their scales, to sums of floats.
template <bool kMinima>
inline void add_group(float* sums, Lanes whole, LaneFloats weight_scale, LaneFloats minimum,
                      const QuantisedRows::Group& about) {
    LaneFloats& sum = *reinterpret_cast<LaneFloats*>(sums);
    LaneFloats product = __builtin_convertvector(whole, LaneFloats) * (weight_scale * about.scale);
    if constexpr (kMinima) product += minimum * about.total;
    sum += product;
}

constexpr int kFetchBytes = 8192;  // how far ahead of the weights memory is read

// Where the panel ends, `next` is fetched: the panel that the thread comes to then.
template <class Kind, int kGroup, bool kMinima, int kRows>
inline void quantised_tile(const QuantisedRows& x, int first_row, const Matrix& matrix,
                           const char* panel, const char* next, float* sums) {
    constexpr int kWidth = lanes_beside<Kind>(kRows), kHalves = 8 / Kind::kBits;
    constexpr size_t kPitch = QuantisedRows::pitch(kGroup), kWordBytes = size_t(kPanel) * kGroup / kHalves;
    constexpr size_t kGroupBytes = kWordBytes + kPanel * sizeof(uint16_t) * (1 + kMinima);
    constexpr int kStrips = kPanel / (kWidth * kLaneOutputs), kWords = kGroup / 4;
    constexpr int kLines = int(kGroupBytes / kLine + kStrips - 1) / kStrips;  // fetched during a strip
    const char* end = panel + matrix.num_groups * kGroupBytes;
    const int8_t* rows = x.at(first_row, 0, kGroup);
    for (int i = 0; i < kRows * kPanel; i += kLanes) store(sums + i, Floats{});
    for (; panel < end; panel += kGroupBytes, rows += x.group_stride(kGroup)) {
        const auto about = [&](int r) -> const QuantisedRows::Group& {
            return *reinterpret_cast<const QuantisedRows::Group*>(rows + r * kPitch + kGroup);
        };
        const uint16_t* weight_scales = reinterpret_cast<const uint16_t*>(panel + kWordBytes);
        const char* ahead = panel + kFetchBytes;
        if (ahead >= end) ahead = next ? next + (ahead - end) : end - kGroupBytes;
        for (int first = 0; first < kPanel; first += kWidth * kLaneOutputs, ahead += kLines * kLine) {
            Lanes products[kRows][kWidth];
            for (int r = 0; r < kRows; ++r)
                for (auto& lanes : products[r]) lanes = lanes_of(about(r).begin);
#pragma GCC unroll 16
            for (int u = 0; u < kWords; ++u) {  // words of activations
                for (int line = kLines * u / kWords; line < kLines * (u + 1) / kWords; ++line)
                    __builtin_prefetch(ahead + line * kLine, 0, 2);
                const char* words = panel + (size_t(u / kHalves) * kPanel + first) * 4;
                typename Kind::Word w[kWidth];
                for (int v = 0; v < kWidth; ++v)
                    w[v] = Kind::take(*reinterpret_cast<const Lanes*>(words + v * kLaneBytes), u % kHalves);
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kWidth; ++v)
                        products[r][v] = Kind::add(products[r][v], w[v], rows + r * kPitch + u * 4);
            }
            for (int v = 0; v < kWidth; ++v) {
                const int output = first + v * kLaneOutputs;
                const LaneFloats weight_scale = load_halves(weight_scales + output);
                LaneFloats minimum{};
                if constexpr (kMinima) minimum = load_halves(weight_scales + kPanel + output);
                for (int r = 0; r < kRows; ++r)
                    add_group<kMinima>(sums + r * kPanel + output, Kind::end(products[r][v]), weight_scale,
                                       minimum, about(r));
            }
        }
    }
}

using QuantisedTile = void (*)(const QuantisedRows&, int, const Matrix&, const char*, const char*, float*);

template <class Kind, int kGroup, bool kMinima, size_t... kIndices>
constexpr std::array<QuantisedTile, kQuantisedTile> tiles_of(std::index_sequence<kIndices...>) {
    return {quantised_tile<Kind, kGroup, kMinima, int(kIndices) + 1>...};
}

#if defined(FORERUN_AMX) && FORERUN_LANE_BYTES == 64
constexpr int kAmxRows = 13;  // from so many on it is faster

// The weights of a group as int8; of 4 bits in `buffer`.
inline const void* unpack(const char* words, const Matrix& matrix, int8_t* buffer) {
    if (matrix.bits == 8) return words;
    const __m512i low = _mm512_set1_epi8(15), shift = _mm512_set1_epi8(matrix.has_minima ? 0 : 8);
    for (size_t at = 0; at < matrix.word_bytes(); at += kLine) {
        const __m512i pairs = _mm512_loadu_si512(words + at);
        int8_t* to = buffer + at / (4 * kPanel) * (8 * kPanel) + at % (4 * kPanel);
        _mm512_storeu_si512(to, _mm512_sub_epi8(_mm512_and_si512(pairs, low), shift));
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
        _mm512_storeu_si512(to + 4 * kPanel, _mm512_sub_epi8(high, shift));
    }
    return buffer;
}

// As `quantised_tile`, for any number of rows: the same integers, then the same operations.
template <bool kMinima>
inline void multiply_by_amx(const QuantisedRows& x, int first_row, int num_rows, const Matrix& matrix,
                            const char* panel, const char* next, float* sums) {
    constexpr int kWidth = kPanel / kLaneOutputs;
    alignas(64) int8_t unpacked[64 * kPanel];
    alignas(64) int32_t products[kTileSide * kPanel];
    const size_t num_bytes = matrix.group_bytes(), pitch = QuantisedRows::pitch(matrix.group);
    const int num_tiles = (num_rows + kTileSide - 1) / kTileSide, height = (num_rows + num_tiles - 1) / num_tiles;
    std::fill(sums, sums + size_t(num_rows) * kPanel, 0.f);
    shape_tiles(height, matrix.group / 4);
    const char* end = panel + matrix.num_groups * num_bytes;
    for (int group = 0; group < matrix.num_groups; ++group, panel += num_bytes) {
        const char* ahead = panel + kFetchBytes;
        if (ahead >= end) ahead = next ? next + (ahead - end) : end - num_bytes;
        for (size_t line = 0; line < num_bytes; line += kLine) __builtin_prefetch(ahead + line, 0, 2);
        const void* weights = unpack(panel, matrix, unpacked);
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + matrix.word_bytes());
        LaneFloats scales[kWidth], minima[kWidth]{};
        for (int v = 0; v < kWidth; ++v) {
            scales[v] = load_halves(halves + v * kLaneOutputs);
            if constexpr (kMinima) minima[v] = load_halves(halves + kPanel + v * kLaneOutputs);
        }
        const int8_t* rows = x.at(first_row, group, matrix.group);
        // All tiles have as many rows; the last may begin with some of the one before, which are added once.
        for (int first = 0; first < num_rows; first += height) {
            const int begin = std::min(first, num_rows - height);
            multiply_tiles(rows + begin * pitch, pitch, weights, 1, products, true, [](int) {});
            for (int row = first; row < begin + height; ++row) {
                const int8_t* about = rows + row * pitch + matrix.group;
                for (int v = 0; v < kWidth; ++v) {
                    const int at = v * kLaneOutputs;
                    add_group<kMinima>(sums + row * kPanel + at,
                                       *reinterpret_cast<const Lanes*>(products + (row - begin) * kPanel + at),
                                       scales[v], minima[v], *reinterpret_cast<const QuantisedRows::Group*>(about));
                }
            }
        }
    }
}
#endif

// sums[row][kPanel] = x[first_row + row] . panel
inline void multiply_panel(const QuantisedRows& x, int first_row, int num_rows, const Matrix& matrix,
                           int panel, int next_panel, float* sums) {
    using Rows = std::make_index_sequence<kQuantisedTile>;
    // By the inputs of a group: 16, 32 and 64; then with minima 16 and 32.
    static constexpr std::array<QuantisedTile, kQuantisedTile> kTiles[2][5] = {
        {tiles_of<Int8, 16, false>(Rows{}), tiles_of<Int8, 32, false>(Rows{}),
         tiles_of<Int8, 64, false>(Rows{}), tiles_of<Int8, 16, true>(Rows{}),
         tiles_of<Int8, 32, true>(Rows{})},
        {{}, tiles_of<Int4, 32, false>(Rows{}), tiles_of<Int4, 64, false>(Rows{}), {},
         tiles_of<Int4, 32, true>(Rows{})}};
    const char *from = reinterpret_cast<const char*>(matrix.panel(panel)), *next = nullptr;
    if (next_panel >= 0) next = reinterpret_cast<const char*>(matrix.panel(next_panel));
#if defined(FORERUN_AMX) && FORERUN_LANE_BYTES == 64
    if (num_rows >= kAmxRows && may_use_tiles()) {
        const auto multiply = matrix.has_minima ? multiply_by_amx<true> : multiply_by_amx<false>;
        multiply(x, first_row, num_rows, matrix, from, next, sums);
        return;
    }
#endif
    const auto& tiles = kTiles[matrix.bits == 4][matrix.group / 32 + 3 * matrix.has_minima];
    const int num_tiles = (num_rows + kQuantisedTile - 1) / kQuantisedTile;
    for (int t = 0; t < num_tiles; ++t) {
        const int begin = int(int64_t(num_rows) * t / num_tiles);
        const int end = int(int64_t(num_rows) * (t + 1) / num_tiles);
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
