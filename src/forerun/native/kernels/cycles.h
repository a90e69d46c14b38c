// Several decoding cycles in one call: draft a chain, run the target over it, verify, and go on from there.
// The same definitions as engine/step.py with chains; noise keys as in sampling/noise.py.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

#include "interface.h"
#include "sampling.h"

namespace forerun {

enum Purpose : uint64_t { kTargetDraw, kDraftDraw, kAcceptDraw, kRecoveredDraw, kBonusDraw };
constexpr int kPurposeBits = 3;

inline uint64_t absorb(uint64_t key, uint64_t word) { return finalise(key + (word + 1) * kIncrement); }

inline int64_t position_key(int64_t request_key, int64_t position) {
    return int64_t(absorb(uint64_t(request_key), uint64_t(position) << kPurposeBits | kTargetDraw));
}

inline int64_t step_key(int64_t request_key, int64_t num_committed, int64_t node, Purpose purpose) {
    const uint64_t step = absorb(uint64_t(request_key), uint64_t(num_committed) << kPurposeBits | purpose);
    return int64_t(absorb(step, uint64_t(node)));
}

// The same as forerun_decoder_sampled_chain; defined in kernels.cpp.
bool sampled_chain(void* decoder, const ForerunPass& pass, const ForerunStore& store, int num_tokens,
                   const Sampling& sampling, int64_t* drafted);

class Cycles {
  public:
    explicit Cycles(const ForerunCycles& asked)
        : asked_(asked), members_(asked.members, asked.members + asked.num_members),
          unread_(asked.num_members), outcomes_(asked.num_members) {
        const int64_t* unread = asked.unread;
        for (int i = 0; i < asked.num_members; ++i) {
            unread_[i].assign(unread, unread + members_[i].num_unread);
            unread += members_[i].num_unread;
            if (members_[i].num_drafted) drafting_.push_back(i);
        }
    }

    // Returns how many cycles were run. One that cannot be finished leaves nothing behind.
    int run() {
        const double limit = now() + asked_.budget_s;
        for (int cycle = 0; cycle < asked_.max_cycles; ++cycle) {
            const double started = now();
            double* times = asked_.times + 4 * cycle;
            int64_t* drafted = asked_.drafted + int64_t(cycle) * asked_.num_members * asked_.depth;
            if (!fits() || !draft(drafted)) return cycle;
            const double passed = now();
            if (!pass(drafted)) return cycle;
            const double verifying = now();
            if (!verify(drafted, asked_.matches + (drafted - asked_.drafted))) return cycle;
            keep_features();
            std::copy(outcomes_.begin(), outcomes_.end(), asked_.outcomes + int64_t(cycle) * asked_.num_members);
            const bool has_ended = commit(drafted);
            const double ended = now();
            times[0] = started, times[1] = passed - started, times[2] = verifying - passed;
            times[3] = ended - verifying;
            if (has_ended || ended + (ended - started) > limit) return cycle + 1;
        }
        return asked_.max_cycles;
    }

  private:
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    // Whether every member may emit as much as the cycle can yield, and has room for its rows.
    bool fits() const {
        const int64_t most_rows = asked_.features.rows ? asked_.features.num_rows : asked_.store->width;
        for (const ForerunMember& m : members_) {
            if (m.num_left <= m.num_drafted) return false;
            if (m.num_committed + m.num_drafted > most_rows) return false;
            if (m.num_drafted && m.num_committed + asked_.depth > asked_.draft_context) return false;
        }
        return true;
    }

    bool draft(int64_t* drafted) {
        const int num_spans = int(drafting_.size()), depth = asked_.depth;
        if (num_spans == 0) return true;
        begin_pass();
        for (int i : drafting_) {
            const ForerunMember& m = members_[i];
            spans_.push_back({int32_t(m.draft_slot), int32_t(m.num_draft_rows), int32_t(unread_[i].size()), 0});
            tokens_.insert(tokens_.end(), unread_[i].begin(), unread_[i].end());
            wanted_.push_back(int64_t(tokens_.size()) - 1);
        }
        chains_.resize(size_t(num_spans) * depth);
        ForerunPass rows = packed(asked_.num_draft_layers);
        if (asked_.features.projection) {
            if (!add_states()) return false;
            rows.states = states_.data();
        }
        if (!asked_.draft_probs) {
            if (!forerun_decoder_greedy_chain(asked_.draft, &rows, asked_.draft_store, depth, asked_.vocab_size,
                                              chains_.data()))
                return false;
        } else if (!draw_chains(rows)) {
            return false;
        }
        for (int span = 0; span < num_spans; ++span)
            std::copy_n(&chains_[size_t(span) * depth], depth, drafted + int64_t(drafting_[span]) * depth);
        return true;
    }

    bool draw_chains(const ForerunPass& rows) {
        const int num_spans = int(drafting_.size()), depth = asked_.depth;
        std::vector<float> temperatures;
        std::vector<ForerunTruncation> truncations;
        keys_.clear();
        for (int i : drafting_) {
            temperatures.push_back(float(members_[i].draft_temperature));
            truncations.push_back(members_[i].truncation);
        }
        for (int node = 0; node < depth; ++node)
            for (int i : drafting_) {
                const ForerunMember& m = members_[i];
                keys_.push_back(asked_.by_race ? position_key(m.noise_key, m.num_committed + node)
                                               : step_key(m.noise_key, m.num_committed, node, kDraftDraw));
            }
        const Sampling sampling{asked_.vocab_size,   temperatures.data(), truncations.data(), keys_.data(),
                                asked_.by_race != 0, asked_.draft_probs};
        if (!sampled_chain(asked_.draft, rows, *asked_.draft_store, depth, sampling, chains_.data())) return false;
        for (int span = 0; span < num_spans; ++span)
            for (int node = 0; node < members_[drafting_[span]].num_drafted; ++node)
                if (std::isnan(draft_row(span)[node * draft_stride()])) return false;
        return true;
    }

    const float* draft_row(int span) const { return asked_.draft_probs + int64_t(span) * asked_.vocab_size; }
    int64_t draft_stride() const { return int64_t(drafting_.size()) * asked_.vocab_size; }

    // The target over the pending token of every member and its chain.
    bool pass(const int64_t* drafted) {
        begin_pass();
        parents_.clear();
        for (int i = 0; i < asked_.num_members; ++i) {
            const ForerunMember& m = members_[i];
            spans_.push_back({int32_t(m.slot), int32_t(m.num_committed - 1), 1, int32_t(m.num_drafted)});
            tokens_.push_back(unread_[i].back());
            tokens_.insert(tokens_.end(), drafted + int64_t(i) * asked_.depth,
                           drafted + int64_t(i) * asked_.depth + m.num_drafted);
            for (int node = 0; node < m.num_drafted; ++node) parents_.push_back(node - 1);
        }
        for (size_t row = 0; row < tokens_.size(); ++row) wanted_.push_back(int64_t(row));
        ForerunPass rows = packed(asked_.num_layers);
        if (asked_.features.rows) {
            features_.resize(tokens_.size() * asked_.features.row_bytes);
            rows.num_features = int32_t(asked_.features.num_layers);
            rows.feature_layers = asked_.features.layers, rows.features = features_.data();
        }
        return forerun_decoder_forward(asked_.target, &rows, asked_.store, asked_.logits);
    }

    // Copy the features of the pass to the store.
    void keep_features() {
        const ForerunFeatures& kept = asked_.features;
        if (!kept.rows) return;
        const char* rows = features_.data();
        for (const ForerunMember& m : members_) {
            const int64_t first = m.slot * kept.num_rows + m.num_committed - 1;
            const int64_t num_bytes = (1 + m.num_drafted) * kept.row_bytes;
            std::copy_n(rows, num_bytes, static_cast<char*>(kept.rows) + first * kept.row_bytes);
            rows += num_bytes;
        }
    }

    // Compute the states that a head continues from: its row t reads the features of the target's row t.
    bool add_states() {
        const ForerunFeatures& kept = asked_.features;
        states_.resize(tokens_.size() * kept.state_size);
        float* to = states_.data();
        for (int i : drafting_) {
            const int64_t first = members_[i].slot * kept.num_rows + members_[i].num_draft_rows;
            const char* rows = static_cast<const char*>(kept.rows) + first * kept.row_bytes;
            const int64_t num_rows = unread_[i].size();
            if (!forerun_decoder_head(kept.projection, rows, num_rows, to)) return false;
            to += num_rows * kept.state_size;
        }
        return true;
    }

    void begin_pass() { spans_.clear(), tokens_.clear(), wanted_.clear(); }

    ForerunPass packed(int num_layers) const {
        ForerunPass rows{};
        rows.num_spans = int(spans_.size()), rows.num_rows = int(tokens_.size());
        rows.num_wanted = int(wanted_.size()), rows.num_layers = num_layers;
        rows.spans = spans_.data(), rows.parents = parents_.data();
        rows.tokens = tokens_.data(), rows.wanted = wanted_.data();
        return rows;
    }

    bool verify(const int64_t* drafted, double* matches) {
        float* rows = asked_.logits;
        int span = 0;
        for (int i = 0; i < asked_.num_members; ++i, drafted += asked_.depth, matches += asked_.depth) {
            const ForerunMember& m = members_[i];
            const bool is_valid = m.rule == kGreedyRule ? match(m, rows, drafted, outcomes_[i])
                                  : m.rule == kWalkRule ? walk(m, rows, span, drafted, matches, outcomes_[i])
                                                        : judge(m, rows, span, drafted, outcomes_[i]);
            if (!is_valid) return false;
            rows += (m.num_drafted + 1) * int64_t(asked_.vocab_size);
            span += m.num_drafted > 0;
        }
        return true;
    }

    // Accept drafted tokens that have the largest logit.
    bool match(const ForerunMember& m, const float* rows, const int64_t* drafted, ForerunOutcome& outcome) const {
        const int64_t size = asked_.vocab_size;
        for (int64_t node = 0;; ++node, rows += size) {
            const float best = largest_of(rows, size);
            if (!std::isfinite(best)) return false;
            const int64_t token = place_of(best, rows, size);
            if (node < m.num_drafted && drafted[node] == token) continue;
            outcome = {node, token, double(node)};
            return true;
        }
    }

    void to_probs(const ForerunMember& m, float* rows) const {
        for (int64_t row = 0; row <= m.num_drafted; ++row, rows += asked_.vocab_size)
            distribution(rows, asked_.vocab_size, float(m.temperature), &m.truncation, rows);
    }

    // Accept drafted tokens that the target draws at their positions.
    bool walk(const ForerunMember& m, float* rows, int span, const int64_t* drafted, double* matches,
              ForerunOutcome& outcome) const {
        const int64_t size = asked_.vocab_size;
        to_probs(m, rows);
        for (int64_t node = 0; node < m.num_drafted; ++node) {
            const float* row = rows + node * size;
            const float match = m.is_coupled ? float(coupled_match(row, draft_row(span) + node * draft_stride(), size,
                                                                   drafted[node]))
                                             : row[drafted[node]];
            matches[node] = std::isnan(match) ? 0. : double(match);
        }
        for (int64_t node = 0;; ++node) {
            const float* row = rows + node * size;
            if (std::isnan(row[0])) return false;
            const int64_t token = race(row, size, position_key(m.noise_key, m.num_committed + node));
            if (node < m.num_drafted && drafted[node] == token) continue;
            outcome = {node, token, 0.};
            return true;
        }
    }

    // Block or token-level verification.
    bool judge(const ForerunMember& m, float* rows, int span, const int64_t* drafted, ForerunOutcome& outcome) {
        to_probs(m, rows);
        keys_.clear();
        for (int64_t node = 0; node < m.num_drafted; ++node)
            keys_.push_back(step_key(m.noise_key, m.num_committed, node, kAcceptDraw));
        keys_.push_back(step_key(m.noise_key, m.num_committed, 0, kRecoveredDraw));
        keys_.push_back(step_key(m.noise_key, m.num_committed, 0, kBonusDraw));
        const ForerunChain chain{rows, m.num_drafted ? draft_row(span) : nullptr, drafted, keys_.data(),
                                 m.num_drafted, draft_stride()};
        const ForerunVerdict verdict = verify_chain(chain, asked_.vocab_size, m.rule == kBlockRule);
        outcome = {verdict.num_accepted, verdict.final_token, verdict.expected_accepted};
        return verdict.num_accepted < verdict.num_valid;
    }

    // Take over what was accepted; returns whether a member may have ended.
    bool commit(const int64_t* drafted) {
        // How many of the drafted tokens the draft's cache keeps: all but the last; in a store shared with the target
        // all; in a head's none, because it reads them again with the target's features.
        const bool is_shared = asked_.draft_store && asked_.draft_store->data == asked_.store->data;
        const int64_t num_kept = asked_.features.projection ? 0 : is_shared ? asked_.depth : asked_.depth - 1;
        bool has_ended = false;
        for (int i = 0; i < asked_.num_members; ++i, drafted += asked_.depth) {
            ForerunMember& m = members_[i];
            const ForerunOutcome& outcome = outcomes_[i];
            std::vector<int64_t>& unread = unread_[i];
            const auto emit = [&](int64_t token) {
                unread.push_back(token);
                has_ended |= std::find(m.ends, m.ends + m.num_ends, token) != m.ends + m.num_ends;
            };
            const int64_t num_fed = m.num_drafted ? std::min(outcome.num_accepted, num_kept) : 0;
            m.num_draft_rows += m.num_drafted ? int64_t(unread.size()) + num_fed : 0;
            unread.clear();
            for (int64_t node = 0; node < outcome.num_accepted; ++node) emit(drafted[node]);
            emit(outcome.final_token);
            unread.erase(unread.begin(), unread.begin() + num_fed);
            m.num_committed += outcome.num_accepted + 1;
            m.num_left -= outcome.num_accepted + 1;
            has_ended |= m.num_left <= 0;
        }
        return has_ended;
    }

    const ForerunCycles& asked_;
    std::vector<ForerunMember> members_;
    std::vector<std::vector<int64_t>> unread_;  // the last of them is pending in the target
    std::vector<ForerunOutcome> outcomes_;
    std::vector<int> drafting_;
    std::vector<ForerunSpan> spans_;
    std::vector<int32_t> parents_;
    std::vector<int64_t> tokens_, wanted_, chains_, keys_;
    std::vector<float> states_;   // of the rows of a head's pass
    std::vector<char> features_;  // of the rows of the target's last pass
};

}  // namespace forerun
