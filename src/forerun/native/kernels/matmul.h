// Activations times packed weights, for any number of rows, with one copy of the weights.
//
// A panel holds 64 outputs: word u of all of them lies together, 256 bytes, so a pass streams a
// panel from memory in order. Every output of every row is one sum over the inner dimension, its additions
// always in the same order, whatever else is in the pass: a row's result is the same to the bit
// alone and among others.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "vectors.h"

namespace forerun {

constexpr int kPanel = 64;
constexpr int kVectors = kPanel / kLanes;
// Inner words per visit of a panel: they stay in L2, or in L1 where several tiles share a panel's width.
constexpr int kBlockWords = vectors_beside(kMaxRows) == kVectors ? 1024 : 64;
constexpr int kLine = 64;
// From so many rows on there is enough to compute per word to fetch ahead meanwhile. With fewer the
// processor's own prefetching keeps up, and ours only gets in its way.
constexpr int kFetchRows = kNative == 16 ? 3 : 2;
constexpr int kChunkWords = kNative == 16 ? 1 : 8;  // between two fetches

struct Matrix {
    uint32_t* words = nullptr;  // [num_panels][num_words][kPanel]; see quantised.h for fewer bits
    int num_panels = 0;
    int num_words = 0;  // of the elements' own type
    int bits = 0;       // 8 or 4; 0: the elements' own type
    int group = 0;      // inputs with a common scale
    bool has_minima = false;  // groups have numbers that are added to their weights
    int num_groups = 0;
    size_t panel_words = 0;

    const uint32_t* panel(int index) const { return words + index * panel_words; }

    size_t num_words_packed() const { return num_panels * panel_words; }

    size_t word_bytes() const { return size_t(kPanel) * group * bits / 8; }  // of a group

    size_t group_bytes() const { return word_bytes() + kPanel * sizeof(uint16_t) * (1 + has_minima); }
};

// Lines that are fetched from memory while tiles compute on what is in the cache. They are fetched in the order of
// their addresses, so that the processor's own prefetching follows.
struct Ahead {
    const char* from = nullptr;
    int num_lines = 0;

    Ahead part(int index, int num_parts) const {
        const int begin = num_lines * index / num_parts, end = num_lines * (index + 1) / num_parts;
        return {from + size_t(begin) * kLine, end - begin};
    }

    void fetch(int first, int last) const {
        for (int line = first; line < std::min(last, num_lines); ++line)
            __builtin_prefetch(from + size_t(line) * kLine, 0, 2);
    }
};

// Most rows whose sums and the factors of a whole word fit into the registers together.
template <class T>
constexpr int kMostWhole = kMaxRows;

#if !defined(__AVX512BF16__)
template <>
inline constexpr int kMostWhole<WidePair> = 5;  // with 16 registers: 5 x 2 sums, 4 factors and a pair
#endif

template <class T, int kRows>
inline void tile(const T* x, size_t stride, const uint32_t* weights, int num_words, float* sums,
                 bool is_first, const Ahead& ahead) {
    constexpr int kWidth = vectors_beside(kRows) * kParts;
    Sums acc[kRows][kWidth];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v)
            acc[r][v] = is_first ? Sums{} : load_sums(sums + r * kPanel + v * kNative);
    const int num_lines = (ahead.num_lines * kChunkWords + num_words - 1) / num_words;  // per chunk
    for (int first = 0, line = 0; first < num_words; first += kChunkWords, line += num_lines) {
        if (kRows >= kFetchRows) ahead.fetch(line, line + num_lines);
        for (int u = first; u < std::min(first + kChunkWords, num_words); ++u) {
            const auto factor = [&](int v) { return factors_of(weights + size_t(u) * kPanel + v * kNative, x); };
            if constexpr (kRows > kMostWhole<T>) {  // the first values of the words for all rows, then the second
                const uint32_t* words = weights + size_t(u) * kPanel;
                const T* pairs = x + u;
                for (int half = 0; half < 2; ++half) {
                    Sums w[kWidth];
                    for (int v = 0; v < kWidth; ++v) w[v] = half_of(words + v * kNative, half);
                    for (int r = 0; r < kRows; ++r) {
                        const Sums activation = (Sums)spread_word(&pairs[r * stride].even + half);
                        for (int v = 0; v < kWidth; ++v) acc[r][v] = add_product(acc[r][v], w[v], activation);
                    }
                    Sums& last = acc[kRows - 1][kWidth - 1];
                    last = block_hoisting(last, words, pairs);
                }
                continue;
            }
            Factors<T> w[kWidth];
            if (kRows > 1)
                for (int v = 0; v < kWidth; ++v) w[v] = factor(v);
            for (int r = 0; r < kRows; ++r) {
                const auto activation = spread(x + r * stride + size_t(u) * kDepth<T>);
                for (int v = 0; v < kWidth; ++v)
                    acc[r][v] = multiply_add(acc[r][v], kRows > 1 ? w[v] : factor(v), activation);
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) store_sums(sums + r * kPanel + v * kNative, acc[r][v]);
}

template <class T, int kRows>
void tiles(const T* x, size_t stride, const uint32_t* weights, int num_words, float* sums,
           bool is_first, const Ahead& ahead) {
    constexpr int kStrip = vectors_beside(kRows), kStrips = kVectors / kStrip;
    for (int s = 0; s < kStrips; ++s)
        tile<T, kRows>(x, stride, weights + s * kStrip * kLanes, num_words, sums + s * kStrip * kLanes,
                       is_first, ahead.part(s, kStrips));
}

template <class T>
using Tile = void (*)(const T*, size_t, const uint32_t*, int, float*, bool, const Ahead&);

// Rows of activations as tiles read them, and their stride in words.
template <class T>
struct TileRows {
    static constexpr int kMost = kMaxRows;
    const T* from;
    size_t stride;

    TileRows(const T* x, size_t stride, int, int) : from(x), stride(stride) {}
};

#if defined(__AVX512BF16__)
template <class T>
using TileValue = T;
#else
template <class T>
using TileValue = std::conditional_t<kDepth<T> == 2, WidePair, T>;

// Where the processor cannot multiply bf16, each value is widened once for all outputs of a panel.
template <>
struct TileRows<WidePair> {
    static constexpr int kMost = kMaxRows;
    alignas(64) WidePair pairs[kMost * kBlockWords];
    const WidePair* from = pairs;
    size_t stride = kBlockWords;

    TileRows(const bf16* x, size_t x_stride, int num_rows, int num_words) {
        for (int row = 0; row < num_rows; ++row)
            for (int i = 0; i < 2 * num_words; i += kNative)
                store_sums(&pairs[row * kBlockWords].even + i, load_sums(x + row * x_stride + i));
    }
};
#endif

#if defined(FORERUN_AMX)
// As `tiles`, for any number of rows; more words than one tile takes are whole tiles.
inline void multiply_by_amx(const bf16* x, size_t stride, int num_rows, const uint32_t* weights, int num_words,
                            float* sums, bool is_first, const Ahead& ahead) {
    const int step_words = std::min(num_words, kTileSide), num_steps = num_words / step_words;
    const int num_groups = (num_rows + kTileSide - 1) / kTileSide;
    for (int group = 0, begin = 0; group < num_groups; ++group, begin += kTileSide) {
        const Ahead lines = ahead.part(group, num_groups);
        const int per_step = (lines.num_lines + num_steps - 1) / num_steps;
        shape_tiles(std::min(num_rows - begin, kTileSide), step_words);
        multiply_tiles(x + begin * stride, stride * sizeof(bf16), weights, num_steps, sums + size_t(begin) * kPanel,
                       is_first, [&](int step) { lines.fetch(step * per_step, (step + 1) * per_step); });
    }
}
#endif

// sums[row][kPanel] = x[row] . panel; x has `stride` values per row, padded with zeros to words.
template <class T>
void multiply_panel(const T* x, size_t stride, int num_rows, const Matrix& matrix, int panel,
                    int next_panel, float* sums) {
    using Value = TileValue<T>;
    static constexpr Tile<Value> kTiles[] = {tiles<Value, 1>, tiles<Value, 2>, tiles<Value, 3>,
                                             tiles<Value, 4>, tiles<Value, 5>, tiles<Value, 6>};
    const int num_tiles = (num_rows + TileRows<Value>::kMost - 1) / TileRows<Value>::kMost;
    const uint32_t* weights = matrix.panel(panel);
    for (int first = 0, num_words; first < matrix.num_words; first += num_words) {
        num_words = std::min(kBlockWords, matrix.num_words - first);
#if defined(FORERUN_AMX)
        const bool by_tiles = kDepth<T> == 2 && may_use_tiles();
        if (by_tiles && num_words > kTileSide) num_words -= num_words % kTileSide;  // what is left is a block
#endif
        const uint32_t* block = weights + size_t(first) * kPanel;
        const bool is_last = first + num_words == matrix.num_words;
        const uint32_t* next = !is_last          ? block + size_t(num_words) * kPanel
                               : next_panel >= 0 ? matrix.panel(next_panel)
                                                 : nullptr;
        const Ahead ahead{reinterpret_cast<const char*>(next), next ? num_words * kVectors : 0};
#if defined(FORERUN_AMX)
        if constexpr (kDepth<T> == 2)
            if (by_tiles) {
                const T* from = x + size_t(first) * kDepth<T>;
                multiply_by_amx(from, stride, num_rows, block, num_words, sums, first == 0, ahead);
                continue;
            }
#endif
        for (int t = 0; t < num_tiles; ++t) {
            const int begin = int(int64_t(num_rows) * t / num_tiles);
            const int end = int(int64_t(num_rows) * (t + 1) / num_tiles);
            const T* from = x + begin * stride + size_t(first) * kDepth<T>;
            const TileRows<Value> rows(from, stride, end - begin, num_words);
            kTiles[end - begin - 1](rows.from, rows.stride, block, num_words, sums + begin * kPanel,
                                    first == 0, ahead.part(t, num_tiles));
        }
    }
}

// Row-major (outputs, inputs) to panels. Output o of the matrix goes to place `place(o)`; places
// that no output has, and words past the inputs, must be zero beforehand.
template <class T, class Place>
void pack_rows(uint32_t* words, int num_words, const T* from, int num_inputs, int first, int last,
               Place&& place) {
    for (int output = first; output < last; ++output) {
        const int to = place(output);
        uint32_t* column = words + size_t(to / kPanel) * num_words * kPanel + to % kPanel;
        const char* row = reinterpret_cast<const char*>(from + size_t(output) * num_inputs);
        const int num_whole = num_inputs / kDepth<T>;
        for (int u = 0; u < num_whole; ++u)
            std::memcpy(column + size_t(u) * kPanel, row + size_t(u) * 4, 4);
        if (num_whole < num_words && num_whole * kDepth<T> < num_inputs)
            std::memcpy(column + size_t(num_whole) * kPanel, row + size_t(num_whole) * 4, sizeof(T));
    }
}

}  // namespace forerun
