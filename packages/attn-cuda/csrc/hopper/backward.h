// C interface of the backward pass of contract sm90-v1 on compute capability 9.0. The conventions are those of forward.h.
#pragma once

#include "attn/cuda/interface.h"

#ifdef __cplusplus
extern "C" {
#endif

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

// Bytes of workspace, 16-byte aligned device memory: 8 for each row, and copies of inputs that are not laid out for the copy engine. At
// most 2^30 queries.
int attn_cuda_sm90_backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_sm90_gradients* gradients,
                                      int64_t* bytes);

// `factor` is c of the contract, RN(scale * log2 e) from scale in binary64.
int attn_cuda_sm90_backward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                            const attn_cuda_sm90_gradients* gradients, void* workspace);

#ifdef __cplusplus
}
#endif
