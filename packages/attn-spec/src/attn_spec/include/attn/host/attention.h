// Interface of the host (CPU) kernels of ordered-v1. Plain structs and pointers: Python bindings and XLA handlers call the same functions.
// Memory: inputs, outputs and O(T) scratch a thread. Every worker thread clears FTZ/DAZ for itself and restores it.
#pragma once

#include <cstdint>

namespace attn::host {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// Element strides of [B, H, S, D] (packed input: stride[0] is unused). Any value is allowed, 0 and negative included.
struct Strides {
  int64_t batch, head, row, column;
};

struct Input {
  const void* data;
  Strides strides;
};

struct Output {
  void* data;
  Strides strides;
};

// One attention call. Optional pointers are null when absent. Integer arrays are contiguous int64, masks contiguous bytes (0 drops).
struct AttentionProblem {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  DType dtype;  // of q, k, v, dout and of dq, dk, dv
  Input q, k, v;
  const uint8_t* query_mask;  // [B, S]; a dropped query sees no key
  const uint8_t* key_mask;    // [B, T]; dropped keys are compacted away
  const int64_t* kv_lengths;  // [B]
  const int64_t* q_start;     // [B]
  const int64_t* k_start;     // [B]
  const int64_t* cu_seqlens_q;  // [batch + 1]: packed input; queries and keys are then packed totals
  const int64_t* cu_seqlens_k;
  const int64_t* seqlens_q;  // [batch]: used lengths of packed segments
  const int64_t* seqlens_k;
  const float* sinks;  // [H]
  const float* bias;   // element strides over [B, H, S, T], 0 on broadcast axes
  Strides bias_strides;
  bool causal;
  int64_t window_left, window_right;  // -1: no bound
  float scale;
  double dropout_p;
  uint64_t dropout_seed;
};

// Row results: lse, m and s are contiguous float32 [B, H, S], packed: [H, total].
struct AttentionForward {
  Output out;
  DType out_dtype;
  float* lse;
  float* row_max;
  float* row_sum;
};

// Gradients are written for every non-null pointer. dout has dout_dtype; dlse may be null. dq, dk, dv are contiguous in the layout of q, k, v
// (dense [B, H, S, D], packed [total, H, D]); dsinks [H]; dbias contiguous over its own (broadcast) shape dbias_shape.
struct AttentionBackward {
  Input dout;
  DType dout_dtype;
  const float* dlse;
  const float* row_max;
  const float* row_sum;
  void* dq;
  void* dk;
  void* dv;
  float* dsinks;
  float* dbias;
  int64_t dbias_shape[4];
};

// Return null on success or a static message when the problem is out of range (for example offsets that decrease or leave the packed array).
const char* check_attention(const AttentionProblem& problem);

void attention_forward(const AttentionProblem& problem, const AttentionForward& results, int threads);
void attention_backward(const AttentionProblem& problem, const AttentionBackward& gradients, int threads);

}  // namespace attn::host
