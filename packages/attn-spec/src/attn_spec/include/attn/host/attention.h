// Interface of the host (CPU) attention kernels of ordered-v1. Plain structs and pointers: Python bindings and XLA handlers call the same
// functions. Memory: inputs, outputs and O(S + T) scratch a thread. Every thread works in the default floating-point environment and
// restores its own.
#pragma once

#include "attn/host/arrays.h"

namespace attn::host {

// One attention call. Optional pointers are null when absent. Integer arrays are contiguous int64, masks contiguous bytes (0 drops).
struct AttentionProblem {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  DType dtype;  // of q, k, v and of dq, dk, dv
  Input q, k, v;
  const uint8_t* query_mask;    // [B, S]; a dropped query sees no key
  const uint8_t* key_mask;      // [B, T]; dropped keys are compacted away
  const int64_t* kv_lengths;    // [B]
  const int64_t* q_start;       // [B]
  const int64_t* k_start;       // [B]
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
  uint32_t dropout_item, dropout_head;  // batch item and head of the first ones here within a larger call: counters start there
};

// Row results: lse, m and s are contiguous float32 [B, H, S], packed: [H, total].
struct AttentionForward {
  Output out;
  DType out_dtype;
  float* lse;
  float* row_max;
  float* row_sum;
};

// Gradients are written for every non-null pointer. dout has dout_dtype; dlse may be null. dq, dk, dv are contiguous in the layout of q, k,
// v (dense [B, H, S, D], packed [total, H, D]); dsinks [H]; dbias contiguous over its own (broadcast) shape dbias_shape.
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

// Null when the problem can run, else a static message (for example offsets that decrease or leave the packed array).
const char* check_attention(const AttentionProblem& problem);

// The bits depend neither on `threads` nor on `variant`. The problem must pass check_attention. Throws std::bad_alloc; results are then
// undefined.
void attention_forward(const AttentionProblem& problem, const AttentionForward& results, int threads, Variant variant = Variant::automatic);
void attention_backward(const AttentionProblem& problem, const AttentionBackward& gradients, int threads,
                        Variant variant = Variant::automatic);

}  // namespace attn::host
