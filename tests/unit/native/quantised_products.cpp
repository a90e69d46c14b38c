// Products of every format and number of rows with whole numbers as scales, beside plain sums of integers; then
// with any scales, among others beside alone.
#include <cstdio>
#include <cstdlib>

#include "quantised.h"

using namespace forerun;

constexpr int kGroups = 3, kMostRows = 40;

struct Format {
    int bits, group;
    bool has_minima;
};

// The extremes, and anything between them.
int draw(int low, int high, int kind) {
    if (kind == 0) return low;
    if (kind == 1) return high;
    if (kind == 2) return rand() % 2 ? low : high;
    return low + rand() % (high - low + 1);
}

int num_wrong(const Format& format) {
    Matrix matrix;
    matrix.num_panels = 2, matrix.bits = format.bits, matrix.group = format.group;
    matrix.has_minima = format.has_minima, matrix.num_groups = kGroups;
    matrix.panel_words = kGroups * matrix.group_bytes() / 4;
    matrix.words = static_cast<uint32_t*>(std::aligned_alloc(64, matrix.num_words_packed() * 4));
    const int low = format.bits == 8 ? -128 : format.has_minima ? 0 : -8;
    const int high = format.bits == 8 ? 127 : format.has_minima ? 15 : 7;
    const int width = kGroups * format.group;
    std::vector<int> weights(2 * kPanel * width);
    for (int place = 0; place < 2 * kPanel; ++place)
        for (int g = 0; g < kGroups; ++g) {
            const int scale = 1 + (place + g) % 3, minimum = format.has_minima ? (place + g) % 5 - 2 : 0;
            QuantisedGroup stored{to_half(float(scale)), to_half(float(minimum)), {}};
            for (int i = 0; i < format.group; ++i) {
                stored.values[i] = int8_t(draw(low, high, place % 5));
                weights[place * width + g * format.group + i] = stored.values[i] * scale + minimum;
            }
            put_group(matrix, place, g, stored);
        }
    std::vector<float> x(kMostRows * width);
    for (int i = 0; i < kMostRows * width; ++i)  // 127 in every group, so that it is stored as it is
        x[i] = i % format.group ? float(draw(-127, 127, i / width % 5)) : 127.f;
    int wrong = 0;
    const auto multiply = [&](int first, int num_rows, int panel, float factor) {
        std::vector<float> scaled(x), sums(size_t(num_rows) * kPanel);
        for (float& value : scaled) value *= factor;
        QuantisedRows rows;
        rows.fit(first + num_rows, matrix);
        for (int row = 0; row < first + num_rows; ++row) rows.set(row, &scaled[row * width], width, matrix);
        multiply_panel(rows, first, num_rows, matrix, panel, panel ? -1 : 1, sums.data());
        return sums;
    };
    std::vector<float> alone;
    for (int row = 0; row < kMostRows; ++row) {
        const std::vector<float> sums = multiply(row, 1, 1, 0.37f);
        alone.insert(alone.end(), sums.begin(), sums.end());
    }
    for (int num_rows = 1; num_rows <= kMostRows; ++num_rows) {
        const std::vector<float> among = multiply(0, num_rows, 1, 0.37f);
        wrong += 0 != std::memcmp(among.data(), alone.data(), among.size() * sizeof(float));
        for (int first = 0; first < std::min(num_rows, 2); ++first)
            for (int panel = 0; panel < 2; ++panel) {
                const std::vector<float> sums = multiply(first, num_rows - first, panel, 1);
                for (int row = first; row < num_rows; ++row)
                    for (int output = 0; output < kPanel; ++output) {
                        int64_t expected = 0;
                        for (int i = 0; i < width; ++i)
                            expected += int64_t(x[row * width + i]) * weights[(panel * kPanel + output) * width + i];
                        wrong += sums[(row - first) * kPanel + output] != float(expected);
                    }
            }
    }
    std::free(matrix.words);
    return wrong;
}

int main() {
    const Format formats[] = {{8, 16, false}, {8, 32, false}, {8, 64, false}, {8, 16, true},
                              {8, 32, true},  {4, 32, false}, {4, 64, false}, {4, 32, true}};
    int all = 0;
    for (const Format& format : formats) {
        const int wrong = num_wrong(format);
        std::printf("%d bits, groups of %d%s: %d wrong\n", format.bits, format.group,
                    format.has_minima ? ", minima" : "", wrong);
        all += wrong;
    }
    return all ? 1 : 0;
}
