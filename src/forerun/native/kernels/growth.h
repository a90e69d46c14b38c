// Growth of a draft tree by the most probable paths: the same definitions as build_tree and BestFirst in
// drafters/tree_growth.py.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

#include "interface.h"
#include "sampling.h"

namespace forerun {

class BestTree {
  public:
    // shape: the most nodes, levels and children of a node.
    BestTree(const int32_t* shape, int64_t vocab_size)
        : num_nodes_(shape[0]), depth_(shape[1]), width_(int(std::min<int64_t>(shape[2], vocab_size))) {}

    // Nodes whose candidates the next pass computes; at first the root, -1.
    const std::vector<int>& frontier() const { return frontier_; }

    // Add the candidates after a node of the frontier; the row is written to and restored. Its tokens have ids of
    // their own unless `ids` is empty.
    void expand(int node, float* probs, int64_t size, const std::vector<int64_t>& ids) {
        const size_t first = tokens_.size();
        std::vector<float> values(width_);
        tokens_.resize(first + width_);
        top_of(probs, size, width_, values.data(), &tokens_[first]);
        for (size_t i = first; i < tokens_.size() && !ids.empty(); ++i) tokens_[i] = ids[tokens_[i]];
        // NaN and 0 become -inf, which no tree holds.
        for (float value : values) log_probs_.push_back(value > 0 ? std::log(double(value)) : -INFINITY);
        after_.resize(first + width_, -1);
        rows_.resize(first + width_, -1);
        if (node >= 0) after_[nodes_[node].candidate] = int(first);
    }

    // Choose the best nodes of all candidates, and the frontier at this depth.
    void build(int level) {
        std::vector<Node> entered = best();
        nodes_.clear();
        number(entered, -1, -1);
        double lowest = -INFINITY;
        if (int(nodes_.size()) == num_nodes_) {
            lowest = nodes_[0].log_prob;
            for (const Node& node : nodes_) lowest = std::min(lowest, node.log_prob);
        }
        frontier_.clear();
        for (size_t i = 0; i < nodes_.size(); ++i)
            if (nodes_[i].depth == level && level < depth_ && nodes_[i].log_prob > lowest)
                frontier_.push_back(int(i));
    }

    // Calls back with token, row of the parent, number of the parent's candidates among all that were added,
    // and whether the node is of the frontier, for every node that the next pass reads.
    template <class Read>
    void read(const Read& read) {
        std::fill(rows_.begin(), rows_.end(), -1);
        int row = 0;
        for (size_t i = 0, next = 0; i < nodes_.size(); ++i) {
            const Node& node = nodes_[i];
            const bool is_new = next < frontier_.size() && frontier_[next] == int(i);
            if (!is_new && after_[node.candidate] < 0) continue;
            next += is_new;
            rows_[node.candidate] = row++;
            const int above = node.parent < 0 ? -1 : nodes_[node.parent].candidate;
            read(tokens_[node.candidate], above < 0 ? -1 : rows_[above],
                 above < 0 ? 0 : after_[above] / width_, is_new);
        }
    }

    int64_t write(ForerunTreeNode* to) const {
        for (const Node& node : nodes_)
            *to++ = {tokens_[node.candidate], node.parent, rows_[node.candidate], node.log_prob};
        return int64_t(nodes_.size());
    }

  private:
    struct Node {
        int parent, depth, candidate;
        double log_prob;
    };

    struct Entry {
        double cost;  // minus the log-probability of the path
        int serial, parent, candidate, rank;
        double above;

        bool operator<(const Entry& other) const {  // a heap has its largest on top
            return cost != other.cost ? cost > other.cost : serial > other.serial;
        }
    };

    // The nodes in the order they enter the tree, by probability.
    std::vector<Node> best() const {
        std::vector<Node> nodes;
        std::priority_queue<Entry> heap;
        int serial = 0;
        const auto push = [&](int parent, int candidate, int rank, double above) {
            const double log_prob = above + log_probs_[candidate];
            if (log_prob >= -DBL_MAX) heap.push({-log_prob, serial++, parent, candidate, rank, above});
        };
        push(-1, 0, 0, 0.);
        while (!heap.empty() && int(nodes.size()) < num_nodes_) {
            const Entry entry = heap.top();
            heap.pop();
            const double log_prob = entry.above + log_probs_[entry.candidate];
            const int depth = entry.parent < 0 ? 1 : nodes[entry.parent].depth + 1;
            const int node = int(nodes.size());
            nodes.push_back({entry.parent, depth, entry.candidate, log_prob});
            if (entry.rank + 1 < width_)
                push(entry.parent, entry.candidate + 1, entry.rank + 1, entry.above);
            if (depth < depth_ && after_[entry.candidate] >= 0)
                push(node, after_[entry.candidate], 0, log_prob);
        }
        return nodes;
    }

    // Number the nodes below one depth-first.
    void number(const std::vector<Node>& entered, int node, int parent) {
        for (size_t child = node + 1; child < entered.size(); ++child) {
            if (entered[child].parent != node) continue;
            nodes_.push_back(entered[child]);
            nodes_.back().parent = parent;
            number(entered, int(child), int(nodes_.size()) - 1);
        }
    }

    int num_nodes_, depth_, width_;
    std::vector<int> frontier_{-1};
    std::vector<Node> nodes_;
    // Of all candidates, `width_` after every expanded node: token, log-probability after its path, where its own
    // candidates begin (-1: not expanded), its row in the last pass (-1: none).
    std::vector<int64_t> tokens_;
    std::vector<double> log_probs_;
    std::vector<int> after_, rows_;
};

}  // namespace forerun
