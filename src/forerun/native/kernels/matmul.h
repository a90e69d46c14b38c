// Activations times packed weights, for any number of rows, with one copy of the weights.
//
// A panel holds 64 outputs: word u of all of them lies together, 256 bytes, so a pass streams a
// panel from memory in order. Every output of every row is one chain of multiply-adds over the inner
// dimension in the same order, whatever else is in the pass: a row's result is the same to the bit
// alone and among others.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace forerun {

constexpr int kPanel = 64;
constexpr int kVectors = kPanel / kLanes;
// Inner words per visit of a panel: they stay in L2, or in L1 where several tiles share a panel's width.
constexpr int kBlockWords = vectors_beside(kMaxRows) == kVectors ? 1024 : 128;
constexpr int kLine = 64;
// From so many rows on there is enough to compute per word to fetch ahead meanwhile. With fewer the
// processor's own prefetching keeps up, and ours only gets in its way.
constexpr int kFetchRows = 3;

struct Matrix {
    uint32_t* words = nullptr;  // [num_panels][num_words][kPanel]; see quantised.h for fewer bits
    int num_panels = 0;
    int num_words = 0;  // of the elements' own type
    int bits = 0;       // 8 or 4; 0: the elements' own type
    int group = 0;      // inputs with a common scale
    int num_groups = 0;
    size_t panel_words = 0;

    const uint32_t* panel(int index) const { return words + index * panel_words; }

    size_t num_words_packed() const { return num_panels * panel_words; }

    size_t group_bytes() const { return size_t(kPanel) * group * bits / 8 + kPanel * sizeof(uint16_t); }
};

// Where a tile fetches what comes next from memory while it computes on what is in the cache.
struct Ahead {
    const char* from = nullptr;
    int num_lines = 0;  // per word
    int step = kVectors * kLine;  // from word to word: of 64 outputs
};

inline void fetch(const Ahead& ahead, int word) {
    const char* from = ahead.from + size_t(word) * ahead.step;
    for (int line = 0; line < ahead.num_lines; ++line) __builtin_prefetch(from + line * kLine, 0, 2);
}

template <class T, int kRows>
inline void tile(const T* x, size_t stride, const uint32_t* weights, int num_words, float* sums,
                 bool is_first, const Ahead& ahead) {
    constexpr int kWidth = vectors_beside(kRows) * kParts;
    Sums acc[kRows][kWidth];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v)
            acc[r][v] = is_first ? Sums{} : load_sums(sums + r * kPanel + v * kNative);
    for (int u = 0; u < num_words; ++u) {
        if (kRows >= kFetchRows && ahead.num_lines) fetch(ahead, u);
        Factors<T> w[kWidth];
        for (int v = 0; v < kWidth; ++v)
            w[v] = factors_of(weights + size_t(u) * kPanel + v * kNative, x);
        for (int r = 0; r < kRows; ++r) {
            const auto activation = spread(x + r * stride + size_t(u) * kDepth<T>);
            for (int v = 0; v < kWidth; ++v) acc[r][v] = multiply_add(acc[r][v], w[v], activation);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v) store_sums(sums + r * kPanel + v * kNative, acc[r][v]);
}

template <class T, int kRows>
void tiles(const T* x, size_t stride, const uint32_t* weights, int num_words, float* sums,
           bool is_first, const Ahead& ahead) {
    for (int v = 0; v < kPanel; v += vectors_beside(kRows) * kLanes)
        tile<T, kRows>(x, stride, weights + v, num_words, sums + v, is_first, v ? Ahead{} : ahead);
}

template <class T>
using Tile = void (*)(const T*, size_t, const uint32_t*, int, float*, bool, const Ahead&);

// The four lines of a word are shared between the first tiles that pass over it.
inline Ahead lines_of(const uint32_t* next, int index, int num_tiles) {
    const int num_lines = num_tiles == 1 ? kVectors : num_tiles < kVectors ? 2 : 1;
    if (index * num_lines >= kVectors) return {};
    return {reinterpret_cast<const char*>(next) + index * num_lines * kLine, num_lines};
}

#if !defined(__AVX512BF16__)
// From so many rows on bf16 is widened once for all of them: their multiply-adds, in the same order, are those of
// fp32 and have the registers and the ports to themselves.
constexpr int kWidenedRows = 16;
constexpr int kWidened = 128;  // inner elements at a time, of so many rows: either stays in L1
constexpr int kRowsTogether = 8 * kMaxRows;

inline void multiply_widened(const bf16* x, size_t stride, int num_rows, const Matrix& matrix, int panel,
                             int next_panel, float* sums) {
    static constexpr Tile<float> kTiles[] = {tiles<float, 1>, tiles<float, 2>, tiles<float, 3>,
                                             tiles<float, 4>, tiles<float, 5>, tiles<float, 6>};
    alignas(64) static thread_local uint32_t words[kWidened * kPanel];
    alignas(64) static thread_local float rows[kRowsTogether * kWidened];
    for (int first = 0; first < matrix.num_words; first += kWidened / 2) {
        const int num_words = std::min(kWidened / 2, matrix.num_words - first);
        const uint32_t* from = matrix.panel(panel) + size_t(first) * kPanel;
        const uint32_t* next = first + num_words < matrix.num_words ? from + size_t(num_words) * kPanel
                               : next_panel >= 0                    ? matrix.panel(next_panel)
                                                                    : nullptr;
        for (int u = 0; u < num_words; ++u)
            for (int i = 0; i < kPanel; ++i) {
                const uint32_t pair = from[u * kPanel + i];
                words[2 * u * kPanel + i] = pair << 16;
                words[(2 * u + 1) * kPanel + i] = pair & 0xffff0000u;
            }
        for (int begin = 0; begin < num_rows; begin += kRowsTogether) {
            const int end = std::min(begin + kRowsTogether, num_rows);
            for (int row = begin; row < end; ++row)
                for (int i = 0; i < 2 * num_words; ++i)
                    rows[(row - begin) * kWidened + i] = widen(x[row * stride + 2 * first + i]);
            for (int row = begin; row < end; row += kMaxRows) {
                // The first two tiles fetch half of the next words each.
                const char* half = reinterpret_cast<const char*>(next) + row / kMaxRows * 2 * num_words * kLine;
                const Ahead ahead = next && row < 2 * kMaxRows ? Ahead{half, 1, kLine} : Ahead{};
                kTiles[std::min(kMaxRows, end - row) - 1](rows + (row - begin) * kWidened, kWidened, words,
                                                          2 * num_words, sums + row * kPanel, first == 0, ahead);
            }
        }
    }
}
#endif

// sums[row][kPanel] = x[row] . panel; x has `stride` values per row, padded with zeros to words.
template <class T>
void multiply_panel(const T* x, size_t stride, int num_rows, const Matrix& matrix, int panel,
                    int next_panel, float* sums) {
#if !defined(__AVX512BF16__)
    if constexpr (kDepth<T> == 2)
        if (num_rows >= kWidenedRows) return multiply_widened(x, stride, num_rows, matrix, panel, next_panel, sums);
#endif
    static constexpr Tile<T> kTiles[] = {tiles<T, 1>, tiles<T, 2>, tiles<T, 3>,
                                         tiles<T, 4>, tiles<T, 5>, tiles<T, 6>};
    const int num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
    const uint32_t* weights = matrix.panel(panel);
    for (int first = 0; first < matrix.num_words; first += kBlockWords) {
        const int num_words = std::min(kBlockWords, matrix.num_words - first);
        const uint32_t* block = weights + size_t(first) * kPanel;
        const bool is_last = first + num_words == matrix.num_words;
        const uint32_t* next = !is_last          ? block + size_t(num_words) * kPanel
                               : next_panel >= 0 ? matrix.panel(next_panel)
                                                 : nullptr;
        for (int t = 0; t < num_tiles; ++t) {
            const int begin = int(int64_t(num_rows) * t / num_tiles);
            const int end = int(int64_t(num_rows) * (t + 1) / num_tiles);
            const Ahead ahead = next ? lines_of(next, t, num_tiles) : Ahead{};
            const T* from = x + begin * stride + size_t(first) * kDepth<T>;
            kTiles[end - begin - 1](from, stride, block, num_words, sums + begin * kPanel,
                                    first == 0, ahead);
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
