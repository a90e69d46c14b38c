// The weights of a decoder: packed once, in one buffer, for passes of every size.
#pragma once

#include <vector>

#include "buffer.h"
#include "interface.h"
#include "matmul.h"

namespace forerun {

struct Layer {
    std::vector<float> input_norm, post_norm, query_norm, key_norm, qkv_bias;
    std::vector<float> hidden_norm;  // of an attached head
    Matrix qkv, output, gate_up, down;
};

// Gate and up lie in the same panel, half a panel each, so that they meet when it is done.
constexpr int kHalfPanel = kPanel / 2;

inline int gate_up_place(int output, int intermediate) {
    const int unit = output % intermediate;
    return unit / kHalfPanel * kPanel + (output < intermediate ? 0 : kHalfPanel) +
           unit % kHalfPanel;
}

template <class T>
class Weights {
  public:
    explicit Weights(const ForerunSizes& given)
        : sizes(given),
          query_rows(given.num_heads * given.head_dim),
          kv_rows(given.num_kv_heads * given.head_dim),
          qkv_rows(query_rows + 2 * kv_rows),
          padded_intermediate((given.intermediate_size + kHalfPanel - 1) / kHalfPanel * kHalfPanel),
          input_width(given.is_attached ? 2 * given.hidden_size : given.hidden_size),
          inv_freq(given.inv_freq, given.inv_freq + given.head_dim / 2),
          layers(given.num_layers),
          buffer_(lay_out(nullptr)) {
        lay_out(buffer_.data());
    }

    size_t num_bytes() const { return buffer_.size(); }

    void put_vector(ForerunVector kind, int index, const float* from) {
        if (kind == kLastNorm) {
            last_norm.assign(from, from + sizes.hidden_size);
            return;
        }
        Layer& layer = layers[index];
        switch (kind) {
            case kInputNorm: layer.input_norm.assign(from, from + sizes.hidden_size); break;
            case kPostNorm: layer.post_norm.assign(from, from + sizes.hidden_size); break;
            case kQueryNorm: layer.query_norm.assign(from, from + sizes.head_dim); break;
            case kKeyNorm: layer.key_norm.assign(from, from + sizes.head_dim); break;
            case kQkvBias: layer.qkv_bias.assign(from, from + qkv_rows); break;
            case kHiddenNorm: layer.hidden_norm.assign(from, from + sizes.hidden_size); break;
            case kLastNorm: break;
        }
    }

    void put_matrix(Crew& crew, ForerunMatrix kind, int index, const T* from) {
        const int hidden = sizes.hidden_size, intermediate = sizes.intermediate_size;
        const auto straight = [](int output) { return output; };
        const auto paired = [&](int output) { return gate_up_place(output, intermediate); };
        switch (kind) {
            case kQkv: pack(crew, layers[index].qkv, from, qkv_rows, input_width, straight); break;
            case kOutput: pack(crew, layers[index].output, from, hidden, query_rows, straight); break;
            case kGateUp: pack(crew, layers[index].gate_up, from, 2 * intermediate, hidden, paired); break;
            case kDown: pack(crew, layers[index].down, from, hidden, intermediate, straight); break;
            case kHead: pack(crew, head, from, sizes.vocab_size, hidden, straight); break;
            case kEmbedding:
                std::memcpy(embedding_, from, size_t(sizes.vocab_size) * hidden * sizeof(T));
        }
    }

    // A token's embedding as floats.
    void embed(int64_t token, float* to) const {
        const int hidden = sizes.hidden_size;
        if (embedding_ != nullptr) {
            const T* from = embedding_ + size_t(token) * hidden;
            for (int i = 0; i < hidden; ++i) to[i] = widen(from[i]);
            return;
        }
        const uint32_t* column = head.panel(int(token / kPanel)) + token % kPanel;
        for (int i = 0; i < hidden; i += kDepth<T>) {
            T pair[kDepth<T>];
            std::memcpy(pair, column + size_t(i / kDepth<T>) * kPanel, 4);
            for (int j = 0; j < kDepth<T>; ++j) to[i + j] = widen(pair[j]);
        }
    }

    const ForerunSizes sizes;
    const int query_rows, kv_rows, qkv_rows;
    const int padded_intermediate;
    const int input_width;  // of the attention's input
    std::vector<float> inv_freq, last_norm;
    std::vector<Layer> layers;
    Matrix head;

  private:
    // Places everything behind `base` and returns the bytes it takes.
    size_t lay_out(char* base) {
        size_t num_bytes = 0;
        const auto matrix = [&](int num_outputs, int num_inputs) {
            Matrix placed;
            placed.words = reinterpret_cast<uint32_t*>(base + num_bytes);
            placed.num_panels = (num_outputs + kPanel - 1) / kPanel;
            placed.num_words = (num_inputs + kDepth<T> - 1) / kDepth<T>;
            num_bytes += size_t(placed.num_panels) * placed.num_words * kPanel * 4;
            return placed;
        };
        for (Layer& layer : layers) {
            layer.qkv = matrix(qkv_rows, input_width);
            layer.output = matrix(sizes.hidden_size, query_rows);
            layer.gate_up = matrix(2 * padded_intermediate, sizes.hidden_size);
            layer.down = matrix(sizes.hidden_size, padded_intermediate);
        }
        head = matrix(sizes.vocab_size, sizes.hidden_size);
        if (!sizes.tied) {
            embedding_ = reinterpret_cast<T*>(base + num_bytes);
            num_bytes += size_t(sizes.vocab_size) * sizes.hidden_size * sizeof(T);
        }
        return num_bytes;
    }

    template <class Place>
    void pack(Crew& crew, Matrix& matrix, const T* from, int num_outputs, int num_inputs,
              Place&& place) {
        const int num_items = (num_outputs + kPanel - 1) / kPanel;
        crew.run(1, [&](Walker& walker) {
            walker.each(num_items, [&](int item) {
                pack_rows(matrix.words, matrix.num_words, from, num_inputs, item * kPanel,
                          std::min(num_outputs, (item + 1) * kPanel), place);
            });
        });
    }

    T* embedding_ = nullptr;  // null when tied to the head
    HugeBuffer buffer_;
};

}  // namespace forerun
