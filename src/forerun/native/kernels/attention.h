// Query heads over the keys of one sequence: scores, softmax, weighted sum of values.
//
// A row sees a prefix of its slot and, in a token tree, some of the rows after it; in a layer with a
// window only the last of these. Rows that share a
// key/value head are computed together, so that keys and values are read once for all of them; yet
// what a row computes, and in which order, depends on nothing but what it sees. What it sees is
// walked in order and without gaps: the result is the same to the bit alone or among others, and
// whether its ancestors lie among other branches or, after a commit, next to each other.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace forerun {

// Indices [first, end) and then `others`, ascending.
struct Seen {
    int first = 0, end = 0;
    const int* others = nullptr;
    int num_others = 0;

    int size() const { return end - first + num_others; }

    // What is left of a whole prefix and `others` from a position on.
    Seen from(int position) const {
        const int dropped = std::max(0, position - end);
        return {std::min(position, end), end, others + dropped, num_others - dropped};
    }
};

template <class T>
struct Query {
    const T* head;     // [dim], rotated
    Seen seen;
    float* scores;     // scratch for all that queries computed together see, rounded up to blocks
    T* out;            // [dim]
};

constexpr int kTileQueries = 6;
constexpr int kBlockKeys = kLanes;
constexpr int kGroupBlocks = 4;  // with 6 queries: 24 sums, 4 words of keys and a broadcast
constexpr int kMaxHeadDim = 256;

// One word of each of sixteen keys, word after word: what a query's words are multiplied with.
template <class T>
struct KeyBlock {
    Words words[kMaxHeadDim / kDepth<T>];

    // key(i) points to the i-th key of the block; there are `num_keys`, the rest count as zeros.
    template <class Key>
    void gather(Key&& key, int num_keys, int num_words) {
        int first = 0;
        for (; first + kLanes <= num_words; first += kLanes) weave<kLanes>(key, num_keys, first);
        if (first < num_words) weave<kLanes / 2>(key, num_keys, first);
    }

  private:
    // Words [first, first + kCount): heads are whole vectors, so bf16 may leave half a vector.
    template <int kCount, class Key>
    void weave(Key&& key, int num_keys, int first) {
        Words rows[kLanes]{};
        for (int i = 0; i < num_keys; ++i)
            std::memcpy(&rows[i], key(i) + size_t(first) * kDepth<T>, kCount * 4);
        transpose(rows);
        for (int u = 0; u < kCount; ++u) words[first + u] = rows[u];
    }
};

// Scores of some queries over some blocks of keys. A score is one chain of multiply-adds, and chains
// wait for themselves: few queries need several blocks at once to keep the processor busy.
template <class T, int kQueries, int kBlocks>
void score_blocks(const Query<T>* queries, const KeyBlock<T>* blocks, int num_words, int place,
                  float scale, float cap) {
    Floats sums[kBlocks][kQueries]{};
    for (int u = 0; u < num_words; ++u) {
        Words keys[kBlocks];
        for (int b = 0; b < kBlocks; ++b) {
            keys[b] = blocks[b].words[u];
            keep_in_register(keys[b]);
        }
        for (int q = 0; q < kQueries; ++q) {
            uint32_t word;
            std::memcpy(&word, queries[q].head + size_t(u) * kDepth<T>, 4);
            for (int b = 0; b < kBlocks; ++b)
                sums[b][q] = multiply_add(sums[b][q], keys[b], word, queries[q].head);
        }
    }
    for (int b = 0; b < kBlocks; ++b)
        for (int q = 0; q < kQueries; ++q)
            store(queries[q].scores + place + b * kBlockKeys, capped(sums[b][q] * splat(scale), cap));
}

// Adds the sum over `num_keys` keys of weight times value, for some vectors of some queries. Weights
// begin at `place` of the scores.
template <class T, int kQueries, int kWidth>
void weigh(const Query<T>* queries, const T* values, int dim, int place, int num_keys,
           Floats (*result)[kWidth]) {
    Floats sums[kQueries][kWidth];
    for (int q = 0; q < kQueries; ++q)
        for (int v = 0; v < kWidth; ++v) sums[q][v] = result[q][v];
    for (int k = 0; k < num_keys; ++k) {
        Floats value[kWidth];
        for (int v = 0; v < kWidth; ++v) value[v] = load(values + size_t(k) * dim + v * kLanes);
        for (int q = 0; q < kQueries; ++q) {
            const Floats weight = splat(queries[q].scores[place + k]);
            for (int v = 0; v < kWidth; ++v) sums[q][v] += weight * value[v];
        }
    }
    for (int q = 0; q < kQueries; ++q)
        for (int v = 0; v < kWidth; ++v) result[q][v] = sums[q][v];
}

// Scores to weights; returns their total. Lanes past the last score become 0.
inline float softmax(float* scores, int num_scores) {
    const int padded = (num_scores + kLanes - 1) / kLanes * kLanes;
    for (int i = num_scores; i < padded; ++i) scores[i] = -INFINITY;
    Floats most = load(scores);
    for (int i = kLanes; i < padded; i += kLanes) most = larger(most, load(scores + i));
    const Floats shift = splat(largest(most));
    Floats total{};
    for (int i = 0; i < padded; i += kLanes) {
        const Floats weights = exponential(load(scores + i) - shift);
        store(scores + i, weights);
        total += weights;
    }
    return sum(total);
}

// Attention of queries that share a key/value head and a slot. Rows of keys and values lie `dim`
// values apart. Scores are products of a query and a key times `scale`, capped at `cap`.
template <class T>
class Attention {
  public:
    Attention(const T* keys, const T* values, int dim, float scale, float cap)
        : keys_(keys), values_(values), dim_(dim), num_words_(dim / kDepth<T>), scale_(scale),
          cap_(cap) {}

    void attend(const Query<T>* queries, int num_queries) const {
        int first = queries[0].seen.first, end = 0;
        for (int q = 0; q < num_queries; ++q) {
            first = std::min(first, queries[q].seen.first);
            end = std::max(end, queries[q].seen.end);
        }
        score(queries, num_queries, end - first, 0, [&](int key) { return first + key; });
        for (int q = 0; q < num_queries; ++q) {  // what lies in trees, over what was too much
            const Seen& seen = queries[q].seen;
            score(queries + q, 1, seen.num_others, seen.end - first,
                  [&](int key) { return seen.others[key]; });
        }
        for (int q = 0; q < num_queries; q += kTileQueries)
            mean(queries + q, std::min(kTileQueries, num_queries - q), first);
    }

  private:
    // Scores of keys index(0), ..., stored from `place` on.
    template <class Index>
    void score(const Query<T>* queries, int num_queries, int num_keys, int place,
               Index&& index) const {
        KeyBlock<T> blocks[kGroupBlocks];
        for (int first = 0; first < num_keys; first += kGroupBlocks * kBlockKeys) {
            int num_blocks = 0;
            for (; num_blocks < kGroupBlocks; ++num_blocks) {
                const int begin = first + num_blocks * kBlockKeys;
                if (begin >= num_keys) break;
                blocks[num_blocks].gather(
                    [&](int i) { return keys_ + size_t(index(begin + i)) * dim_; },
                    std::min(kBlockKeys, num_keys - begin), num_words_);
            }
            for (int q = 0; q < num_queries; q += kTileQueries)
                score_group(queries + q, std::min(kTileQueries, num_queries - q), blocks,
                            num_blocks, place + first);
        }
    }

    void score_group(const Query<T>* queries, int num_queries, const KeyBlock<T>* blocks,
                     int num_blocks, int place) const {
        static constexpr decltype(&score_blocks<T, 1, 1>) kOne[kTileQueries] = {
            score_blocks<T, 1, 1>, score_blocks<T, 2, 1>, score_blocks<T, 3, 1>,
            score_blocks<T, 4, 1>, score_blocks<T, 5, 1>, score_blocks<T, 6, 1>};
        static constexpr decltype(&score_blocks<T, 1, 1>) kGroup[kTileQueries] = {
            score_blocks<T, 1, kGroupBlocks>, score_blocks<T, 2, kGroupBlocks>,
            score_blocks<T, 3, kGroupBlocks>, score_blocks<T, 4, kGroupBlocks>,
            score_blocks<T, 5, kGroupBlocks>, score_blocks<T, 6, kGroupBlocks>};
        if (num_blocks == kGroupBlocks) {
            kGroup[num_queries - 1](queries, blocks, num_words_, place, scale_, cap_);
            return;
        }
        for (int b = 0; b < num_blocks; ++b)
            kOne[num_queries - 1](queries, blocks + b, num_words_, place + b * kBlockKeys, scale_,
                                  cap_);
    }

    // Keys [begin, end) that all of some queries see; scores begin with the key `first`.
    struct Common {
        int first, begin, end;
    };

    void mean(const Query<T>* queries, int num_queries, int first) const {
        float totals[kTileQueries];
        Common common{first, first, queries[0].seen.end};
        for (int q = 0; q < num_queries; ++q) {
            const Seen& seen = queries[q].seen;
            totals[q] = softmax(queries[q].scores + seen.first - first, seen.size());
            common.begin = std::max(common.begin, seen.first);
            common.end = std::min(common.end, seen.end);
        }
        int v = 0;
        for (; v + 4 <= dim_ / kLanes; v += 4) mean_part<4>(queries, num_queries, common, v, totals);
        for (; v < dim_ / kLanes; ++v) mean_part<1>(queries, num_queries, common, v, totals);
    }

    // Vectors [vector, vector + kWidth) of the means: of every query the keys before those that all
    // see, these, and its rest. Keys a query does not see are not even multiplied by 0: they may hold
    // anything.
    template <int kWidth>
    void mean_part(const Query<T>* queries, int num_queries, const Common& common, int vector,
                   const float* totals) const {
        static constexpr decltype(&weigh<T, 1, kWidth>) kTiles[kTileQueries] = {
            weigh<T, 1, kWidth>, weigh<T, 2, kWidth>, weigh<T, 3, kWidth>,
            weigh<T, 4, kWidth>, weigh<T, 5, kWidth>, weigh<T, 6, kWidth>};
        Floats sums[kTileQueries][kWidth]{};
        const T* values = values_ + vector * kLanes;
        const auto add = [&](int q, int key, int place) {
            const Floats weight = splat(queries[q].scores[place]);
            for (int v = 0; v < kWidth; ++v)
                sums[q][v] += weight * load(values + size_t(key) * dim_ + v * kLanes);
        };
        const bool has_common = common.begin < common.end;
        if (has_common) {
            for (int q = 0; q < num_queries; ++q)
                for (int key = queries[q].seen.first; key < common.begin; ++key)
                    add(q, key, key - common.first);
            kTiles[num_queries - 1](queries, values + size_t(common.begin) * dim_, dim_,
                                    common.begin - common.first, common.end - common.begin, sums);
        }
        for (int q = 0; q < num_queries; ++q) {
            const Seen& seen = queries[q].seen;
            for (int key = has_common ? common.end : seen.first; key < seen.end; ++key)
                add(q, key, key - common.first);
            for (int i = 0; i < seen.num_others; ++i)
                add(q, seen.others[i], seen.end - common.first + i);
            const Floats inverse = splat(1.f / totals[q]);
            for (int v = 0; v < kWidth; ++v)
                store(queries[q].out + (vector + v) * kLanes, sums[q][v] * inverse);
        }
    }

    const T* const keys_;
    const T* const values_;
    const int dim_, num_words_;
    const float scale_, cap_;
};

}  // namespace forerun
