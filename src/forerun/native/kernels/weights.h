// The weights of a decoder: packed once, in one buffer, for passes of every size.
#pragma once

#include <array>
#include <vector>

#include "buffer.h"
#include "interface.h"
#include "quantised.h"

namespace forerun {

struct LayerVectors {
    std::vector<float> input_norm, post_norm, query_norm, key_norm, qkv_bias;
    std::vector<float> attention_norm, feed_forward_norm;  // of what is added to the residual stream
    std::vector<float> hidden_norm;  // of an attached head
};

struct FeedForward {
    Matrix gate_up, down;
};

struct Layer : LayerVectors {
    Matrix qkv, output;
    FeedForward feed_forward;  // without experts
    Matrix router;             // of a layer with experts, always of elements
    std::vector<FeedForward> experts;
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
          padded_intermediate(padded(given.intermediate_size)),
          padded_expert(padded(given.expert_size)),
          input_width(given.is_attached ? 2 * given.hidden_size : given.hidden_size),
          inv_freq(given.inv_freq, given.inv_freq + size_t(given.num_ropes) * given.num_pairs),
          rope_scales(given.rope_scales, given.rope_scales + given.num_ropes),
          kinds(given.layers, given.layers + given.num_layers),
          layers(given.num_layers),
          buffer_(lay_out(nullptr)) {
        lay_out(buffer_.data());
    }

    size_t num_bytes() const { return buffer_.size(); }

    // The matrices that a row reads, of its experts the first.
    template <class AnyLayer>
    static auto matrices_of(AnyLayer& layer) {
        auto& feed_forward = layer.experts.empty() ? layer.feed_forward : layer.experts.front();
        return std::array{&layer.qkv, &layer.output, &feed_forward.gate_up, &feed_forward.down,
                          &layer.router};
    }

    size_t bytes_read(int num_layers) const {
        size_t num_words = head.num_words_packed();
        for (int l = 0; l < num_layers; ++l) {
            for (const Matrix* matrix : matrices_of(layers[l])) num_words += matrix->num_words_packed();
            if (layers[l].experts.empty()) continue;
            const FeedForward& expert = layers[l].experts.front();
            num_words += (expert.gate_up.num_words_packed() + expert.down.num_words_packed()) *
                         (sizes.experts_per_row - 1);
        }
        return num_words * sizeof(uint32_t);
    }

    void put_vector(ForerunVector kind, int index, const float* from) {
        if (kind == kLastNorm) {
            last_norm.assign(from, from + sizes.hidden_size);
            return;
        }
        Layer& layer = layers[index];
        const int hidden = sizes.hidden_size;
        switch (kind) {
            case kInputNorm: layer.input_norm.assign(from, from + hidden); break;
            case kPostNorm: layer.post_norm.assign(from, from + hidden); break;
            case kQueryNorm: layer.query_norm.assign(from, from + query_norm_width()); break;
            case kKeyNorm: layer.key_norm.assign(from, from + key_norm_width()); break;
            case kQkvBias: layer.qkv_bias.assign(from, from + qkv_rows); break;
            case kHiddenNorm: layer.hidden_norm.assign(from, from + hidden); break;
            case kAttentionNorm: layer.attention_norm.assign(from, from + hidden); break;
            case kFeedForwardNorm: layer.feed_forward_norm.assign(from, from + hidden); break;
            case kLastNorm: break;
        }
    }

    void put_matrix(Crew& crew, ForerunMatrix kind, int index, int expert, const T* from) {
        if (kind == kEmbedding) {
            std::memcpy(embedding_, from, size_t(sizes.vocab_size) * sizes.hidden_size * sizeof(T));
            return;
        }
        const Matrix& matrix = matrix_at(kind, index, expert);
        const int num_inputs = inputs_of(kind, expert);
        each_output(crew, kind, expert, [&](int first, int last, auto&& place) {
            if (!matrix.bits) {
                pack_rows(matrix.words, matrix.num_words, from, num_inputs, first, last, place);
                return;
            }
            std::vector<float> row(num_inputs);
            for (int output = first; output < last; ++output) {
                const T* given = from + size_t(output) * num_inputs;
                for (int i = 0; i < num_inputs; ++i) row[i] = widen(given[i]);
                put_output(matrix, place(output), row.data(), num_inputs);
            }
        });
    }

    // False where the matrix is not in groups, or its inputs are not whole groups.
    bool put_quantised(Crew& crew, ForerunMatrix kind, int index, int expert, const int8_t* values,
                       const uint16_t* scales, const uint16_t* minima) {
        const Matrix& matrix = matrix_at(kind, index, expert);
        if (!matrix.bits || inputs_of(kind, expert) % matrix.group) return false;
        if (matrix.has_minima != (minima != nullptr)) return false;
        const size_t num_given = inputs_of(kind, expert) / matrix.group;
        each_output(crew, kind, expert, [&](int first, int last, auto&& place) {
            for (int output = first; output < last; ++output)
                for (size_t group = 0; group < num_given; ++group) {
                    const size_t at = output * num_given + group;
                    QuantisedGroup given{scales[at], minima ? minima[at] : uint16_t(0), {}};
                    std::memcpy(given.values, values + at * matrix.group, matrix.group);
                    put_group(matrix, place(output), int(group), given);
                }
        });
        return true;
    }

    // The weights of a decoder of the same sizes, in the formats of this one.
    void copy(Crew& crew, const Weights& from) {
        last_norm = from.last_norm;
        for (size_t l = 0; l < layers.size(); ++l) {
            const Layer& theirs = from.layers[l];
            static_cast<LayerVectors&>(layers[l]) = theirs;
            copy(crew, layers[l].qkv, theirs.qkv);
            copy(crew, layers[l].output, theirs.output);
            copy(crew, layers[l].router, theirs.router);
            copy(crew, layers[l].feed_forward, theirs.feed_forward);
            for (size_t e = 0; e < theirs.experts.size(); ++e)
                copy(crew, layers[l].experts[e], theirs.experts[e]);
        }
        copy(crew, head, from.head);
    }

    // A token's embedding as floats.
    void embed(int64_t token, float* to) const {
        const int hidden = sizes.hidden_size;
        if (embedding_ != nullptr) {
            const T* from = embedding_ + size_t(token) * hidden;
            for (int i = 0; i < hidden; ++i) to[i] = widen(from[i]);
        } else {
            read_elements(head, int(token), to);
        }
        for (int i = 0; i < hidden; ++i) to[i] *= sizes.embedding_scale;
    }

    // Logits of products of the head, in place: scaled and capped.
    void finish_logits(float* products, size_t count) const {
        if (sizes.logit_divisor == 1 && sizes.logit_cap == 0) return;
        for (size_t i = 0; i < count; i += kLanes)
            store(products + i, capped(load(products + i) / splat(sizes.logit_divisor), sizes.logit_cap));
    }

    // Widths of the vectors that are normed together.
    int query_norm_width() const { return sizes.whole_qk_norm ? query_rows : sizes.head_dim; }
    int key_norm_width() const { return sizes.whole_qk_norm ? kv_rows : sizes.head_dim; }

    const ForerunSizes sizes;
    const int query_rows, kv_rows, qkv_rows;
    const int padded_intermediate, padded_expert;
    const int input_width;  // of the attention's input
    std::vector<float> inv_freq, rope_scales, last_norm;
    const std::vector<ForerunLayer> kinds;
    std::vector<Layer> layers;
    Matrix head;

  private:
    static int padded(int size) { return (size + kHalfPanel - 1) / kHalfPanel * kHalfPanel; }

    const Matrix& matrix_at(ForerunMatrix kind, int index, int expert) const {
        if (kind == kHead) return head;
        const Layer& layer = layers[index];
        const FeedForward& feed_forward = expert < 0 ? layer.feed_forward : layer.experts[expert];
        switch (kind) {
            case kQkv: return layer.qkv;
            case kOutput: return layer.output;
            case kGateUp: return feed_forward.gate_up;
            case kDown: return feed_forward.down;
            default: return layer.router;
        }
    }

    int intermediate(int expert) const { return expert < 0 ? sizes.intermediate_size : sizes.expert_size; }

    int inputs_of(ForerunMatrix kind, int expert) const {
        switch (kind) {
            case kQkv: return input_width;
            case kOutput: return query_rows;
            case kDown: return intermediate(expert);
            default: return sizes.hidden_size;
        }
    }

    int outputs_of(ForerunMatrix kind, int expert) const {
        switch (kind) {
            case kQkv: return qkv_rows;
            case kGateUp: return 2 * intermediate(expert);
            case kHead: return sizes.vocab_size;
            case kRouter: return sizes.num_experts;
            default: return sizes.hidden_size;
        }
    }

    ForerunFormat format_of(int index) const {
        return sizes.formats == nullptr ? kElement : ForerunFormat(sizes.formats[index]);
    }

    // Whether embeddings lie apart, because no head holds them in the element type.
    bool has_embedding() const {
        const bool is_readable = format_of(4 * sizes.num_layers) == kElement;
        return !sizes.borrows_embedding && (!sizes.tied || !is_readable);
    }

    // Places everything behind `base` and returns the bytes it takes.
    size_t lay_out(char* base) {
        size_t num_bytes = 0;
        const auto matrix = [&](int num_outputs, int num_inputs, ForerunFormat format) {
            Matrix placed;
            placed.words = reinterpret_cast<uint32_t*>(base + num_bytes);
            placed.num_panels = (num_outputs + kPanel - 1) / kPanel;
            if (format == kElement) {
                placed.num_words = (num_inputs + kDepth<T> - 1) / kDepth<T>;
                placed.panel_words = size_t(placed.num_words) * kPanel;
            } else {
                placed.bits = format == kInt4Groups32 || format == kInt4Groups64 || format == kInt4Minima32 ? 4 : 8;
                placed.group = format == kInt8Groups64 || format == kInt4Groups64   ? 64
                               : format == kInt8Groups16 || format == kInt8Minima16 ? 16
                                                                                    : 32;
                placed.has_minima = format >= kInt8Minima16;
                placed.num_groups = (num_inputs + placed.group - 1) / placed.group;
                placed.panel_words = placed.num_groups * placed.group_bytes() / 4;
            }
            num_bytes += placed.num_panels * placed.panel_words * 4;
            return placed;
        };
        const int hidden = sizes.hidden_size;
        for (int l = 0; l < sizes.num_layers; ++l) {
            Layer& layer = layers[l];
            const auto format = [&](ForerunMatrix kind) { return format_of(4 * l + kind); };
            const auto place = [&](FeedForward& feed_forward, int width) {
                feed_forward.gate_up = matrix(2 * width, hidden, format(kGateUp));
                feed_forward.down = matrix(hidden, width, format(kDown));
            };
            layer.qkv = matrix(qkv_rows, input_width, format(kQkv));
            layer.output = matrix(hidden, query_rows, format(kOutput));
            if (!kinds[l].has_experts) {
                place(layer.feed_forward, padded_intermediate);
                continue;
            }
            layer.router = matrix(sizes.num_experts, hidden, kElement);
            layer.experts.resize(sizes.num_experts);
            for (FeedForward& expert : layer.experts) place(expert, padded_expert);
        }
        head = matrix(sizes.vocab_size, hidden, format_of(4 * sizes.num_layers));
        if (has_embedding()) {
            embedding_ = reinterpret_cast<T*>(base + num_bytes);
            num_bytes += size_t(sizes.vocab_size) * sizes.hidden_size * sizeof(T);
        }
        return num_bytes;
    }

    // Calls `work(first, last, place)` for all outputs of a matrix, 64 at a time; `place(output)` is
    // where an output lies among the panels.
    template <class Work>
    void each_output(Crew& crew, ForerunMatrix kind, int expert, Work&& work) {
        const int num_outputs = outputs_of(kind, expert), width = intermediate(expert);
        const auto place = [&](int output) {
            return kind == kGateUp ? gate_up_place(output, width) : output;
        };
        crew.run(1, [&](Walker& walker) {
            walker.each((num_outputs + kPanel - 1) / kPanel, [&](int item) {
                work(item * kPanel, std::min(num_outputs, (item + 1) * kPanel), place);
            });
        });
    }

    static void copy(Crew& crew, const FeedForward& to, const FeedForward& from) {
        copy(crew, to.gate_up, from.gate_up);
        copy(crew, to.down, from.down);
    }

    // The same weights in another format.
    static void copy(Crew& crew, const Matrix& to, const Matrix& from) {
        if (!to.bits) {  // a router
            std::memcpy(to.words, from.words, from.num_words_packed() * sizeof(uint32_t));
            return;
        }
        const int num_given = from.bits ? from.num_groups * from.group : from.num_words * kDepth<T>;
        crew.run(1, [&](Walker& walker) {
            walker.each(to.num_panels, [&](int panel) {
                std::vector<float> row(num_given);
                for (int place = panel * kPanel; place < (panel + 1) * kPanel; ++place) {
                    read_place(from, place, row.data());
                    put_output(to, place, row.data(), num_given);
                }
            });
        });
    }

    // The weights of the output at a place among the panels, padded as they are stored.
    static void read_place(const Matrix& matrix, int place, float* to) {
        if (!matrix.bits) {
            read_elements(matrix, place, to);
            return;
        }
        for (int group = 0; group < matrix.num_groups; ++group) {
            const QuantisedGroup found = group_of(matrix, place, group);
            const float scale = from_half(found.scale), minimum = from_half(found.minimum);
            for (int i = 0; i < matrix.group; ++i) *to++ = found.values[i] * scale + minimum;
        }
    }

    static void read_elements(const Matrix& matrix, int place, float* to) {
        const uint32_t* column = matrix.panel(place / kPanel) + place % kPanel;
        for (int u = 0; u < matrix.num_words; ++u) {
            T each[kDepth<T>];
            std::memcpy(each, column + size_t(u) * kPanel, 4);
            for (int j = 0; j < kDepth<T>; ++j) *to++ = widen(each[j]);
        }
    }

    T* embedding_ = nullptr;  // null when it is the head or another decoder's
    HugeBuffer buffer_;
};

}  // namespace forerun
