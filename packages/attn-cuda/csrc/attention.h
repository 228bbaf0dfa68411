// C interface of the products and of fused attention. The conventions are those of attn_cuda.h: device pointers, a device, a stream, no
// allocation, no synchronisation, 0 or a code for attn_cuda_message.
#pragma once

#include "attn_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// An input [B, H, S, D] with strides in elements, any value allowed. Packed input [total, H, D] leaves strides[0] unused.
typedef struct {
  const void* data;
  int32_t dtype;
  int64_t strides[4];
} attn_cuda_array;

// OVER_WIDTH: out [B, H, S, T] = chain over W of left [B, H, S, W] and right [B, K, T, W] (scores; dprobs).
// OVER_KEYS: out [B, H, S, W] = chain over T of left [B, H, S, T] and right [B, K, T, W] (out; dq).
// OVER_QUERIES: out [B, K, T, W] = chain over (head in its group, query) of left [B, H, S, T] and right [B, H, S, W] (dk; dv).
enum attn_cuda_product_kind { ATTN_CUDA_OVER_WIDTH = 0, ATTN_CUDA_OVER_KEYS = 1, ATTN_CUDA_OVER_QUERIES = 2 };

// Every output is RN(chain * scale) by the zero rule. `out` is contiguous. Sizes below 2^31.
typedef struct {
  int32_t kind;
  int64_t batch, heads, kv_heads, queries, keys, width;
  float scale;
  attn_cuda_array left, right;
  void* out;
  int32_t out_dtype;
} attn_cuda_product;

int attn_cuda_product_run(int device, void* stream, const attn_cuda_product* product);

// One attention call without dropout. Optional pointers are null when absent. Dense: q [B, H, S, D], k [B, K, T, D], v [B, K, T, V]. Packed
// (cu_seqlens_q given): q [queries, H, D], k [keys, K, D], v [keys, K, V], and `batch` is the number of segments. Sizes below 2^31 - 1025;
// D, V <= 256.
typedef struct {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  attn_cuda_array q, k, v;      // one dtype
  const uint8_t* query_mask;    // [B, S], 0 drops
  const uint8_t* key_mask;      // [B, T], 0 drops
  const int64_t* kv_lengths;    // [B]
  const int64_t* q_start;       // [B]
  const int64_t* k_start;       // [B]
  const int64_t* cu_seqlens_q;  // [B + 1]
  const int64_t* cu_seqlens_k;  // [B + 1]
  const int64_t* seqlens_q;     // [B]
  const int64_t* seqlens_k;     // [B]
  const float* sinks;           // [H]
  const float* bias;            // [B, H, S, T] by strides, 0 on broadcast axes
  int64_t bias_strides[4];
  int32_t causal;
  int64_t window_left, window_right;  // -1: no bound
  float scale;
} attn_cuda_attention;

// Row results are contiguous float32 [B, H, S], packed [H, queries], and go to the workspace where null; `out` is contiguous in the layout
// of q with V columns.
typedef struct {
  void* out;
  int32_t out_dtype;
  float* lse;
  float* row_max;
  float* row_sum;
} attn_cuda_attention_results;

// Gradients are written for every pointer that is not null. dq, dk, dv have the dtype and layout of q, k, v and are contiguous; dsinks [H];
// dbias is contiguous over its own shape `dbias_shape`, 1 on broadcast axes.
typedef struct {
  attn_cuda_array dout;
  const float* dlse;  // null: zero
  const float* row_max;
  const float* row_sum;
  void* dq;
  void* dk;
  void* dv;
  float* dsinks;
  float* dbias;
  int64_t dbias_shape[4];
} attn_cuda_attention_gradients;

// Bytes of workspace, 16-byte aligned device memory: O(S + T) for each batch item and head, copies of inputs that are not laid out for
// 16-byte accesses, and numbers of pairs of the rows in work: at most 512 MiB, and for dk and dv 64 KiB a resident warp besides.
int attn_cuda_attention_forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes);
int attn_cuda_attention_backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_attention_gradients* gradients,
                                           int64_t* bytes);

int attn_cuda_attention_forward(int device, void* stream, const attn_cuda_attention* problem, const attn_cuda_attention_results* results,
                                void* workspace);
int attn_cuda_attention_backward(int device, void* stream, const attn_cuda_attention* problem,
                                 const attn_cuda_attention_gradients* gradients, void* workspace);

#ifdef __cplusplus
}
#endif
