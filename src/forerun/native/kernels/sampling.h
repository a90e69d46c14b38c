// Sampling over rows of a vocabulary: the same definitions as forerun/sampling, in a few passes over
// each row instead of one per operation. A row's result depends on that row alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "interface.h"
#include "vectors.h"

namespace forerun {

// Sums go over blocks in fp32 (or whatever the numbers are), over the blocks in fp64.
constexpr int64_t kBlock = 16 * kLanes;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Sums in fp64 of every lane.
struct Doubles {
    double lane[kLanes];

    void add(const float* values) {
        for (int i = 0; i < kLanes; ++i) lane[i] += double(values[i]);
    }

    void add(Floats values) {
        float each[kLanes];
        store(each, values);
        add(each);
    }

    double total() const {
        double sum = 0;
        for (double value : lane) sum += value;
        return sum;
    }
};

// The next values of a row, `rest` past its end.
inline Floats load_some(const float* from, int64_t count, float rest) {
    if (count >= kLanes) return load(from);
    Floats values = splat(rest);
    if (count > 0) std::memcpy(&values, from, count * sizeof(float));
    return values;
}

inline void store_some(float* to, int64_t count, Floats values) {
    std::memcpy(to, &values, std::min<int64_t>(count, kLanes) * sizeof(float));
}

// The largest of a row; NaN where there is one.
inline float largest_of(const float* row, int64_t size) {
    Floats best = splat(-INFINITY);
    Masks is_nan = {};
    const auto look = [&](Floats values) {
        best = larger(values, best);
        is_nan = is_nan | (values != values);
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) look(load(row + i));
    if (i < size) look(load_some(row + i, size - i, -INFINITY));
    return any(is_nan) ? kNaN : largest(best);
}

// Where the largest of a row first occurs, or a NaN if that is what `largest_of` found.
inline int64_t place_of(float best, const float* row, int64_t size) {
    const auto is_it = [&](float value) { return best == best ? value == best : value != value; };
    int64_t i = 0;
    while (i + kLanes <= size) {
        const Floats values = load(row + i);
        if (any(best == best ? values == splat(best) : values != values)) break;
        i += kLanes;
    }
    while (!is_it(row[i])) ++i;
    return i;
}

// The largest of a row in descending order, the lowest place among equals; the row is left as it was.
inline void top_of(float* row, int64_t size, int64_t count, float* values, int64_t* places) {
    for (int64_t rank = 0; rank < count; ++rank) {
        values[rank] = largest_of(row, size);
        places[rank] = place_of(values[rank], row, size);
        row[places[rank]] = -INFINITY;
    }
    for (int64_t rank = count - 1; rank >= 0; --rank) row[places[rank]] = values[rank];
}

// The distribution of a row at a temperature, at 0 all mass on the largest; NaN throughout where there is
// none. One pass for the peak, one for the exponentials, one to divide.
inline void softmax(const float* scores, int64_t size, float temperature, float* probs) {
    const float best = largest_of(scores, size);
    if (!std::isfinite(best)) {
        std::fill(probs, probs + size, kNaN);
        return;
    }
    if (!(temperature > 0)) {
        const int64_t token = place_of(best, scores, size);
        std::fill(probs, probs + size, 0.f);
        probs[token] = 1.f;
        return;
    }
    // Subtracted first: behind a multiply-add a large peak would not cancel.
    const Floats scale = splat(1 / temperature), shift = splat(best);
    Doubles total = {};
    for (int64_t start = 0; start < size; start += kBlock) {
        const int64_t end = std::min(start + kBlock, size);
        Floats sum = {};
        int64_t i = start;
        for (; i + kLanes <= end; i += kLanes) {
            const Floats weights = exponential((load(scores + i) - shift) * scale);
            store(probs + i, weights);
            sum += weights;
        }
        if (i < end) {
            const Floats last = load_some(scores + i, end - i, -INFINITY);
            const Floats weights = exponential((last - shift) * scale);
            store_some(probs + i, end - i, weights);
            sum += weights;
        }
        total.add(sum);
    }
    const float share = float(1 / total.total());
    for (int64_t i = 0; i < size; ++i) probs[i] *= share;
}

// Drops tokens from a distribution by min_p, top_k and top_p in this order; see sampling/processors.py. Of tokens
// with the same score at the edge of top_p the higher ones stay.
inline void truncate(const float* scores, int64_t size, float temperature, const ForerunTruncation& by, float* probs) {
    if (std::isnan(probs[0]) || !(temperature > 0)) return;
    const float best = largest_of(scores, size), least = by.min_p * largest_of(probs, size);
    const double wanted = 1 - double(by.excluded_mass);
    std::vector<int64_t> tokens;
    double mass = 0;
    // Mostly few tokens are kept, so those near the best are tried first. min_p keeps none beyond `depth`.
    for (float depth = by.min_p > 0 ? 1 - std::log(by.min_p) : 8;; depth *= 2) {
        const float bound = depth < 100 ? best - depth * temperature : -INFINITY;
        tokens.clear(), mass = 0;
        for (int64_t start = 0; start < size; start += kLanes) {
            if (!any(load_some(scores + start, size - start, -INFINITY) >= splat(bound))) continue;
            for (int64_t i = start; i < std::min(start + kLanes, size); ++i)
                if (scores[i] >= bound && probs[i] >= least) tokens.push_back(i), mass += probs[i];
        }
        const bool is_enough = by.top_k > 0 ? float(tokens.size()) >= by.top_k : by.excluded_mass > 0 && mass >= wanted;
        if (is_enough || by.min_p > 0 || bound == -INFINITY) break;
    }
    const auto is_lower = [&](int64_t a, int64_t b) { return scores[a] < scores[b] || (scores[a] == scores[b] && a < b); };
    auto rest = tokens.end();  // from here on the most likely ones, in ascending order
    const auto take = [&] { std::pop_heap(tokens.begin(), rest, is_lower), --rest; };
    if (by.top_k > 0 || by.excluded_mass > 0) std::make_heap(tokens.begin(), rest, is_lower);
    if (by.top_k > 0) {
        for (mass = 0; rest != tokens.begin(); mass += probs[*rest]) {
            const bool is_equal = rest != tokens.end() && scores[tokens.front()] == scores[*rest];
            if (float(tokens.end() - rest) >= by.top_k && !is_equal) break;
            take();
        }
        tokens.erase(tokens.begin(), rest);
        rest = tokens.begin();
    } else if (!(by.min_p > 0)) {
        mass = 1;
    }
    if (by.excluded_mass > 0) {
        const bool is_sorted = by.top_k > 0;
        auto first = tokens.end();
        double sum = 0;
        do {
            if (!is_sorted) take();
            sum += probs[*--first];
        } while (first != tokens.begin() && sum < wanted * mass);
        tokens.erase(tokens.begin(), first);
    }
    std::vector<float> kept;
    mass = 0;
    for (int64_t token : tokens) kept.push_back(probs[token]), mass += probs[token];
    std::fill(probs, probs + size, 0.f);
    const float share = float(1 / mass);
    for (size_t i = 0; i < tokens.size(); ++i) probs[tokens[i]] = kept[i] * share;
}

inline bool truncates(const ForerunTruncation& by) { return by.min_p > 0 || by.top_k > 0 || by.excluded_mass > 0; }

// The distribution of a row at a temperature and a truncation, null for none; `probs` may be `scores`.
inline void distribution(const float* scores, int64_t size, float temperature, const ForerunTruncation* by, float* probs) {
    if (!by || !truncates(*by))
        return softmax(scores, size, temperature, probs);
    const std::vector<float> unchanged(scores, scores + size);
    softmax(scores, size, temperature, probs);
    truncate(unchanged.data(), size, temperature, *by, probs);
}

inline double sum_of(const float* weights, int64_t size) {
    Doubles sum = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sum.add(weights + i);
    if (i < size) sum.add(load_some(weights + i, size - i, 0.f));
    return sum.total();
}

// The token x with u * total in [W(x - 1), W(x)), W the running sum: found by block, then inside it.
inline int64_t draw(const float* weights, int64_t size, double uniform) {
    double total = 0;
    for (int64_t start = 0; start < size; start += kBlock)
        total += sum_of(weights + start, std::min(kBlock, size - start));
    const double wanted = total * uniform;
    double sum = 0;
    for (int64_t start = 0; start < size; start += kBlock) {
        const int64_t end = std::min(start + kBlock, size);
        const double next = sum + sum_of(weights + start, end - start);
        if (next > wanted) {
            int64_t last = end - 1;
            for (int64_t i = start; i < end; ++i) {
                if (!(weights[i] > 0)) continue;
                last = i;  // taken where adding one by one ends a rounding short of the block's sum
                sum += weights[i];
                if (sum > wanted) return i;
            }
            return last;
        }
        sum = next;
    }
    return size - 1;  // of a row that is NaN: any
}

// ------------------------------------------------------------------------------------------- noise

// SplitMix64, see theory/splitmix.py.
constexpr uint64_t kIncrement = 0x9E3779B97F4A7C15u;

inline uint64_t finalise(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

inline double uniform(int64_t key) { return double(uint64_t(key) >> 11) * 0x1p-53; }

// The uniform behind clock `index` of a key: on the open interval, all its bits significant.
inline double open_uniform(int64_t key, int64_t index) {
    const uint64_t bits = finalise(uint64_t(key) + uint64_t(index + 1) * kIncrement);
    return (double(bits >> 12) + 0.5) * 0x1p-52;
}

// The first to ring among clocks -log(1 - u) / p. As -log(1 - u) >= u, a logarithm is only taken where
// u / p is small enough to win: a few times per race.
struct Race {
    int64_t key;
    int64_t winner = 0;
    float earliest = INFINITY;

    void enter(const float* probs, int64_t count, int64_t first, int64_t offset) {
        float uniforms[kLanes];
        for (int64_t i = 0; i < count; ++i) uniforms[i] = float(open_uniform(key, offset + first + i));
        for (int64_t i = 0; i < count; ++i) {
            if (!(uniforms[i] / probs[i] < earliest)) continue;
            const float clock = float(-std::log1p(-open_uniform(key, offset + first + i)));
            if (clock / probs[i] < earliest) earliest = clock / probs[i], winner = first + i;
        }
    }
};

constexpr int kMembers = 8;

// Token x belongs to group x modulo the number of groups; see sampling/walk.py.
struct Groups {
    const float* probs;
    int64_t size, num_groups;

    Groups(const float* probs, int64_t size)
        : probs(probs), size(size), num_groups((size + kMembers - 1) / kMembers) {}

    // The added probabilities of the groups from `first` on; of those that do not exist, anything.
    Floats sums(int64_t first) const {
        Floats of[kMembers];
        for (int member = 0; member < kMembers; ++member) {
            const int64_t token = member * num_groups + first;
            of[member] = load_some(probs + token, size - token, 0.f);
        }
        for (int half = kMembers / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) of[i] += of[i + half];
        return of[0];
    }

    void members(int64_t group, float* to) const {
        for (int member = 0; member < kMembers; ++member) {
            const int64_t token = member * num_groups + group;
            to[member] = token < size ? probs[token] : 0.f;
        }
    }
};

// Groups race, then the members of the winning one.
inline int64_t race(const float* probs, int64_t size, int64_t key) {
    const Groups groups(probs, size);
    Race between{key}, within{key};
    for (int64_t first = 0; first < groups.num_groups; first += kLanes) {
        float sums[kLanes];
        store(sums, groups.sums(first));
        between.enter(sums, std::min<int64_t>(kLanes, groups.num_groups - first), first, 0);
    }
    float members[kMembers];
    groups.members(between.winner, members);
    within.enter(members, kMembers, 0, groups.num_groups);
    return std::min(within.winner * groups.num_groups + between.winner, size - 1);
}

// Probability that the target's race has the winner of the draft's, given that winner's rates.
struct SameWinner {
    float target, draft;
    double needed = 0, drafted = 0;

    void enter(const float* targets, const float* drafts, int64_t count) {
        float some_needed = 0, some_drafted = 0;
        for (int64_t i = 0; i < count; ++i) {
            some_needed += std::max(draft * targets[i], target * drafts[i]);
            some_drafted += drafts[i];
        }
        needed += some_needed, drafted += some_drafted;
    }

    double prob() const { return target * drafted / std::max(needed, 1e-300); }
};

inline double coupled_match(const float* target, const float* draft, int64_t size, int64_t token) {
    const Groups targets(target, size), drafts(draft, size);
    const int64_t num_groups = targets.num_groups, group = token % num_groups;
    float of_target[kLanes], of_draft[kLanes];
    store(of_target, targets.sums(group));
    store(of_draft, drafts.sums(group));
    SameWinner between{of_target[0], of_draft[0]};
    for (int64_t first = 0; first < num_groups; first += kLanes) {
        store(of_target, targets.sums(first));
        store(of_draft, drafts.sums(first));
        between.enter(of_target, of_draft, std::min<int64_t>(kLanes, num_groups - first));
    }
    targets.members(group, of_target);
    drafts.members(group, of_draft);
    const int64_t member = token / num_groups;
    SameWinner within{of_target[member], of_draft[member]};
    within.enter(of_target, of_draft, kMembers);
    return between.prob() * within.prob();
}

// Parameters of drawing drafted tokens, and where their distributions are written; see interface.h. `truncations` has
// one entry per span, or is null.
struct Sampling {
    int64_t vocab_size;
    const float* temperatures;
    const ForerunTruncation* truncations;
    const int64_t* keys;
    bool by_race;
    float* probs;

    int64_t token(size_t at) const {
        const float* row = probs + at * vocab_size;
        return by_race ? race(row, vocab_size, keys[at]) : draw(row, vocab_size, uniform(keys[at]));
    }

    bool truncates(int num_spans) const {
        return truncations && std::any_of(truncations, truncations + num_spans, forerun::truncates);
    }

    void shape(const float* scores, int64_t size, int span, float* row) const {
        distribution(scores, size, temperatures[span], truncations ? truncations + span : nullptr, row);
    }
};

// ------------------------------------------------------------------------------- chains: probability stage

// One chain; see sampling/chain.py for the rules. Everything about single nodes is in fp64.
template <class T>
struct Chain {
    const T *target, *draft;
    const int64_t* tokens;
    int64_t num_drafted, vocab_size, draft_stride;
    bool is_block;

    const T* target_row(int64_t node) const { return target + node * vocab_size; }
    const T* draft_row(int64_t node) const { return draft + node * draft_stride; }

    // target / draft at a drawn token.
    double ratio(int64_t node) const {
        const double drawn = draft_row(node)[tokens[node]];
        return target_row(node)[tokens[node]] / std::max(drawn, 1e-300);
    }

    // p_i of block verification after every drafted node; p_0 = 1.
    void prefix_ratios(double* prefix) const {
        prefix[0] = 1;
        for (int64_t i = 0; i < num_drafted; ++i) prefix[i + 1] = std::min(1., prefix[i] * ratio(i));
    }

    // What the distributions after `node` accepted nodes leave: [scale * target - draft]+.
    T residual(int64_t node, T scale, int64_t token) const {
        const T left = scale * target_row(node)[token] - draft_row(node)[token];
        return left > 0 ? left : 0;
    }

    double residual_mass(int64_t node, T scale) const {
        double mass = 0;
        for (int64_t start = 0; start < vocab_size; start += kBlock) {
            const int64_t end = std::min(start + kBlock, vocab_size);
            T sums[kLanes] = {};
            int64_t token = start;
            for (; token + kLanes <= end; token += kLanes)
                for (int i = 0; i < kLanes; ++i) sums[i] += residual(node, scale, token + i);
            for (; token < end; ++token) sums[0] += residual(node, scale, token);
            for (int i = 0; i < kLanes; ++i) mass += sums[i];
        }
        return mass;
    }

    // Acceptance probability of every node.
    void accept(const double* prefix, double* probs) const {
        for (int64_t i = 0; i < num_drafted; ++i)
            probs[i] = is_block ? block_accept(i, prefix) : std::min(1., ratio(i));
    }

    double block_accept(int64_t node, const double* prefix) const {
        const double through = prefix[node + 1];
        if (node == num_drafted - 1) return through;
        const double mass = residual_mass(node + 1, T(through));
        const double either = mass + (1 - through);
        return either > 0 ? mass / either : 1;  // nothing is left on either side
    }

    // Weights of the token after `accepted` ones: the residual, the target's row where nothing
    // remains of it or nothing was rejected.
    void weights(int64_t accepted, const double* prefix, T* to) const {
        const T* row = target_row(accepted);
        if (accepted < num_drafted) {
            const T scale = is_block ? T(prefix[accepted]) : T(1);
            bool is_something = false;
            for (int64_t token = 0; token < vocab_size; ++token) {
                to[token] = residual(accepted, scale, token);
                is_something |= to[token] > 0;
            }
            if (is_something) return;
        }
        std::copy(row, row + vocab_size, to);
    }

    double expected_accepted(const double* probs) const {
        double expected = 0;
        if (is_block) {  // through node i unless no test from i on passes
            double none = 1;
            for (int64_t i = num_drafted - 1; i >= 0; --i) none *= 1 - probs[i], expected += 1 - none;
        } else {
            double all = 1;
            for (int64_t i = 0; i < num_drafted; ++i) all *= probs[i], expected += all;
        }
        return expected;
    }
};

inline Chain<double> chain_of(const ForerunChainProbs& given, int64_t index) {
    const int64_t vocab_size = given.vocab_size, num_nodes = given.num_nodes;
    return {given.target + index * (num_nodes + 1) * vocab_size,
            given.draft + index * num_nodes * vocab_size,
            given.tokens + index * num_nodes,
            given.num_drafted[index],
            vocab_size,
            vocab_size,
            given.is_block != 0};
}

// ------------------------------------------------------------------------------ chains: draw stage

// A chain ends before the first row of the target that is NaN.
inline int64_t num_valid(const ForerunChain& chain, int64_t vocab_size) {
    int64_t row = 0;
    while (row <= chain.num_drafted && !std::isnan(chain.target[row * vocab_size])) ++row;
    return row;
}

inline int64_t num_accepted(const Chain<float>& chain, const double* probs, const int64_t* keys) {
    int64_t accepted = 0;
    for (int64_t i = 0; i < chain.num_drafted; ++i) {
        if (uniform(keys[i]) < probs[i]) accepted = i + 1;
        else if (!chain.is_block) break;
    }
    return accepted;
}

inline ForerunVerdict verify_chain(const ForerunChain& given, int64_t vocab_size, bool is_block) {
    const int64_t valid = num_valid(given, vocab_size);
    const Chain<float> chain{given.target,
                             given.draft,
                             given.tokens,
                             std::min(given.num_drafted, valid),
                             vocab_size,
                             given.draft_stride,
                             is_block};
    std::vector<double> prefix(chain.num_drafted + 1), probs(chain.num_drafted);
    std::vector<float> weights(vocab_size);
    chain.prefix_ratios(prefix.data());
    chain.accept(prefix.data(), probs.data());
    const int64_t accepted = num_accepted(chain, probs.data(), given.keys);
    if (accepted == valid) return {accepted, 0, valid, 0};
    chain.weights(accepted, prefix.data(), weights.data());
    const int64_t key = given.keys[given.num_drafted + (accepted < chain.num_drafted ? 0 : 1)];
    return {accepted, draw(weights.data(), vocab_size, uniform(key)), valid,
            chain.expected_accepted(probs.data())};
}

}  // namespace forerun
