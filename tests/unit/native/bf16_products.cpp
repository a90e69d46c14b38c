// Products of bf16 for every number of rows: near the sums in fp64, and a row's bits with any rows beside it.
// With an argument the system refuses the registers of AMX. The last line is a hash of all bits.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "matmul.h"

using namespace forerun;

constexpr int kMostRows = 40;
constexpr int kOutputs = 2 * kPanel;

bool uses_amx() {
#if defined(FORERUN_AMX)
    return may_use_tiles();
#else
    return false;
#endif
}

int main(int num_arguments, char**) {
    static char stack[8192];  // less than a signal needs to save tiles
    const stack_t small{stack, 0, sizeof stack};
    if (num_arguments > 1) sigaltstack(&small, nullptr);
    int far = 0, different = 0;
    uint64_t hash = 0;
    for (int inputs : {1, 2, 31, 32, 33, 64, 576, 1000, 2046, 2048, 2112, 4500}) {  // blocks of 2048, tiles of 32
        const int num_words = (inputs + 1) / 2, stride = 2 * num_words;
        std::vector<bf16> weights(size_t(kOutputs) * inputs), x(size_t(kMostRows) * stride, bf16{0});
        const auto draw = [] {  // of both signs, from 2^-4 to 2^4
            return bf16{uint16_t((rand() % 2 << 15) + (123 << 7) + rand() % (8 << 7))};
        };
        for (bf16& weight : weights) weight = draw();
        for (int row = 0; row < kMostRows; ++row)
            for (int i = 0; i < inputs; ++i) x[size_t(row) * stride + i] = draw();
        Matrix matrix;
        matrix.num_panels = 2, matrix.num_words = num_words, matrix.panel_words = size_t(num_words) * kPanel;
        std::vector<uint32_t> words(matrix.num_words_packed() + kLanes);
        matrix.words = words.data() + (64 - reinterpret_cast<uintptr_t>(words.data()) % 64) / 4 % kLanes;
        pack_rows(matrix.words, num_words, weights.data(), inputs, 0, kOutputs, [](int output) { return output; });
        for (int panel = 0; panel < 2; ++panel) {
            std::vector<float> alone(size_t(kMostRows) * kPanel);
            for (int row = 0; row < kMostRows; ++row)
                multiply_panel(&x[size_t(row) * stride], stride, 1, matrix, panel, -1, &alone[size_t(row) * kPanel]);
            for (int row = 0; row < kMostRows; ++row)
                for (int o = 0; o < kPanel; ++o) {
                    double sum = 0, size = 0;
                    for (int i = 0; i < inputs; ++i) {
                        const bf16 weight = weights[size_t(panel * kPanel + o) * inputs + i];
                        const double product = double(widen(weight)) * widen(x[size_t(row) * stride + i]);
                        sum += product, size += std::abs(product);
                    }
                    const float found = alone[size_t(row) * kPanel + o];
                    // Products are exact in fp32: of any order of additions, each rounds by 2^-24.
                    far += !(std::abs(found - sum) <= inputs * 0x1p-24 * size);
                    uint32_t bits;
                    std::memcpy(&bits, &found, 4);
                    hash = hash * 1099511628211u + bits;
                }
            for (int num_rows = 1; num_rows <= kMostRows; ++num_rows)
                for (int first : {0, kMostRows - num_rows}) {
                    std::vector<float> sums(size_t(num_rows) * kPanel, NAN);
                    multiply_panel(&x[size_t(first) * stride], stride, num_rows, matrix, panel, 1 - panel, sums.data());
                    different += 0 != std::memcmp(sums.data(), &alone[size_t(first) * kPanel], sums.size() * 4);
                }
        }
    }
    release_tiles();
    std::printf("%d far, %d different, AMX %d\n%016llx\n", far, different, uses_amx(), (unsigned long long)hash);
    return far || different;
}
