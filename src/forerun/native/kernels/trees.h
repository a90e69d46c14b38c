// Traversal verification of drawn trees: the same definitions as forerun/sampling/tree_rules.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "interface.h"
#include "sampling.h"

namespace forerun {

// One tree. Everything about single nodes is in fp64. Row 0 of the target belongs to the root, row n + 1
// to node n.
template <class T>
struct DrawnTree {
    const T *target, *draft;
    const int64_t *tokens, *parents, *draft_rows;
    int64_t num_nodes, vocab_size;

    // What the rejections so far leave behind a node: weight times distribution is
    // [scale * target - shift * draft]+, but for the removed tokens, which have values of their own.
    struct Left {
        double weight = 1, scale = 1, shift = 0, draft_mass = 1;
        std::vector<int64_t> removed;
        std::vector<double> values;
    };

    std::vector<double> accept;
    std::vector<Left> left;

    const T* target_row(int64_t node) const { return target + (node + 1) * vocab_size; }
    const T* draft_row(int64_t node) const { return draft + draft_rows[node + 1] * vocab_size; }
    bool is_valid(int64_t node) const { return !std::isnan(target_row(node)[0]); }

    // Acceptance probability of every node; nothing is accepted behind a row that is NaN.
    void weigh() {
        accept.assign(num_nodes, 0.);
        left.assign(num_nodes + 1, Left());
        for (int64_t node = -1; node < num_nodes; ++node) {
            Left& at = left[node + 1];
            if (node >= 0) at.weight = at.scale = accept[node];
            if (draft_rows[node + 1] < 0 || !is_valid(node)) continue;
            for (int64_t child = node + 1; child < num_nodes; ++child)
                if (parents[child] == node) reject(at, node, child);
            if (node >= 0) accept[node] = at.weight;
        }
    }

    void reject(Left& at, int64_t node, int64_t child) {
        const int64_t token = tokens[child];
        const double target_x = target_row(node)[token], draft_x = draft_row(node)[token];
        const double weighted = std::max(0., at.scale * target_x - at.shift * draft_x);
        accept[child] = std::min(1., weighted * at.draft_mass / std::max(draft_x, 1e-300));
        if (at.draft_mass > 0) at.shift += 1 / at.draft_mass;
        const double own = std::max(0., at.scale * target_x - at.shift * draft_x);
        at.removed.push_back(token);
        at.values.push_back(own);
        double mass = 0;
        for (double value : at.values) mass += value;
        at.draft_mass = 0;
        add_others(at, node, mass, at.draft_mass);
        const double rest = mass + (1 - at.weight);
        const double factor = rest > 0 ? 1 / rest : 0;
        at.weight = rest > 0 ? mass * factor : 1;  // else nothing is left on either side
        at.scale *= factor, at.shift *= factor;
        for (double& value : at.values) value *= factor;
    }

    // Adds up the residual and the draft's row over all tokens that were not removed.
    void add_others(const Left& at, int64_t node, double& mass, double& draft_mass) const {
        std::vector<int64_t> ends(at.removed);
        ends.push_back(vocab_size);
        std::sort(ends.begin(), ends.end());
        const T *p = target_row(node), *q = draft_row(node);
        const T scale = T(at.scale), shift = T(at.shift);
        int64_t start = 0;
        for (int64_t end : ends) {
            for (; start < end; start += kBlock) {
                const int64_t stop = std::min(start + kBlock, end);
                T residuals[kLanes] = {}, drafts[kLanes] = {};
                int64_t token = start;
                for (; token + kLanes <= stop; token += kLanes)
                    for (int i = 0; i < kLanes; ++i) {
                        residuals[i] += positive(scale * p[token + i] - shift * q[token + i]);
                        drafts[i] += q[token + i];
                    }
                for (; token < stop; ++token) {
                    residuals[0] += positive(scale * p[token] - shift * q[token]);
                    drafts[0] += q[token];
                }
                for (int i = 0; i < kLanes; ++i) mass += residuals[i], draft_mass += drafts[i];
            }
            start = end + 1;
        }
    }

    static T positive(T value) { return value > 0 ? value : T(0); }

    // Weights of the token behind a node whose children are rejected; the target's where none is left.
    void weights(int64_t node, T* to) const {
        const T* row = target_row(node);
        const Left& at = left[node + 1];
        if (!at.removed.empty()) {
            const T *q = draft_row(node), scale = T(at.scale), shift = T(at.shift);
            for (int64_t token = 0; token < vocab_size; ++token)
                to[token] = positive(scale * row[token] - shift * q[token]);
            for (size_t i = 0; i < at.removed.size(); ++i) to[at.removed[i]] = T(at.values[i]);
            if (std::any_of(to, to + vocab_size, [](T weight) { return weight > 0; })) return;
        }
        std::copy(row, row + vocab_size, to);
    }

    // Calls back with every node and its depth, descendants first, until that returns true.
    template <class See>
    bool post_order(int64_t node, int64_t depth, const See& see) const {
        for (int64_t child = node + 1; child < num_nodes; ++child) {
            if (parents[child] != node) continue;
            if (post_order(child, depth + 1, see) || see(child, depth + 1)) return true;
        }
        return false;
    }
};

inline ForerunTreeVerdict verify_tree(const ForerunTree& given, int64_t vocab_size) {
    DrawnTree<float> tree{given.target,     given.draft,     given.tokens, given.parents,
                          given.draft_rows, given.num_nodes, vocab_size,   {},
                          {}};
    tree.weigh();
    int64_t last = -1;
    double rejected = 1, expected = 0;
    tree.post_order(-1, 0, [&](int64_t node, int64_t depth) {
        expected += depth * rejected * tree.accept[node];
        rejected *= 1 - tree.accept[node];
        return false;
    });
    tree.post_order(-1, 0, [&](int64_t node, int64_t) {
        if (!(uniform(given.keys[node]) < tree.accept[node])) return false;
        last = node;
        return true;
    });
    bool is_valid = true;
    for (int64_t node = last; node >= 0; node = given.parents[node]) is_valid &= tree.is_valid(node);
    std::vector<float> weights(vocab_size);
    tree.weights(last, weights.data());
    const double noise = uniform(given.keys[given.num_nodes + last + 1]);
    return {last, draw(weights.data(), vocab_size, noise), is_valid && tree.is_valid(-1), expected};
}

}  // namespace forerun
