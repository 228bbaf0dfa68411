// Fused attention of attn-cuda as a versioned table of C functions, for callers that must not load torch or Python bindings.
//
// All pointers are device pointers unless said otherwise. Every function runs on `device` and enqueues on `stream` (a cudaStream_t),
// allocates nothing, does not synchronise, restores the current device and can be captured in a CUDA graph. Each returns 0 or a code for
// `message`; nothing is written when arguments are refused.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum attn_cuda_dtype { ATTN_CUDA_FLOAT32 = 0, ATTN_CUDA_BFLOAT16 = 1, ATTN_CUDA_FLOAT16 = 2 };

// Refusals; positive codes are cudaError_t.
enum attn_cuda_refusal { ATTN_CUDA_BAD_DTYPE = -1, ATTN_CUDA_BAD_SIZE = -2, ATTN_CUDA_NULL_POINTER = -3 };

// An input [B, H, S, D] with strides in elements, any value allowed. Packed input [total, H, D] leaves strides[0] unused.
typedef struct {
  const void* data;
  int32_t dtype;
  int64_t strides[4];
} attn_cuda_array;

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

// Version 1. A member is never moved or changed; a new one gets a new version and a new symbol.
typedef struct {
  int64_t version;
  // sizeof the structs of this header in the build of the table.
  int64_t attention_bytes, results_bytes, gradients_bytes;
  const char* (*fingerprint)(void);
  const char* (*architectures)(void);
  const char* (*message)(int code);
  // One bit in `failed` (host) for each result that is not IEEE on the device, in the order of `probe_names`; waits for the device.
  int (*probe)(int device, uint32_t* failed);
  const char* (*probe_names)(void);
  // Bytes of workspace (host), 16-byte aligned device memory. Only which pointers are null and how they are aligned is read of them.
  int (*forward_workspace)(int device, const attn_cuda_attention* problem, int64_t* bytes);
  int (*backward_workspace)(int device, const attn_cuda_attention* problem, const attn_cuda_attention_gradients* gradients, int64_t* bytes);
  int (*forward)(int device, void* stream, const attn_cuda_attention* problem, const attn_cuda_attention_results* results, void* workspace);
  int (*backward)(int device, void* stream, const attn_cuda_attention* problem, const attn_cuda_attention_gradients* gradients,
                  void* workspace);
} attn_cuda_interface;

#define ATTN_CUDA_INTERFACE_VERSION 1

// Exported by the compiled module of attn-cuda; the table is constant and lives as long as the module.
const attn_cuda_interface* attn_cuda_interface_v1(void);

#ifdef __cplusplus
}
#endif
