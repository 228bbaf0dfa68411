// Attention of contract sm90-v1 on compute capability 9.0 as a table of its own. The conventions and the problem are those of interface.h,
// with half q, k, v of equal head_dim 64 or 128 and neither query_mask nor bias. key_mask masks keys where they are, those from the first
// dropped one to the end of the segment of the last one, whatever it says between, in dense calls without causality, window, lengths and
// starts; the values there must be finite. Codes have the text of that table's `message`.
#pragma once

#include "attn/cuda/interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// out is contiguous in the layout and dtype of q, LSE contiguous float32 [B, H, S], packed [H, queries]. Every row is written, those
// outside packed segments too.
typedef struct {
  void* out;
  float* lse;
} attn_cuda_sm90_results;

// `dout` and `out` have the dtype and layout of q, with any strides; lse and dlse are contiguous float32 [B, H, S], packed [H, queries].
// Gradients are written for every pointer that is not null, contiguous in the layout and dtype of q, k and v; dsinks is float32 [H].
typedef struct {
  attn_cuda_array dout, out;
  const float* lse;
  const float* dlse;  // null: zero
  void* dq;
  void* dk;
  void* dv;
  float* dsinks;
} attn_cuda_sm90_gradients;

// `factor` is c of the contract, RN(scale * log2 e) from scale in binary64. Workspace, 16-byte aligned device memory: copies of inputs that
// are not laid out for the copy engine; forward, a counter, or the states of segments of a call with few rows, at most 512 MiB; backward, 8
// bytes for each row. Backward takes at most 2^30 queries.
typedef struct {
  int64_t version;
  // sizeof the structs in the build of the table.
  int64_t attention_bytes, results_bytes, gradients_bytes;
  int (*forward_workspace)(int device, const attn_cuda_attention* problem, int64_t* bytes);
  int (*backward_workspace)(int device, const attn_cuda_attention* problem, const attn_cuda_sm90_gradients* gradients, int64_t* bytes);
  int (*forward)(int device, void* stream, const attn_cuda_attention* problem, float factor, const attn_cuda_sm90_results* results,
                 void* workspace);
  int (*backward)(int device, void* stream, const attn_cuda_attention* problem, float factor, const attn_cuda_sm90_gradients* gradients,
                  void* workspace);
} attn_cuda_sm90_interface;

#define ATTN_CUDA_SM90_INTERFACE_VERSION 1

// Exported by the compiled module of attn-cuda; null in a build without these kernels.
const attn_cuda_sm90_interface* attn_cuda_sm90_interface_v1(void);

#ifdef __cplusplus
}
#endif
