// The functions of interface.h.
#include <algorithm>
#include <memory>
#include <new>

#include "cycles.h"
#include "growth.h"
#include "pass.h"
#include "sampling.h"
#include "trees.h"

namespace forerun {
namespace {

class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    virtual size_t num_bytes() const = 0;
    virtual size_t bytes_read(int num_layers) const = 0;
    virtual void put_vector(ForerunVector kind, int layer, const float* from) = 0;
    virtual void put_matrix(ForerunMatrix kind, int layer, int expert, const void* from) = 0;
    virtual bool put_quantised(ForerunMatrix kind, int layer, int expert, const int8_t* values,
                               const uint16_t* scales, const uint16_t* minima) = 0;
    virtual AnyDecoder* requantised(const int32_t* formats) const = 0;
    virtual void attach(const AnyDecoder& target, const int64_t* target_ids) = 0;
    virtual void embed(const int64_t* tokens, int64_t num_rows, void* to) const = 0;
    virtual void head(const void* hidden, int num_rows, float* logits) = 0;
    virtual void forward(const ForerunPass& rows, const ForerunStore& store, float* logits) = 0;
    virtual void greedy_chain(const ForerunPass& rows, const ForerunStore& store, int num_tokens,
                              int vocab_size, int64_t* drafted) = 0;
    virtual void sampled_chain(const ForerunPass& rows, const ForerunStore& store, int num_tokens,
                               const Sampling& sampling, int64_t* drafted) = 0;
    virtual std::vector<BestTree> likely_trees(const ForerunPass& rows, const ForerunStore& store,
                                               int vocab_size, const int32_t* shapes,
                                               const float* temperatures) = 0;
};

// The best token of a row; of equals the lowest.
struct Best {
    float value = -INFINITY;
    int token = 0;

    void offer(float other, int candidate) {
        if (other > value || (other == value && candidate < token)) value = other, token = candidate;
    }
};

template <class T>
class Decoder final : public AnyDecoder {
  public:
    Decoder(Crew& crew, const ForerunSizes& sizes) : crew_(crew), weights_(sizes) {}

    size_t num_bytes() const override { return weights_.num_bytes(); }

    size_t bytes_read(int num_layers) const override { return weights_.bytes_read(num_layers); }

    void put_vector(ForerunVector kind, int layer, const float* from) override {
        weights_.put_vector(kind, layer, from);
    }

    void put_matrix(ForerunMatrix kind, int layer, int expert, const void* from) override {
        weights_.put_matrix(crew_, kind, layer, expert, static_cast<const T*>(from));
    }

    bool put_quantised(ForerunMatrix kind, int layer, int expert, const int8_t* values,
                       const uint16_t* scales, const uint16_t* minima) override {
        return kind != kEmbedding &&
               weights_.put_quantised(crew_, kind, layer, expert, values, scales, minima);
    }

    AnyDecoder* requantised(const int32_t* formats) const override {
        ForerunSizes sizes = weights_.sizes;
        sizes.inv_freq = weights_.inv_freq.data();
        sizes.rope_scales = weights_.rope_scales.data();
        sizes.layers = weights_.kinds.data();
        sizes.formats = formats;
        sizes.borrows_embedding = 1;
        auto made = std::make_unique<Decoder>(crew_, sizes);
        made->weights_.copy(crew_, weights_);
        made->embedding_ = embedding_ ? embedding_ : &weights_;
        return made.release();
    }

    void attach(const AnyDecoder& target, const int64_t* target_ids) override {
        embedding_ = &static_cast<const Decoder&>(target).weights_;
        target_ids_.assign(target_ids, target_ids + weights_.sizes.vocab_size);
    }

    void embed(const int64_t* tokens, int64_t num_rows, void* to) const override {
        const int width = weights_.sizes.hidden_size;
        std::vector<float> row(width);
        for (int64_t r = 0; r < num_rows; ++r) {
            (embedding_ ? *embedding_ : weights_).embed(tokens[r], row.data());
            T* place = static_cast<T*>(to) + r * width;
            for (int i = 0; i < width; i += kLanes) store(place + i, load(&row[i]));
        }
    }

    void head(const void* hidden, int num_rows, float* logits) override {
        const int width = weights_.sizes.hidden_size, vocab_size = weights_.sizes.vocab_size;
        const Matrix& matrix = weights_.head;
        const T* rows = static_cast<const T*>(hidden);
        std::vector<float> sums(size_t(crew_.num_threads()) * num_rows * kPanel);
        if (matrix.bits) scratch_.quantised.fit(num_rows, matrix);
        for (int row = 0; matrix.bits && row < num_rows; ++row)
            scratch_.quantised.set(row, rows + size_t(row) * width, width, matrix);
        crew_.run(1, [&](Walker& walker) {
            float* own = sums.data() + size_t(walker.thread) * num_rows * kPanel;
            walker.each_ahead(num_rows ? matrix.num_panels : 0, [&](int panel, int next) {
                if (matrix.bits) multiply_panel(scratch_.quantised, 0, num_rows, matrix, panel, next, own);
                else multiply_panel(rows, width, num_rows, matrix, panel, next, own);
                weights_.finish_logits(own, size_t(num_rows) * kPanel);
                copy_columns(own, panel, num_rows, vocab_size, logits);
            });
        });
    }

    void forward(const ForerunPass& rows, const ForerunStore& store, float* logits) override {
        const int vocab_size = weights_.sizes.vocab_size;
        run(rows, store, [&](Walker&, int panel, const float* sums) {
            copy_columns(sums, panel, rows.num_wanted, vocab_size, logits);
        });
    }

    void greedy_chain(const ForerunPass& rows, const ForerunStore& store, int num_tokens,
                      int vocab_size, int64_t* drafted) override {
        follow(rows, num_tokens, drafted, [&](const ForerunPass& pass, int n) {
            best_tokens(pass, store, std::min(vocab_size, weights_.sizes.vocab_size), num_tokens,
                        drafted + n);
        });
    }

    void sampled_chain(const ForerunPass& rows, const ForerunStore& store, int num_tokens,
                       const Sampling& sampling, int64_t* drafted) override {
        const int num_spans = rows.num_spans;
        const int64_t own = weights_.sizes.vocab_size, wanted = sampling.vocab_size;
        const int64_t most = std::min(own, wanted);
        std::vector<float> logits(size_t(num_spans) * own), narrow(target_ids_.size());
        const bool is_truncated = sampling.truncates(num_spans);
        follow(rows, num_tokens, drafted, [&](const ForerunPass& pass, int n) {
            forward(pass, store, logits.data());
            for (int i = 0; i < num_spans; ++i) {
                const size_t at = size_t(n) * num_spans + i;
                float* row = sampling.probs + at * wanted;
                const float* scores = logits.data() + i * own;
                if (target_ids_.empty()) {
                    sampling.shape(scores, most, i, row);
                    std::fill(row + most, row + wanted, std::isnan(row[0]) ? kNaN : 0.f);
                } else if (is_truncated) {
                    // If min_p, top_k or top_p of any request apply, Python computes all rows over the whole vocabulary:
                    // the same sums give the same bits.
                    std::fill(row, row + wanted, -INFINITY);
                    for (int64_t token = 0; token < own; ++token) row[target_ids_[token]] = scores[token];
                    sampling.shape(row, wanted, i, row);
                } else {
                    sampling.shape(scores, own, i, narrow.data());
                    std::fill(row, row + wanted, std::isnan(narrow[0]) ? kNaN : 0.f);
                    for (int64_t token = 0; token < own; ++token)
                        row[target_ids_[token]] = narrow[token];
                }
                const int64_t last = target_ids_.empty() ? most - 1 : target_ids_.back();
                drafted[size_t(i) * num_tokens + n] = std::min(sampling.token(at), last);
            }
        });
    }

    std::vector<BestTree> likely_trees(const ForerunPass& rows, const ForerunStore& store, int vocab_size,
                                       const int32_t* shapes, const float* temperatures) override {
        const size_t width = weights_.sizes.hidden_size, own = weights_.sizes.vocab_size;
        const int most = std::min(int(own), vocab_size);
        std::vector<BestTree> trees;
        for (int i = 0; i < rows.num_spans; ++i) trees.emplace_back(shapes + 3 * i, most);
        std::vector<float> logits, probs(own), states, fed_back;
        std::vector<std::vector<float>> behind(trees.size());  // of an attached head, by expanded node
        std::vector<int64_t> tokens, wanted;
        std::vector<int32_t> parents;
        std::vector<ForerunSpan> spans;
        ForerunPass pass = rows;
        for (int level = 1;; ++level) {
            logits.resize(pass.num_wanted * own);
            if (weights_.sizes.is_attached) fed_back.resize(pass.num_wanted * width);
            pass.fed_back = weights_.sizes.is_attached ? fed_back.data() : nullptr;
            forward(pass, store, logits.data());
            size_t row = 0;
            spans.clear(), tokens.clear(), wanted.clear(), parents.clear(), states.clear();
            for (int i = 0; i < rows.num_spans; ++i) {
                BestTree& tree = trees[i];
                if (tree.frontier().empty()) continue;
                for (int node : tree.frontier()) {
                    softmax(&logits[row * own], most, temperatures[i], probs.data());
                    tree.expand(node, probs.data(), most, target_ids_);
                    if (pass.fed_back)
                        behind[i].insert(behind[i].end(), &fed_back[row * width], &fed_back[(row + 1) * width]);
                    ++row;
                }
                tree.build(level);
                if (tree.frontier().empty()) continue;
                const int64_t last = rows.wanted[i];
                spans.push_back({rows.spans[i].slot, rows.spans[i].start + rows.spans[i].num_chain - 1, 1, 0});
                tokens.push_back(rows.tokens[last]);
                const auto add_state = [&](const float* state) { states.insert(states.end(), state, state + width); };
                if (pass.fed_back) add_state(rows.states + last * width);
                tree.read([&](int64_t token, int parent, int expanded, bool is_wanted) {
                    if (is_wanted) wanted.push_back(tokens.size());
                    tokens.push_back(token);
                    parents.push_back(parent);
                    if (pass.fed_back) add_state(&behind[i][expanded * width]);
                    ++spans.back().num_tree;
                });
            }
            if (spans.empty()) return trees;
            pass = {};
            pass.num_spans = int(spans.size()), pass.num_rows = int(tokens.size());
            pass.num_wanted = int(wanted.size()), pass.num_layers = rows.num_layers;
            pass.spans = spans.data(), pass.parents = parents.data();
            pass.tokens = tokens.data(), pass.wanted = wanted.data(), pass.states = states.data();
        }
    }

  private:
    // A panel of the head's outputs to its place in rows of logits.
    static void copy_columns(const float* sums, int panel, int num_rows, int vocab_size,
                             float* logits) {
        const int num_columns = std::min(kPanel, vocab_size - panel * kPanel);
        for (int row = 0; row < num_rows; ++row)
            std::memcpy(logits + size_t(row) * vocab_size + panel * kPanel,
                        sums + size_t(row) * kPanel, num_columns * sizeof(float));
    }

    // `draft(pass, n)` puts token n of every span at drafted[span][n]: of the rows given, then of
    // passes of one row per span behind them, each fed the token before.
    template <class Draft>
    void follow(const ForerunPass& rows, int num_tokens, const int64_t* drafted, Draft&& draft) {
        ForerunPass first = rows;
        if (weights_.sizes.is_attached) {
            fed_back_.resize(size_t(rows.num_spans) * weights_.sizes.hidden_size);
            first.fed_back = fed_back_.data();
        }
        draft(first, 0);
        std::vector<ForerunSpan> spans(rows.spans, rows.spans + rows.num_spans);
        std::vector<int64_t> tokens(rows.num_spans), wanted(rows.num_spans);
        for (int i = 0; i < rows.num_spans; ++i) {
            spans[i].start += spans[i].num_chain;
            spans[i].num_chain = 1;
            wanted[i] = i;
        }
        ForerunPass next{};
        next.num_spans = next.num_rows = next.num_wanted = rows.num_spans;
        next.num_layers = rows.num_layers;
        next.spans = spans.data();
        next.tokens = tokens.data();
        next.wanted = wanted.data();
        next.states = next.fed_back = first.fed_back;  // read before they are written
        for (int n = 1; n < num_tokens; ++n) {
            for (int i = 0; i < rows.num_spans; ++i) tokens[i] = drafted[i * num_tokens + n - 1];
            draft(next, n);
            for (ForerunSpan& span : spans) ++span.start;
        }
    }

    template <class Sink>
    void run(const ForerunPass& rows, const ForerunStore& store, Sink&& sink) {
        const Weights<T>& embedding = embedding_ ? *embedding_ : weights_;
        Pass<T> pass(weights_, embedding, scratch_, rows, store, crew_.num_threads());
        crew_.run(Pass<T>::num_phases(rows.num_layers),
                  [&](Walker& walker) { pass.walk(walker, sink); });
    }

    // The best token of every wanted row goes to drafted[0], drafted[stride], ...
    void best_tokens(const ForerunPass& rows, const ForerunStore& store, int vocab_size,
                     int stride, int64_t* drafted) {
        const int num_wanted = rows.num_wanted;
        best_.assign(size_t(crew_.num_threads()) * num_wanted, Best{});
        run(rows, store, [&](Walker& walker, int panel, const float* sums) {
            const int first = panel * kPanel, num_columns = std::min(kPanel, vocab_size - first);
            for (int row = 0; row < num_wanted; ++row, sums += kPanel)
                for (int i = 0; i < num_columns; ++i)
                    best_[size_t(walker.thread) * num_wanted + row].offer(sums[i], first + i);
        });
        for (int row = 0; row < num_wanted; ++row) {
            Best best = best_[row];
            for (int thread = 1; thread < crew_.num_threads(); ++thread) {
                const Best& other = best_[size_t(thread) * num_wanted + row];
                best.offer(other.value, other.token);
            }
            drafted[size_t(row) * stride] = target_ids_.empty() ? best.token : target_ids_[best.token];
        }
    }

    Crew& crew_;
    Weights<T> weights_;
    const Weights<T>* embedding_ = nullptr;  // of the target of an attached head
    std::vector<int64_t> target_ids_;        // of its tokens, ascending
    std::vector<float> fed_back_;
    Scratch<T> scratch_;
    std::vector<Best> best_;
};

// What the kernels are written for; the caller falls back on another runner for the rest.
bool is_supported(const ForerunSizes& sizes) {
    return sizes.head_dim % kLanes == 0 && sizes.head_dim <= kMaxHeadDim && sizes.hidden_size % kLanes == 0;
}

AnyDecoder* as_decoder(void* decoder) { return static_cast<AnyDecoder*>(decoder); }

template <class Work>
bool within_memory(Work&& work) {
    try {
        work();
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace

bool sampled_chain(void* decoder, const ForerunPass& pass, const ForerunStore& store, int num_tokens,
                   const Sampling& sampling, int64_t* drafted) {
    return within_memory([&] { as_decoder(decoder)->sampled_chain(pass, store, num_tokens, sampling, drafted); });
}

}  // namespace forerun

using namespace forerun;

// Python packs these by hand, as rows of 8-byte numbers (sampling/kernels.py, models/runner/native.py,
// models/runner/cycles.py).
static_assert(sizeof(ForerunChain) == 6 * 8 && sizeof(ForerunVerdict) == 4 * 8);
static_assert(sizeof(ForerunTreeNode) == 4 * 8);
static_assert(sizeof(ForerunMember) == 16 * 8 && sizeof(ForerunOutcome) == 3 * 8);

size_t forerun_interface() {
    size_t result = 0;
    for (size_t size : {sizeof(ForerunSizes), sizeof(ForerunPass), sizeof(ForerunStore),
                        sizeof(ForerunChainProbs), sizeof(ForerunCycles)})
        result = 1000 * result + size;
    return result;
}

void* forerun_crew_new(int32_t num_threads) { return new Crew(num_threads); }

void* forerun_decoder_new(void* crew, int32_t element, const ForerunSizes* sizes) {
    if (!is_supported(*sizes)) return nullptr;
    Crew& members = *static_cast<Crew*>(crew);
    AnyDecoder* decoder = nullptr;
    within_memory([&] {
        if (element == kBf16) decoder = new Decoder<bf16>(members, *sizes);
        else decoder = new Decoder<float>(members, *sizes);
    });
    return decoder;
}

void forerun_decoder_delete(void* decoder) { delete as_decoder(decoder); }

size_t forerun_decoder_bytes(const void* decoder) {
    return static_cast<const AnyDecoder*>(decoder)->num_bytes();
}

size_t forerun_decoder_bytes_read(const void* decoder, int32_t num_layers) {
    return static_cast<const AnyDecoder*>(decoder)->bytes_read(num_layers);
}

void forerun_decoder_put_vector(void* decoder, int32_t kind, int32_t layer, const float* from) {
    as_decoder(decoder)->put_vector(ForerunVector(kind), layer, from);
}

void forerun_decoder_put_matrix(void* decoder, int32_t kind, int32_t layer, int32_t expert,
                                const void* from) {
    as_decoder(decoder)->put_matrix(ForerunMatrix(kind), layer, expert, from);
}

bool forerun_decoder_put_quantised(void* decoder, int32_t kind, int32_t layer, int32_t expert,
                                   const int8_t* values, const uint16_t* scales, const uint16_t* minima) {
    return as_decoder(decoder)->put_quantised(ForerunMatrix(kind), layer, expert, values, scales, minima);
}

void* forerun_decoder_requantised(const void* decoder, const int32_t* formats) {
    AnyDecoder* made = nullptr;
    within_memory([&] { made = static_cast<const AnyDecoder*>(decoder)->requantised(formats); });
    return made;
}

void forerun_decoder_attach(void* decoder, const void* target, const int64_t* target_ids) {
    as_decoder(decoder)->attach(*static_cast<const AnyDecoder*>(target), target_ids);
}

void forerun_decoder_embed(const void* decoder, const int64_t* tokens, int64_t num_rows, void* to) {
    static_cast<const AnyDecoder*>(decoder)->embed(tokens, num_rows, to);
}

bool forerun_decoder_head(void* decoder, const void* hidden, int64_t num_rows, float* logits) {
    return within_memory([&] { as_decoder(decoder)->head(hidden, int(num_rows), logits); });
}

bool forerun_decoder_forward(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                             float* logits) {
    return within_memory([&] { as_decoder(decoder)->forward(*pass, *store, logits); });
}

bool forerun_decoder_greedy_chain(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                  int32_t num_tokens, int32_t vocab_size, int64_t* drafted) {
    return within_memory([&] {
        as_decoder(decoder)->greedy_chain(*pass, *store, num_tokens, vocab_size, drafted);
    });
}

bool forerun_decoder_sampled_chain(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                   int32_t num_tokens, int32_t vocab_size,
                                   const float* temperatures, const int64_t* keys, int32_t by_race,
                                   float* probs, int64_t* drafted) {
    const Sampling sampling{vocab_size, temperatures, nullptr, keys, by_race != 0, probs};
    return sampled_chain(decoder, *pass, *store, num_tokens, sampling, drafted);
}

bool forerun_decoder_likely_trees(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                  int32_t vocab_size, const int32_t* shapes, const float* temperatures,
                                  int32_t most_nodes, ForerunTreeNode* nodes, int64_t* num_nodes) {
    return within_memory([&] {
        const auto trees = as_decoder(decoder)->likely_trees(*pass, *store, vocab_size, shapes, temperatures);
        for (int i = 0; i < pass->num_spans; ++i) num_nodes[i] = trees[i].write(nodes + size_t(i) * most_nodes);
    });
}

void forerun_largest(const float* scores, int64_t num_rows, int64_t vocab_size, float* best,
                     int64_t* tokens) {
    for (int64_t row = 0; row < num_rows; ++row, scores += vocab_size) {
        best[row] = largest_of(scores, vocab_size);
        tokens[row] = place_of(best[row], scores, vocab_size);
    }
}

bool forerun_softmax(const float* scores, int64_t num_rows, int64_t vocab_size,
                     const float* temperatures, const ForerunTruncation* truncations, float* probs) {
    return within_memory([&] {
        for (int64_t row = 0; row < num_rows; ++row, scores += vocab_size, probs += vocab_size)
            distribution(scores, vocab_size, temperatures[row], truncations ? truncations + row : nullptr, probs);
    });
}

void forerun_draw(const float* weights, int64_t num_rows, int64_t vocab_size,
                  const double* uniforms, int64_t* tokens) {
    for (int64_t row = 0; row < num_rows; ++row)
        tokens[row] = draw(weights + row * vocab_size, vocab_size, uniforms[row]);
}

void forerun_draw_siblings(float* weights, int64_t num_rows, int64_t vocab_size, int64_t num_siblings,
                           const double* uniforms, int64_t* tokens, float* chances) {
    for (int64_t row = 0; row < num_rows; ++row, weights += vocab_size, tokens += num_siblings,
                 chances += num_siblings, uniforms += num_siblings) {
        for (int64_t i = 0; i < num_siblings; ++i) {
            tokens[i] = draw(weights, vocab_size, uniforms[i]);
            chances[i] = weights[tokens[i]];
            weights[tokens[i]] = 0;
        }
        // Backwards: where nothing was left a token may have been drawn twice.
        for (int64_t i = num_siblings - 1; i >= 0; --i) weights[tokens[i]] = chances[i];
    }
}

void forerun_race(const float* probs, int64_t num_rows, int64_t vocab_size, const int64_t* keys,
                  int64_t* tokens) {
    for (int64_t row = 0; row < num_rows; ++row)
        tokens[row] = race(probs + row * vocab_size, vocab_size, keys[row]);
}

void forerun_coupled_match(const float* target, const float* draft, int64_t num_rows,
                           int64_t vocab_size, int64_t draft_stride, const int64_t* tokens,
                           float* probs) {
    for (int64_t row = 0; row < num_rows; ++row)
        probs[row] = float(coupled_match(target + row * vocab_size, draft + row * draft_stride,
                                         vocab_size, tokens[row]));
}

void forerun_verify_chains(const ForerunChain* chains, int64_t num_chains, int64_t vocab_size,
                           int32_t is_block, ForerunVerdict* verdicts) {
    for (int64_t i = 0; i < num_chains; ++i)
        verdicts[i] = verify_chain(chains[i], vocab_size, is_block != 0);
}

void forerun_chain_accept(const ForerunChainProbs* given, double* accept_probs) {
    std::vector<double> prefix(given->num_nodes + 1);
    std::fill(accept_probs, accept_probs + given->num_chains * given->num_nodes, 0.);
    for (int64_t index = 0; index < given->num_chains; ++index) {
        const Chain<double> chain = chain_of(*given, index);
        chain.prefix_ratios(prefix.data());
        chain.accept(prefix.data(), accept_probs + index * given->num_nodes);
    }
}

void forerun_chain_weights(const ForerunChainProbs* given, const int64_t* num_accepted, double* weights) {
    std::vector<double> prefix(given->num_nodes + 1);
    for (int64_t index = 0; index < given->num_chains; ++index) {
        const Chain<double> chain = chain_of(*given, index);
        chain.prefix_ratios(prefix.data());
        chain.weights(num_accepted[index], prefix.data(), weights + index * given->vocab_size);
    }
}

void forerun_verify_trees(const ForerunTree* trees, int64_t num_trees, int64_t vocab_size,
                          ForerunTreeVerdict* verdicts) {
    for (int64_t i = 0; i < num_trees; ++i) verdicts[i] = verify_tree(trees[i], vocab_size);
}

void forerun_tree_weights(const ForerunTreeProbs* given, double* accept, double* weights) {
    const int64_t num_nodes = given->num_nodes, size = given->vocab_size;
    for (int64_t index = 0; index < given->num_trees; ++index) {
        DrawnTree<double> tree{given->target + index * (num_nodes + 1) * size,
                               given->draft + index * given->num_parents * size,
                               given->tokens + index * num_nodes,
                               given->parents,
                               given->draft_rows,
                               num_nodes,
                               size,
                               {},
                               {}};
        tree.weigh();
        std::copy(tree.accept.begin(), tree.accept.end(), accept + index * num_nodes);
        for (int64_t node = -1; node < num_nodes; ++node)
            tree.weights(node, weights + (index * (num_nodes + 1) + node + 1) * size);
    }
}

int32_t forerun_cycles(const ForerunCycles* asked) {
    int32_t num_cycles = 0;
    within_memory([&] { num_cycles = Cycles(*asked).run(); });
    return num_cycles;
}
