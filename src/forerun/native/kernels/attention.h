// Query heads over the keys of one sequence: scores, softmax, weighted sum of values.
//
// A row sees a prefix of its slot and, in a token tree, some of the rows after it; in a layer with a
// window only the last of these. Rows that share a key/value head are computed together, so that keys
// and values are read once for all of them; yet what a row computes, and in which order, depends on
// nothing but what it sees. What it sees is walked in order and without gaps: the result is the same
// to the bit alone or among others, and whether its ancestors lie among other branches or, after a
// commit, next to each other.
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

constexpr int kTileQueries = kMaxRows;
constexpr int kBlockKeys = kLanes;
constexpr int kGroupBlocks = 4;  // of the prefix, scored for all queries while they are in the cache
constexpr int kMaxHeadDim = 256;

// A slot holds keys in blocks of sixteen, as they are read: word 0 of all of them, then word 1. Returns
// where word 0 of a key lies; its words are kBlockKeys apart. Values lie row after row.
inline size_t key_place(int index, int num_words) {
    return size_t(index / kBlockKeys) * num_words * kBlockKeys + index % kBlockKeys;
}

template <class T>
void put_key(T* keys, int index, const float* key, int dim) {
    char* to = reinterpret_cast<char*>(keys) + key_place(index, dim / kDepth<T>) * 4;
    for (int i = 0; i < dim; i += kLanes) {
        T rounded[kLanes];
        store(rounded, load(key + i));
        for (int j = 0; j < kLanes; j += kDepth<T>, to += kBlockKeys * 4)
            std::memcpy(to, rounded + j, 4);
    }
}

// Scores of some queries over some blocks of keys. A score is one chain of multiply-adds, and chains
// wait for themselves: few queries need several blocks at once to keep the processor busy.
template <class T, int kQueries, int kBlocks>
void score_blocks(const Query<T>* queries, const uint32_t* blocks, int num_words, int place,
                  float scale, float cap) {
    constexpr int kWidth = kBlocks * kParts;
    Sums sums[kQueries][kWidth]{};
    for (int u = 0; u < num_words; ++u) {
        const auto key = [&](int v) {
            const size_t block = size_t(v / kParts) * num_words + u;
            return factors_of(blocks + block * kBlockKeys + v % kParts * kNative, queries[0].head);
        };
        Factors<T> keys[kWidth];
        for (int v = 0; v < kWidth && kQueries > 1; ++v) keys[v] = key(v);
        for (int q = 0; q < kQueries; ++q) {
            const auto query = spread(queries[q].head + size_t(u) * kDepth<T>);
            for (int v = 0; v < kWidth; ++v)
                sums[q][v] = multiply_add(sums[q][v], kQueries > 1 ? keys[v] : key(v), query);
        }
    }
    for (int q = 0; q < kQueries; ++q) {
        float* scores = queries[q].scores + place;
        for (int v = 0; v < kWidth; ++v)
            store_sums(scores + v * kNative, sums[q][v] * all_sums(scale));
        for (int i = 0; cap != 0 && i < kBlocks * kBlockKeys; i += kLanes)
            store(scores + i, capped(load(scores + i), cap));
    }
}

// Adds the sum over `num_keys` keys of weight times value, for some vectors of some queries. Weights
// begin at `place` of the scores.
template <class T, int kQueries, int kWidth>
void weigh(const Query<T>* queries, const T* values, int dim, int place, int num_keys,
           Floats (*result)[kWidth]) {
    constexpr int kSums = kWidth * kParts;
    Sums sums[kQueries][kSums];
    for (int q = 0; q < kQueries; ++q) std::memcpy(sums[q], result[q], sizeof sums[q]);
    for (int k = 0; k < num_keys; ++k) {
        Sums value[kSums];
        for (int v = 0; v < kSums; ++v) value[v] = load_sums(values + size_t(k) * dim + v * kNative);
        for (int q = 0; q < kQueries; ++q) {
            const Sums weight = all_sums(queries[q].scores[place + k]);
            for (int v = 0; v < kSums; ++v) sums[q][v] += weight * value[v];
        }
    }
    for (int q = 0; q < kQueries; ++q) std::memcpy(result[q], sums[q], sizeof sums[q]);
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

// Attention of queries that share a key/value head and a slot. Scores are products of a query and a
// key times `scale`, capped at `cap`.
template <class T>
class Attention {
  public:
    Attention(const T* keys, const T* values, int dim, float scale, float cap)
        : keys_(reinterpret_cast<const uint32_t*>(keys)), values_(values), dim_(dim),
          num_words_(dim / kDepth<T>), scale_(scale), cap_(cap) {}

    void attend(const Query<T>* queries, int num_queries) const {
        int first = queries[0].seen.first, end = 0;
        for (int q = 0; q < num_queries; ++q) {
            first = std::min(first, queries[q].seen.first);
            end = std::max(end, queries[q].seen.end);
        }
        const int first_block = first / kBlockKeys;
        first = first_block * kBlockKeys;  // scores begin with a whole block
        score_range(queries, num_queries, first_block, (end + kBlockKeys - 1) / kBlockKeys);
        for (int q = 0; q < num_queries; ++q)  // what lies in trees, over what was too much
            score_others(queries[q], queries[q].seen.end - first);
        for (int q = 0; q < num_queries; q += kTileQueries)
            mean(queries + q, std::min(kTileQueries, num_queries - q), first);
    }

  private:
    // Keys outside of what a query sees may hold anything; their scores are overwritten or not read.
    void score_range(const Query<T>* queries, int num_queries, int begin, int end) const {
        for (int first = begin; first < end; first += kGroupBlocks) {
            const int num_here = std::min(kGroupBlocks, end - first);
            for (int q = 0; q < num_queries; q += kTileQueries)
                score_group(queries + q, std::min(kTileQueries, num_queries - q),
                            block_at(keys_, first), num_here, (first - begin) * kBlockKeys);
        }
    }

    // Scores of the rows in a tree, stored from `place` on.
    void score_others(const Query<T>& query, int place) const {
        const Seen& seen = query.seen;
        for (int first = 0; first < seen.num_others; first += kBlockKeys) {
            uint32_t block[kMaxHeadDim / kDepth<T> * kBlockKeys];
            std::fill_n(block, num_words_ * kBlockKeys, 0u);
            const int num_keys = std::min(kBlockKeys, seen.num_others - first);
            for (int i = 0; i < num_keys; ++i) {
                const uint32_t* key = keys_ + key_place(seen.others[first + i], num_words_);
                for (int u = 0; u < num_words_ * kBlockKeys; u += kBlockKeys) block[u + i] = key[u];
            }
            score_group(&query, 1, block, 1, place + first);
        }
    }

    void score_group(const Query<T>* queries, int num_queries, const uint32_t* blocks,
                     int num_blocks, int place) const {
        static constexpr decltype(&score_blocks<T, 1, 1>) kOne[] = {
            score_blocks<T, 1, 1>, score_blocks<T, 2, 1>, score_blocks<T, 3, 1>,
            score_blocks<T, 4, 1>, score_blocks<T, 5, 1>, score_blocks<T, 6, 1>};
        static constexpr decltype(&score_blocks<T, 1, 1>) kSeveral[] = {
            score_blocks<T, 1, vectors_beside(1)>, score_blocks<T, 2, vectors_beside(2)>,
            score_blocks<T, 3, vectors_beside(3)>, score_blocks<T, 4, vectors_beside(4)>,
            score_blocks<T, 5, vectors_beside(5)>, score_blocks<T, 6, vectors_beside(6)>};
        const int several = vectors_beside(num_queries);
        for (int b = 0; b < num_blocks;) {
            const bool is_one = b + several > num_blocks;
            (is_one ? kOne : kSeveral)[num_queries - 1](queries, block_at(blocks, b), num_words_,
                                                        place + b * kBlockKeys, scale_, cap_);
            b += is_one ? 1 : several;
        }
    }

    const uint32_t* block_at(const uint32_t* blocks, int index) const {
        return blocks + size_t(index) * num_words_ * kBlockKeys;
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
        const int width = vectors_beside(num_queries);
        for (int v = 0; v < dim_ / kLanes;) {
            const int fits = std::min(width, dim_ / kLanes - v);
            if (fits >= 4) mean_part<4>(queries, num_queries, common, v, totals), v += 4;
            else if (fits >= 2) mean_part<2>(queries, num_queries, common, v, totals), v += 2;
            else mean_part<1>(queries, num_queries, common, v, totals), v += 1;
        }
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

    const uint32_t* const keys_;
    const T* const values_;
    const int dim_, num_words_;
    const float scale_, cap_;
};

}  // namespace forerun
