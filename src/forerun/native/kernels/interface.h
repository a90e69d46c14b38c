// What Python sees of the kernels: plain structures and functions, called through ctypes.
// native/library.py declares the same; `forerun_interface` lets it check the sizes.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Sizes and constants; see models/decoder.py.
struct ForerunSizes {
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    int32_t vocab_size, tied;
    float norm_eps, rope_scale;
    const float* inv_freq;  // [head_dim / 2]; copied
};

enum ForerunElement { kFp32 = 0, kBf16 = 1 };

enum ForerunVector { kInputNorm, kPostNorm, kQueryNorm, kKeyNorm, kQkvBias, kLastNorm };

enum ForerunMatrix { kQkv, kOutput, kGateUp, kDown, kHead, kEmbedding };

struct ForerunSpan {
    int32_t slot, start, num_chain, num_tree;
};

// One packed pass, see models/base.py; everything is read only.
struct ForerunPass {
    int32_t num_spans, num_rows, num_wanted;
    int32_t num_layers;  // the first so many; then the last norm and the head
    const ForerunSpan* spans;
    const int32_t* parents;  // of all trees, one after another
    const int64_t* tokens;   // [num_rows]
    const int64_t* wanted;   // [num_wanted] rows whose logits are asked for
};

// Keys of layer l at 2l, values at 2l + 1: [2 num_layers][num_slots][num_kv_heads][width][head_dim].
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

// Weights are copied; layer is ignored for those after the last layer.
void forerun_decoder_put_vector(void* decoder, int32_t kind, int32_t layer, const float* from);
void forerun_decoder_put_matrix(void* decoder, int32_t kind, int32_t layer, const void* from);

// Logits [num_wanted][vocab_size] of one pass; false when memory is short.
bool forerun_decoder_forward(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                             float* logits);

// The pass, then num_tokens - 1 more of one row per span, each fed the best token of the one before
// among the first vocab_size. `wanted` holds the last row of every span. drafted: [num_spans]
// [num_tokens].
bool forerun_decoder_greedy_chain(void* decoder, const ForerunPass* pass, const ForerunStore* store,
                                  int32_t num_tokens, int32_t vocab_size, int64_t* drafted);

}
