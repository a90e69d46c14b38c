// One pass of a decoder over packed rows, all threads walking its phases together.
#pragma once

#include <vector>

#include "attention.h"
#include "crew.h"
#include "weights.h"

namespace forerun {

// Rows of one sequence that attend together, of a span at indices [start, end).
struct AttendItem {
    int first_row, num_rows, start, end;
};

constexpr int kItemQueries = 12;

// An expert that a row uses, what its output is multiplied by, and its place among the routed rows.
struct Choice {
    int expert = 0;
    float weight = 0;
    int place = 0;
};

// Rows [first, last) of the routed rows are those of an expert.
struct UsedExpert {
    int expert, first, last;
};

// Grows to the largest pass seen and stays, so that a step allocates nothing.
template <class T>
struct Scratch {
    std::vector<float> hidden;  // [rows][hidden_size], the residual stream
    std::vector<float> embedded;    // [rows][hidden_size], of an attached head
    std::vector<T> normed;      // [rows][hidden_size], of an attached head twice as wide
    std::vector<float> qkv;     // [rows][qkv_rows]
    std::vector<T> queries;     // [rows][query_rows], rotated
    std::vector<T> heads;       // [rows][query_rows], attended
    std::vector<T> gated;       // [rows][padded_intermediate], or of routed rows [padded_expert]
    std::vector<float> branch;  // [rows][hidden_size], to be normed and added to the residual stream
    std::vector<float> chances;     // [rows][num_experts], padded to whole vectors
    std::vector<Choice> choices;    // [rows][experts_per_row], the likeliest first
    // Per layer, ascending. A thread that is late counts the items of a phase long after it is over,
    // so that they must be those of its layer.
    std::vector<std::vector<UsedExpert>> used;
    std::vector<T> routed;          // [rows * experts_per_row][hidden_size], expert by expert
    std::vector<float> expert_outputs;  // [rows * experts_per_row][hidden_size]
    QuantisedRows quantised;    // the input of a matrix in fewer bits
    std::vector<float> rotations;   // [rows][num_ropes][2 * num_pairs]: cosines, then sines
    std::vector<Seen> seen;     // [rows]
    std::vector<int> others;    // indices of what the rows of trees see of their trees
    std::vector<int> slots, indices, positions;    // [rows]: where keys go, their positions
    std::vector<AttendItem> items;
    std::vector<std::vector<float>> sums, scores;     // per thread
    std::vector<std::vector<Query<T>>> asked;         // per thread
};

template <class T>
class Pass {
  public:
    // `embedding` holds the token embeddings: the weights themselves, or those of a head's target.
    Pass(const Weights<T>& weights, const Weights<T>& embedding, Scratch<T>& scratch,
         const ForerunPass& rows, const ForerunStore& store, int num_threads)
        : w_(weights), embedding_(embedding), s_(scratch), rows_(rows), store_(store),
          groups_(weights.sizes.num_heads / weights.sizes.num_kv_heads),
          item_rows_(std::max(1, kItemQueries / groups_)) {
        grow(num_threads);
        plan_rows();
    }

    static size_t num_phases(int num_layers) { return 2 + size_t(num_layers) * 16 + 2; }

    // `sink(walker, panel, sums)` receives the head's outputs of the wanted rows, panel by panel.
    template <class Sink>
    void walk(Walker& walker, Sink&& sink) {
        const ForerunSizes& sizes = w_.sizes;
        const int num_rows = rows_.num_rows;
        walker.each(num_rows, [&](int row) { begin_row(row); });
        if (rows_.is_context) return store_context(walker);
        for (int l = 0; l < rows_.num_layers; ++l) {
            const Layer& layer = w_.layers[l];
            walker.each(num_rows, [&](int row) {
                keep_features(l, row);
                if (sizes.is_attached) join(row, layer);
                else norm(row, layer.input_norm, row);
                quantise(layer.qkv, s_.normed.data(), w_.input_width, row);
            });
            multiply(walker, layer.qkv, s_.normed.data(), w_.input_width, num_rows,
                     [&](int panel, const float* sums) {
                         keep(sums, panel, num_rows, s_.qkv.data(), w_.qkv_rows);
                     });
            walker.each(num_rows, [&](int row) { rotate_and_store(layer, l, row); });
            walker.each(int(s_.items.size()) * sizes.num_kv_heads, [&](int item) {
                attend(l, s_.items[item / sizes.num_kv_heads], item % sizes.num_kv_heads,
                       walker.thread);
            });
            quantise_all(walker, layer.output, s_.heads.data(), w_.query_rows);
            multiply_and_add(walker, layer.output, s_.heads.data(), w_.query_rows,
                             layer.attention_norm);
            if (layer.experts.empty()) feed_forward(walker, layer);
            else mix_experts(walker, layer, s_.used[l]);
        }
        if (rows_.num_features)
            walker.each(num_rows, [&](int row) { keep_features(rows_.num_layers, row); });
        walker.each(rows_.num_wanted, [&](int i) {
            norm(int(rows_.wanted[i]), w_.last_norm, i);
            if (rows_.fed_back) feed_back(int(rows_.wanted[i]), i);
            quantise(w_.head, s_.normed.data(), sizes.hidden_size, i);
        });
        multiply(walker, w_.head, s_.normed.data(), sizes.hidden_size, rows_.num_wanted,
                 [&](int panel, float* sums) {
                     w_.finish_logits(sums, size_t(rows_.num_wanted) * kPanel);
                     sink(walker, panel, sums);
                 });
    }

  private:
    void store_context(Walker& walker) {
        const int num_rows = rows_.num_rows, width = w_.sizes.hidden_size;
        for (int l = 0; l < rows_.num_layers; ++l) {
            const Layer& layer = w_.layers[l];
            walker.each(num_rows, [&](int row) {
                norm(row, layer.hidden_norm, row);
                quantise(layer.qkv, s_.normed.data(), width, row);
            });
            const auto sink = [&](int panel, const float* sums) {
                keep(sums, panel, num_rows, s_.qkv.data(), w_.qkv_rows);
            };
            multiply(walker, layer.qkv, s_.normed.data(), width, num_rows, sink, w_.query_rows / kPanel);
            walker.each(num_rows, [&](int row) { rotate_and_store(layer, l, row); });
        }
    }

    void grow(int num_threads) {
        const ForerunSizes& sizes = w_.sizes;
        const auto fit = [](auto& vector, size_t size) {
            if (vector.size() < size) vector.resize(size);
        };
        const size_t rows = rows_.num_rows;
        const size_t tile_rows = std::max(rows_.num_rows, rows_.num_wanted);
        fit(s_.hidden, rows * sizes.hidden_size);
        fit(s_.normed, tile_rows * w_.input_width);
        if (sizes.is_attached) fit(s_.embedded, rows * sizes.hidden_size);
        fit(s_.qkv, rows * w_.qkv_rows);
        fit(s_.queries, rows * w_.query_rows);
        fit(s_.heads, rows * w_.query_rows);
        const size_t routed = rows * sizes.experts_per_row;
        fit(s_.gated, std::max(rows * w_.padded_intermediate, routed * w_.padded_expert));
        fit(s_.chances, rows * chances_size());
        fit(s_.choices, routed);
        fit(s_.used, rows_.num_layers);
        fit(s_.routed, routed * sizes.hidden_size);
        fit(s_.expert_outputs, routed * sizes.hidden_size);
        fit(s_.branch, rows * sizes.hidden_size);
        fit(s_.rotations, rows * rotation_size());
        fit(s_.seen, rows);
        fit(s_.slots, rows);
        fit(s_.indices, rows);
        fit(s_.positions, rows);
        fit(s_.sums, num_threads);
        fit(s_.scores, num_threads);
        for (auto& sums : s_.sums) fit(sums, tile_rows * kPanel);
        const size_t queries = item_rows_ * groups_;
        for (auto& scores : s_.scores) fit(scores, queries * score_stride());
        fit(s_.asked, num_threads);
        for (auto& asked : s_.asked) fit(asked, queries);
        const int most_rows = int(std::max(tile_rows, routed));
        for (int l = 0; l < rows_.num_layers; ++l)
            for (const Matrix* matrix : Weights<T>::matrices_of(w_.layers[l]))
                if (matrix->bits) s_.quantised.fit(most_rows, *matrix);
        if (w_.head.bits) s_.quantised.fit(most_rows, w_.head);
    }

    // Where every row goes and what it sees.
    void plan_rows() {
        s_.others.clear();
        s_.items.clear();
        const int32_t* parents = rows_.parents;
        int row = 0;
        for (int i = 0; i < rows_.num_spans; ++i) {
            const ForerunSpan& span = rows_.spans[i];
            const int num_rows = span.num_chain + span.num_tree;
            const int root = span.start + span.num_chain;
            for (int offset = 0; offset < num_rows; ++offset) {
                const int node = offset - span.num_chain;
                Seen seen;
                const int own = span.start + offset + 1;
                seen.end = node < 0 ? own : root;
                seen.num_others = node < 0 ? 0 : push_path(parents, node, root);
                s_.slots[row + offset] = span.slot;
                s_.indices[row + offset] = span.start + offset;
                s_.positions[row + offset] = (node < 0 ? own : seen.size()) - 1;
                s_.seen[row + offset] = seen;
            }
            for (int first = 0; first < num_rows; first += item_rows_)
                s_.items.push_back({row + first, std::min(item_rows_, num_rows - first), span.start,
                                    span.start + num_rows});
            parents += span.num_tree;
            row += num_rows;
        }
        const int* others = s_.others.data();  // only now does it stay where it is
        for (int r = 0; r < row; others += s_.seen[r++].num_others) s_.seen[r].others = others;
    }

    // Append the indices of a node's ancestors and itself, ascending; returns how many.
    int push_path(const int32_t* parents, int node, int root) {
        const size_t before = s_.others.size();
        for (; node >= 0; node = parents[node]) s_.others.push_back(root + node);
        std::reverse(s_.others.begin() + before, s_.others.end());
        return int(s_.others.size() - before);
    }

    void begin_row(int row) {
        const int num_pairs = w_.sizes.num_pairs;
        const size_t width = w_.sizes.hidden_size, at = row * width;
        if (w_.sizes.is_attached) embedding_.embed(rows_.tokens[row], &s_.embedded[at]);
        if (rows_.states) std::memcpy(&s_.hidden[at], rows_.states + at, width * sizeof(float));
        else embedding_.embed(rows_.tokens[row], &s_.hidden[at]);
        float* rotation = &s_.rotations[row * rotation_size()];
        for (int rope = 0; rope < w_.sizes.num_ropes; ++rope, rotation += 2 * num_pairs)
            for (int i = 0; i < num_pairs; ++i) {
                const float angle = float(s_.positions[row]) * w_.inv_freq[rope * num_pairs + i];
                rotation[i] = std::cos(angle) * w_.rope_scales[rope];
                rotation[num_pairs + i] = std::sin(angle) * w_.rope_scales[rope];
            }
    }

    size_t rotation_size() const { return size_t(w_.sizes.num_ropes) * 2 * w_.sizes.num_pairs; }

    // Copy a row of the residual stream to where the features of `layer` are wanted.
    void keep_features(int layer, int row) {
        const int width = w_.sizes.hidden_size;
        for (int f = 0; f < rows_.num_features; ++f) {
            if (rows_.feature_layers[f] != layer) continue;
            T* to = static_cast<T*>(rows_.features) + (size_t(row) * rows_.num_features + f) * width;
            const float* from = &s_.hidden[size_t(row) * width];
            for (int i = 0; i < width; i += kLanes) store(to + i, load(from + i));
        }
    }

    // The root mean square norm of a row of the residual stream, as input `to` of a matrix; without
    // weights the row as it is.
    void norm(int row, const std::vector<float>& weight, int to) {
        const size_t width = w_.sizes.hidden_size;
        norm(&s_.hidden[row * width], weight, &s_.normed[to * width]);
    }

    void norm(const float* from, const std::vector<float>& weight, T* to) {
        const int width = w_.sizes.hidden_size;
        if (weight.empty()) {
            for (int i = 0; i < width; i += kLanes) store(to + i, load(from + i));
            return;
        }
        const Floats inverse = splat(inverse_rms(from, width));
        for (int i = 0; i < width; i += kLanes)
            store(to + i, load(&weight[i]) * (load(from + i) * inverse));
    }

    // Norm vectors of `width` values that lie one after another, if there are weights.
    void norm_in_place(float* x, int width, int num_vectors, const std::vector<float>& weight) {
        if (weight.empty()) return;
        for (const float* end = x + size_t(width) * num_vectors; x < end; x += width) {
            const Floats inverse = splat(inverse_rms(x, width));
            for (int i = 0; i < width; i += kLanes)
                store(x + i, load(&weight[i]) * (load(x + i) * inverse));
        }
    }

    // The input of an attached head's attention.
    void join(int row, const Layer& layer) {
        const size_t width = w_.sizes.hidden_size;
        T* to = &s_.normed[row * 2 * width];
        float* hidden = &s_.hidden[row * width];
        norm(&s_.embedded[row * width], layer.input_norm, to);
        norm(hidden, layer.hidden_norm, to + width);
        if (!w_.sizes.norm_before_residual) return;
        for (size_t i = 0; i < width; ++i) hidden[i] = widen(to[width + i]);
    }

    // The state of the row behind `row`, which was normed as input `to` of the head.
    void feed_back(int row, int to) {
        const size_t width = w_.sizes.hidden_size;
        float* state = rows_.fed_back + to * width;
        if (!w_.sizes.norm_output) {
            std::memcpy(state, &s_.hidden[row * width], width * sizeof(float));
            return;
        }
        for (size_t i = 0; i < width; ++i) state[i] = widen(s_.normed[to * width + i]);
    }

    float inverse_rms(const float* from, int width) const {
        Floats squares{};
        for (int i = 0; i < width; i += kLanes) squares += load(from + i) * load(from + i);
        return 1.f / std::sqrt(sum(squares) / float(width) + w_.sizes.norm_eps);
    }

    // Row `row` of an input [rows][width], for a matrix in fewer bits.
    void quantise(const Matrix& matrix, const T* x, int width, int row) {
        if (matrix.bits) s_.quantised.set(row, x + size_t(row) * width, width, matrix);
    }

    void quantise_all(Walker& walker, const Matrix& matrix, const T* x, int width) {
        if (matrix.bits) walker.each(rows_.num_rows, [&](int row) { quantise(matrix, x, width, row); });
    }

    template <class Sink>
    void multiply(Walker& walker, const Matrix& matrix, const T* x, int stride, int num_rows,
                  Sink&& sink, int first_panel = 0) {
        float* sums = s_.sums[walker.thread].data();
        walker.each_ahead(num_rows ? matrix.num_panels - first_panel : 0, [&](int item, int next) {
            const int panel = first_panel + item;
            if (next >= 0) next += first_panel;
            if (matrix.bits) multiply_panel(s_.quantised, 0, num_rows, matrix, panel, next, sums);
            else multiply_panel(x, stride, num_rows, matrix, panel, next, sums);
            sink(panel, sums);
        });
    }

    // Adds the products to the residual stream, normed before where there are weights.
    void multiply_and_add(Walker& walker, const Matrix& matrix, const T* x, int stride,
                          const std::vector<float>& weight) {
        const size_t width = w_.sizes.hidden_size;
        multiply(walker, matrix, x, stride, rows_.num_rows, [&](int panel, const float* sums) {
            if (weight.empty()) add(sums, panel);
            else keep(sums, panel, rows_.num_rows, s_.branch.data(), int(width));
        });
        if (!weight.empty()) walker.each(rows_.num_rows, [&](int row) { add_branch(row, weight); });
    }

    // Adds a row of `branch` to the residual stream, normed before where there are weights.
    void add_branch(int row, const std::vector<float>& weight) {
        const size_t width = w_.sizes.hidden_size;
        float *from = &s_.branch[row * width], *to = &s_.hidden[row * width];
        norm_in_place(from, int(width), 1, weight);
        for (size_t i = 0; i < width; i += kLanes)
            store(to + i, load(to + i) + load(from + i) * splat(w_.sizes.residual_scale));
    }

    void feed_forward(Walker& walker, const Layer& layer) {
        const Matrix &gate_up = layer.feed_forward.gate_up, &down = layer.feed_forward.down;
        const int num_rows = rows_.num_rows, width = w_.sizes.hidden_size;
        walker.each(num_rows, [&](int row) {
            norm(row, layer.post_norm, row);
            quantise(gate_up, s_.normed.data(), width, row);
        });
        multiply(walker, gate_up, s_.normed.data(), width, num_rows,
                 [&](int panel, const float* sums) {
                     gate(sums, panel, num_rows, s_.gated.data(), w_.padded_intermediate);
                 });
        quantise_all(walker, down, s_.gated.data(), w_.padded_intermediate);
        multiply_and_add(walker, down, s_.gated.data(), w_.padded_intermediate,
                         layer.feed_forward_norm);
    }

    // In place of the feed-forward. Routed rows are copies of the rows, one for every expert of each, so
    // that those of an expert lie together and its weights are read once. A row's experts are summed in
    // the order of its choices.
    void mix_experts(Walker& walker, const Layer& layer, std::vector<UsedExpert>& used) {
        const FeedForward& any = layer.experts.front();
        const int num_rows = rows_.num_rows, per_row = w_.sizes.experts_per_row;
        const size_t width = w_.sizes.hidden_size, expert_width = w_.padded_expert;
        walker.each(num_rows, [&](int row) { norm(row, layer.post_norm, row); });
        multiply(walker, layer.router, s_.normed.data(), int(width), num_rows,
                 [&](int panel, const float* sums) {
                     keep(sums, panel, num_rows, s_.chances.data(), chances_size());
                 });
        walker.each(num_rows, [&](int row) { choose(row); });
        walker.each(1, [&](int) { route(used); });
        walker.each(num_rows, [&](int row) {
            for (int i = row * per_row; i < (row + 1) * per_row; ++i) {
                const int place = s_.choices[i].place;
                std::memcpy(&s_.routed[place * width], &s_.normed[row * width], width * sizeof(T));
                quantise(any.gate_up, s_.routed.data(), int(width), place);
            }
        });
        multiply_experts(walker, layer, used, &FeedForward::gate_up, s_.routed.data(), width,
                         [&](const UsedExpert& of, int panel, const float* sums) {
                             gate(sums, panel, of.last - of.first,
                                  &s_.gated[of.first * expert_width], expert_width);
                         });
        if (any.down.bits)
            walker.each(num_rows * per_row, [&](int place) {
                quantise(any.down, s_.gated.data(), int(expert_width), place);
            });
        multiply_experts(walker, layer, used, &FeedForward::down, s_.gated.data(), expert_width,
                         [&](const UsedExpert& of, int panel, const float* sums) {
                             keep(sums, panel, of.last - of.first,
                                  &s_.expert_outputs[of.first * width], int(width));
                         });
        walker.each(num_rows, [&](int row) {
            float* to = &s_.branch[row * width];
            std::fill(to, to + width, 0.f);
            for (int i = row * per_row; i < (row + 1) * per_row; ++i) {
                const float* from = &s_.expert_outputs[s_.choices[i].place * width];
                const Floats weight = splat(s_.choices[i].weight);
                for (size_t j = 0; j < width; j += kLanes)
                    store(to + j, load(to + j) + weight * load(from + j));
            }
            add_branch(row, layer.feed_forward_norm);
        });
    }

    int chances_size() const { return (w_.sizes.num_experts + kLanes - 1) / kLanes * kLanes; }

    // The likeliest experts of a row; of equals the first.
    void choose(int row) {
        const int num_experts = w_.sizes.num_experts, per_row = w_.sizes.experts_per_row;
        float* chances = &s_.chances[size_t(row) * chances_size()];
        Choice* choices = &s_.choices[size_t(row) * per_row];
        float total = softmax(chances, num_experts), chosen = 0;
        for (int rank = 0; rank < per_row; ++rank) {
            int best = -1;
            for (int expert = 0; expert < num_experts; ++expert) {
                const bool is_free = chances[expert] != -1;
                if (is_free && (best < 0 || chances[expert] > chances[best])) best = expert;
            }
            choices[rank].expert = best;
            choices[rank].weight = chances[best];
            chosen += chances[best];
            chances[best] = -1;
        }
        if (w_.sizes.normalise_experts) total = chosen;
        for (int rank = 0; rank < per_row; ++rank) choices[rank].weight /= total;
    }

    // Gives every choice its place, expert by expert and within one row by row.
    void route(std::vector<UsedExpert>& used) {
        const int num_choices = rows_.num_rows * w_.sizes.experts_per_row;
        used.clear();
        int place = 0;
        for (int expert = 0; expert < w_.sizes.num_experts && place < num_choices; ++expert) {
            const int first = place;
            for (int i = 0; i < num_choices; ++i)
                if (s_.choices[i].expert == expert) s_.choices[i].place = place++;
            if (place > first) used.push_back({expert, first, place});
        }
    }

    // Multiplies the rows of every expert that is used with one of its matrices.
    template <class Sink>
    void multiply_experts(Walker& walker, const Layer& layer, const std::vector<UsedExpert>& used,
                          Matrix FeedForward::* which, const T* x, size_t stride, Sink&& sink) {
        float* sums = s_.sums[walker.thread].data();
        const int num_panels = (layer.experts.front().*which).num_panels;
        walker.each_ahead(int(used.size()) * num_panels, [&](int item, int next) {
            const UsedExpert& of = used[item / num_panels];
            const Matrix& matrix = layer.experts[of.expert].*which;
            const int panel = item % num_panels, num_rows = of.last - of.first;
            const bool is_next_here = next >= 0 && next / num_panels == item / num_panels;
            const int next_panel = is_next_here ? next % num_panels : -1;
            if (matrix.bits)
                multiply_panel(s_.quantised, of.first, num_rows, matrix, panel, next_panel, sums);
            else
                multiply_panel(x + of.first * stride, stride, num_rows, matrix, panel, next_panel, sums);
            sink(of, panel, sums);
        });
    }

    // The columns of a panel that exist: all but in the last panel of a narrow matrix.
    static int columns(int panel, int width) { return std::min(kPanel, width - panel * kPanel); }

    void keep(const float* sums, int panel, int num_rows, float* to, int width) {
        const int num_columns = columns(panel, width);
        for (int row = 0; row < num_rows; ++row)
            std::memcpy(to + size_t(row) * width + panel * kPanel, sums + size_t(row) * kPanel,
                        num_columns * sizeof(float));
    }

    void add(const float* sums, int panel) {
        const int width = w_.sizes.hidden_size, num_columns = columns(panel, width);
        const Floats scale = splat(w_.sizes.residual_scale);
        for (int row = 0; row < rows_.num_rows; ++row) {
            float* to = &s_.hidden[size_t(row) * width + panel * kPanel];
            for (int i = 0; i < num_columns; i += kLanes)
                store(to + i, load(to + i) + load(sums + size_t(row) * kPanel + i) * scale);
        }
    }

    // gate * sigmoid(x) * up, where x is the gate itself (SiLU) or a polynomial of it (GELU by tanh)
    void gate(const float* sums, int panel, int num_rows, T* gated, size_t stride) {
        for (int row = 0; row < num_rows; ++row, sums += kPanel) {
            T* to = gated + row * stride + panel * kHalfPanel;
            for (int i = 0; i < kHalfPanel; i += kLanes) {
                const Floats g = load(sums + i), up = load(sums + kHalfPanel + i);
                const Floats x = w_.sizes.gelu ? splat(kGelu) * (g + splat(0.044715f) * g * g * g) : g;
                store(to + i, g / (splat(1.f) + exponential(-x)) * up);
            }
        }
    }

    void rotate_and_store(const Layer& layer, int index, int row) {
        const int dim = w_.sizes.head_dim;
        float* qkv = &s_.qkv[size_t(row) * w_.qkv_rows];
        if (!layer.qkv_bias.empty())
            for (int i = 0; i < w_.qkv_rows; i += kLanes)
                store(qkv + i, load(qkv + i) + load(&layer.qkv_bias[i]));
        float* key = qkv + w_.query_rows;
        const int query_width = w_.query_norm_width(), key_width = w_.key_norm_width();
        norm_in_place(qkv, query_width, w_.query_rows / query_width, layer.query_norm);
        norm_in_place(key, key_width, w_.kv_rows / key_width, layer.key_norm);
        for (int h = 0; h < w_.sizes.num_heads; ++h) rotate(qkv + h * dim, index, row);
        for (int i = 0; i < w_.query_rows; i += kLanes)
            store(&s_.queries[size_t(row) * w_.query_rows + i], load(qkv + i));
        for (int h = 0; h < w_.sizes.num_kv_heads; ++h, key += dim) {
            rotate(key, index, row);
            put_key(cached(2 * index, s_.slots[row], h), s_.indices[row], key, dim);
            T* value = cached(2 * index + 1, s_.slots[row], h) + size_t(s_.indices[row]) * dim;
            for (int i = 0; i < dim; i += kLanes) store(value + i, load(key + w_.kv_rows + i));
        }
    }

    // Rotate the pairs of a head.
    void rotate(float* head, int layer, int row) {
        const int rope = w_.kinds[layer].rope, num_pairs = w_.sizes.num_pairs;
        if (rope < 0) return;
        const float* cosine = &s_.rotations[row * rotation_size() + size_t(rope) * 2 * num_pairs];
        const float* sine = cosine + num_pairs;
        const auto turn = [&](int i, float& x, float& y) {
            const float a = x, b = y;
            x = a * cosine[i] - b * sine[i];
            y = b * cosine[i] + a * sine[i];
        };
        if (w_.sizes.interleaved)
            for (int i = 0; i < num_pairs; ++i) turn(i, head[2 * i], head[2 * i + 1]);
        else
            for (int i = 0; i < num_pairs; ++i) turn(i, head[i], head[num_pairs + i]);
    }

    T* cached(int plane, int slot, int kv_head) {
        const int64_t heads = w_.sizes.num_kv_heads;
        const int64_t row = ((plane * store_.num_slots + slot) * heads + kv_head) * store_.width;
        return static_cast<T*>(store_.data) + row * w_.sizes.head_dim;
    }

    // Rounded up to whole blocks behind a full prefix and behind what lies in trees.
    size_t score_stride() const { return size_t(store_.width) + 2 * kBlockKeys; }

    void attend(int index, const AttendItem& item, int kv_head, int thread) {
        const int dim = w_.sizes.head_dim, slot = s_.slots[item.first_row];
        const int window = w_.kinds[index].window, block = w_.kinds[index].block;
        Query<T>* queries = s_.asked[thread].data();
        int num_queries = 0;
        for (int row = item.first_row; row < item.first_row + item.num_rows; ++row) {
            const int position = block ? item.start : s_.positions[row];
            Seen seen = s_.seen[row].from(window ? std::max(0, position + 1 - window) : 0);
            if (block == kWholeBlock) seen.end = item.end;
            for (int head = kv_head * groups_; head < (kv_head + 1) * groups_; ++head) {
                const size_t at = size_t(row) * w_.query_rows + size_t(head) * dim;
                queries[num_queries] = {&s_.queries[at], seen,
                                        &s_.scores[thread][num_queries * score_stride()],
                                        &s_.heads[at]};
                ++num_queries;
            }
        }
        const Attention<T> attention(cached(2 * index, slot, kv_head),
                                     cached(2 * index + 1, slot, kv_head), dim,
                                     w_.sizes.score_scale, w_.sizes.score_cap);
        attention.attend(queries, num_queries);
    }

    static constexpr float kGelu = 1.5957691216057308f;  // 2 sqrt(2 / pi)

    const Weights<T>& w_;
    const Weights<T>& embedding_;
    Scratch<T>& s_;
    const ForerunPass& rows_;
    const ForerunStore& store_;
    const int groups_, item_rows_;
};

}  // namespace forerun
