// What Python sees of the kernels: plain structures and functions, called through ctypes.
// native/library.py declares the same; `forerun_interface` lets it check the sizes.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// What differs between the layers of a decoder.
struct ForerunLayer {
    int32_t window;  // positions that a row sees, its own included; 0: all
    int32_t rope;    // which rotation turns queries and keys; -1: none
    int32_t has_experts;  // in place of one feed-forward
    int32_t block;        // ForerunBlock
};

// Whether the rows of a span are a block, whose windows count from its first row, and whether each sees
// all of it or no later rows.
enum ForerunBlock { kNoBlock, kCausalBlock, kWholeBlock };

// Sizes and constants; see models/decoder.py.
struct ForerunSizes {
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    int32_t vocab_size, tied;
    int32_t whole_qk_norm;  // queries and keys are normed as one vector each, not head by head
    int32_t interleaved;    // rotated pairs are (2i, 2i + 1), not (i, i + num_pairs)
    int32_t gelu;           // the gate is a GELU by tanh, not a SiLU
    int32_t num_ropes, num_pairs;  // num_pairs: of a head that are rotated
    // Of layers with experts: how many there are, how many each row uses, their width, and whether the
    // weights of those used are scaled to sum to 1.
    int32_t num_experts, experts_per_row, expert_size, normalise_experts;
    float norm_eps;
    // Factors on embeddings, on what is added to the residual stream, and on products of queries and
    // keys; what logits are divided by; then caps of scores and logits, 0 for none.
    float embedding_scale, residual_scale, score_scale, logit_divisor, score_cap, logit_cap;
    const float* inv_freq;     // [num_ropes][num_pairs]; copied
    const float* rope_scales;  // [num_ropes]; copied
    const ForerunLayer* layers;  // [num_layers]; copied
    // An EAGLE-3 head: the input of the layer is [normed embedding; normed state]. The residual carries
    // the state, normed or not, and what leaves the layer, normed or not, is the state of the next row.
    int32_t is_attached, norm_before_residual, norm_output;
    int32_t borrows_embedding;  // of another decoder, see forerun_decoder_requantised
    // ForerunFormat of the matrices of every layer, as ForerunMatrix counts them, and of the head:
    // [4 * num_layers + 1]; null: all kElement. Not read after the decoder is made.
    const int32_t* formats;
};

// How a matrix is stored: in the element type, or in fewer bits with a scale per group of inputs, and
// in some formats a minimum that is added.
enum ForerunFormat {
    kElement, kInt8Groups32, kInt8Groups64, kInt4Groups32, kInt4Groups64, kInt8Groups16, kInt8Minima16,
    kInt8Minima32, kInt4Minima32
};

enum ForerunElement { kFp32 = 0, kBf16 = 1 };

// The norms of a layer stand before attention and feed-forward (kInputNorm, kPostNorm) and on what they
// give back; those that are not put are left out.
enum ForerunVector {
    kInputNorm, kPostNorm, kQueryNorm, kKeyNorm, kQkvBias, kLastNorm, kHiddenNorm, kAttentionNorm,
    kFeedForwardNorm
};

enum ForerunMatrix { kQkv, kOutput, kGateUp, kDown, kHead, kEmbedding, kRouter };

struct ForerunSpan {
    int32_t slot, start, num_chain, num_tree;
};

// One packed pass, see models/base.py; everything is read only.
struct ForerunPass {
    int32_t num_spans, num_rows, num_wanted;
    int32_t num_layers;  // the first so many; then the last norm and the head
    int32_t num_features;
    int32_t is_context;  // only keys and values are computed, of the normed states for every layer
    const ForerunSpan* spans;
    const int32_t* parents;  // of all trees, one after another
    const int64_t* tokens;   // [num_rows]
    const int64_t* wanted;   // [num_wanted] rows whose logits are asked for
    const int32_t* feature_layers;  // [num_features], each from 0 to num_layers
    // [num_rows][num_features][hidden_size] in the element type: the residual stream entering these
    // layers (num_layers: what leaves the last one, before the last norm).
    void* features;
    const float* states;  // [num_rows][hidden_size], of an attached head; else in place of embeddings or null
    float* fed_back;  // [num_wanted][hidden_size], states of the rows behind those wanted, or null
};

// Keys of layer l at 2l, values at 2l + 1: [2 num_layers][num_slots][num_kv_heads][width][head_dim], where
// keys lie in blocks of 16 rows, [width / 16][words of a head][16], and a word has four bytes.
struct ForerunStore {
    void* data;
    int64_t num_slots, width;
};

size_t forerun_interface();
void* forerun_crew_new(int32_t num_threads);

// Null when a size is not supported or memory is short.
void* forerun_decoder_new(void* crew, int32_t element, const ForerunSizes* sizes);
void forerun_decoder_delete(void* decoder);
size_t forerun_decoder_bytes(const void* decoder);
// Those that a pass of one row through the first num_layers and the head reads.
size_t forerun_decoder_bytes_read(const void* decoder, int32_t num_layers);

// Weights are copied; layer is ignored for those after the last layer. kGateUp and kDown are those of
// `expert` where it is not -1.
void forerun_decoder_put_vector(void* decoder, int32_t kind, int32_t layer, const float* from);
void forerun_decoder_put_matrix(void* decoder, int32_t kind, int32_t layer, int32_t expert,
                                const void* from);

// The same for a matrix in a format of groups, already quantised: values [outputs][inputs] (-128 to
// 127, or -8 to 7; with minima of 4 bits 0 to 15), fp16 scales [outputs][inputs / group], and minima
// like the scales or null. False: the format or the inputs do not allow it.
bool forerun_decoder_put_quantised(void* decoder, int32_t kind, int32_t layer, int32_t expert,
                                   const int8_t* values, const uint16_t* scales, const uint16_t* minima);

// A decoder of the same weights in other formats, all of groups, [4 * num_layers + 1]. It reads the
// embedding of the first, which must outlive it. Null when memory is short.
void* forerun_decoder_requantised(const void* decoder, const int32_t* formats);

// Let an attached head use the embedding of a decoder of the same width and element type, which must
// outlive it, and give its tokens [vocab_size] the ids of that decoder.
void forerun_decoder_attach(void* decoder, const void* target, const int64_t* target_ids);

// Embeddings [num_rows][hidden_size] of tokens, in the element type.
void forerun_decoder_embed(const void* decoder, const int64_t* tokens, int64_t num_rows, void* to);

// Logits [num_rows][vocab_size] of normed rows [num_rows][hidden_size] in the element type; false
// when memory is short.
bool forerun_decoder_head(void* decoder, const void* hidden, int64_t num_rows, float* logits);

// Logits [num_wanted][vocab_size] of one pass; false when memory is short.
bool forerun_decoder_forward(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                             float* logits);

// The pass, then num_tokens - 1 more of one row per span, each fed the best token of the one before
// among the first vocab_size. `wanted` holds the last row of every span. drafted: [num_spans]
// [num_tokens].
bool forerun_decoder_greedy_chain(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                  int32_t num_tokens, int32_t vocab_size, int64_t* drafted);

// The same with every token drawn from the softmax of its row at the temperature of its span (0 is
// greedy), with the noise of keys [num_tokens][num_spans]: as forerun_race where by_race, else as
// forerun_draw. The distributions go to probs [num_tokens][num_spans][vocab_size], 0 past the model's own
// vocabulary.
bool forerun_decoder_sampled_chain(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                   int32_t num_tokens, int32_t vocab_size,
                                   const float* temperatures, const int64_t* keys, int32_t by_race,
                                   float* probs, int64_t* drafted);

// A node of a draft tree: its parent (-1: the root), its row in the last pass over its tree, the root's being
// before row 0 (-1: none), and the log-probability of its path.
struct ForerunTreeNode {
    int64_t token, parent, row;
    double log_prob;
};

// The pass, then one more per level of trees of the most probable paths, which feed the last row of every span
// once more and the nodes behind it that may have children. shapes: [num_spans][3], the most nodes, levels and
// children of a node. nodes: [num_spans][most_nodes], of which every tree has num_nodes [num_spans].
bool forerun_decoder_likely_trees(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                  int32_t vocab_size, const int32_t* shapes, const float* temperatures,
                                  int32_t most_nodes, ForerunTreeNode* nodes, int64_t* num_nodes);

// ---------------------------------------------------------------------------------------- sampling
// Rows are contiguous, [num_rows][vocab_size]; see forerun/sampling for what each is.

// The largest score of every row and its token, the lowest id on ties; NaN where there is one.
void forerun_largest(const float* scores, int64_t num_rows, int64_t vocab_size, float* best,
                     int64_t* tokens);

// Truncation of a distribution: min_p, top_k (a whole number) and 1 - top_p, each 0 for none.
struct ForerunTruncation {
    float min_p, top_k, excluded_mass;
};

// Computes the distribution of every row at its temperature (0 is greedy) and truncation (null if no row has one).
// Returns false if memory cannot be allocated.
bool forerun_softmax(const float* scores, int64_t num_rows, int64_t vocab_size,
                     const float* temperatures, const ForerunTruncation* truncations, float* probs);

// Inverse-CDF draws from unnormalised weights; uniforms in [0, 1).
void forerun_draw(const float* weights, int64_t num_rows, int64_t vocab_size,
                  const double* uniforms, int64_t* tokens);

// Draws of num_siblings tokens from every row without replacement, in order, and the weight of each when it was
// drawn; uniforms: [num_rows][num_siblings]; rows are written to and restored.
void forerun_draw_siblings(float* weights, int64_t num_rows, int64_t vocab_size, int64_t num_siblings,
                           const double* uniforms, int64_t* tokens, float* chances);

// Draws by the clocks of a key.
void forerun_race(const float* probs, int64_t num_rows, int64_t vocab_size, const int64_t* keys,
                  int64_t* tokens);

// Probability that the target's race has the winner of the draft's, for every row and winner; rows
// of the draft are draft_stride apart.
void forerun_coupled_match(const float* target, const float* draft, int64_t num_rows,
                           int64_t vocab_size, int64_t draft_stride, const int64_t* tokens,
                           float* probs);

// A sampled chain: num_drafted + 1 rows of the target, num_drafted of the draft, as many tokens, and
// one key per node, then RECOVERED and BONUS. Rows of the draft are draft_stride apart.
struct ForerunChain {
    const float *target, *draft;
    const int64_t *tokens, *keys;
    int64_t num_drafted, draft_stride;
};

// num_valid: rows of the target before the first that is NaN; where all of them are accepted
// there is no final token.
struct ForerunVerdict {
    int64_t num_accepted, final_token, num_valid;
    double expected_accepted;
};

void forerun_verify_chains(const ForerunChain* chains, int64_t num_chains, int64_t vocab_size,
                           int32_t is_block, ForerunVerdict* verdicts);

// The probability stage of the same in fp64, for the enumeration: chains padded to num_nodes, target
// [num_chains][num_nodes + 1][vocab_size], draft one row less. Gives acceptance probabilities
// [num_chains][num_nodes], and weights of the final token [num_chains][vocab_size].
struct ForerunChainProbs {
    int64_t num_chains, num_nodes, vocab_size, is_block;
    const double *target, *draft;
    const int64_t *tokens, *num_drafted;
};

void forerun_chain_accept(const ForerunChainProbs* given, double* accept_probs);
void forerun_chain_weights(const ForerunChainProbs* given, const int64_t* num_accepted, double* weights);

// A tree of drawn nodes: num_nodes + 1 rows of the target, a token and a parent (-1: the root) per node, per
// row of the target the row of the draft that its children were drawn from (-1 without children), one key
// per node, then one per row.
struct ForerunTree {
    const float *target, *draft;
    const int64_t *tokens, *keys, *parents, *draft_rows;
    int64_t num_nodes;
};

// last: the last accepted node, -1 for none; is_valid: no row from the root to it is NaN.
struct ForerunTreeVerdict {
    int64_t last, final_token, is_valid;
    double expected_accepted;
};

void forerun_verify_trees(const ForerunTree* trees, int64_t num_trees, int64_t vocab_size,
                          ForerunTreeVerdict* verdicts);

// The probability stage of the same in fp64, for the enumeration: trees of one topology, target
// [num_trees][num_nodes + 1][vocab_size], draft [num_trees][num_parents][vocab_size]. Gives acceptance
// probabilities [num_trees][num_nodes], and weights of the final token behind every row.
struct ForerunTreeProbs {
    int64_t num_trees, num_nodes, num_parents, vocab_size;
    const double *target, *draft;
    const int64_t *tokens, *parents, *draft_rows;
};

void forerun_tree_weights(const ForerunTreeProbs* given, double* accept, double* weights);

// ------------------------------------------------------------------------------------------ cycles

// How a member is verified: by the argmax, by the target's own draws, or as forerun_verify_chains does.
enum ForerunRule { kGreedyRule, kWalkRule, kBlockRule, kTokenRule };

// A sequence of forerun_cycles: what is committed of it, and how it goes on.
struct ForerunMember {
    int64_t noise_key, num_committed;  // the last committed token has no row in the target's slot
    int64_t num_left;                  // tokens that it may still emit
    int64_t slot, draft_slot, num_draft_rows;
    int64_t num_unread;   // committed tokens without a row in the draft's slot; 1 where nothing is drafted
    int64_t num_drafted;  // per cycle; 0: decoded plainly
    int64_t rule, is_coupled;  // coupled: drafted with the target's noise
    const int64_t* ends;  // [num_ends] tokens that may end it
    int64_t num_ends;
    double temperature, draft_temperature;
    ForerunTruncation truncation;  // of both distributions
    float unused;
};

// final_token follows the accepted ones. Of kWalkRule the expected number follows from the matches.
struct ForerunOutcome {
    int64_t num_accepted, final_token;
    double expected_accepted;
};

// What the target's store keeps of its residual stream, and how an attached head continues from it.
struct ForerunFeatures {
    void* rows;  // [num_slots][num_rows][num_layers][hidden_size] in the element type; null: none are kept
    int64_t num_rows, row_bytes;
    const int32_t* layers;
    int64_t num_layers;
    // A decoder whose output matrix maps a row to the head's input state of state_size; null: the draft model is no
    // attached head.
    void* projection;
    int64_t state_size;
};

struct ForerunCycles {
    void *target, *draft;
    const ForerunStore *store, *draft_store;
    ForerunFeatures features;
    const ForerunMember* members;
    const int64_t* unread;  // of all members, one after another
    float* logits;       // room for [rows of a cycle][vocab_size]
    float* draft_probs;  // room for [depth][num_members][vocab_size]; null: drafts are greedy
    int64_t* drafted;          // [max_cycles][num_members][depth]
    double* matches;           // likewise: probabilities that nodes match the target's draws
    ForerunOutcome* outcomes;  // [max_cycles][num_members]
    double* times;  // [max_cycles][4] seconds: when it began, of drafting, of the pass, of the rest
    double budget_s;
    int32_t num_layers, num_draft_layers, vocab_size, draft_context;
    int32_t num_members, max_cycles;
    int32_t depth;  // the most tokens that a member drafts
    int32_t by_race;
};

// Runs up to max_cycles cycles and returns how many. It ends after one in which a member may have ended,
// before one that might not end within the budget, and before one with less room than it needs or without
// valid distributions.
int32_t forerun_cycles(const ForerunCycles* asked);

}
