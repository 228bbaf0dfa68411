// C interface of contract sm90-v1 on compute capability 9.0. The conventions and the problem are those of attn/cuda/interface.h, with half
// q, k, v of equal head_dim 64 or 128 and neither masks nor bias; `scale` is RN(scale), and `factor` is RN(scale * log2 e) of the scale in
// binary64. The host must have refused what the contract lacks.
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

// Gradients are written for every pointer that is not null, contiguous in the layout and dtype of q, k and v; dsinks is float32 [H]. `dout`
// and `out` have the layout and dtype of q, any strides; `dlse` is null for zero.
typedef struct {
  attn_cuda_array dout, out;
  const float* lse;
  const float* dlse;
  void* dq;
  void* dk;
  void* dv;
  float* dsinks;
} attn_cuda_sm90_gradients;

// Bytes of workspace, 16-byte aligned device memory.
int attn_cuda_sm90_forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes);
int attn_cuda_sm90_backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_sm90_gradients* gradients,
                                      int64_t* bytes);

int attn_cuda_sm90_forward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                           const attn_cuda_sm90_results* results, void* workspace);
int attn_cuda_sm90_backward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                            const attn_cuda_sm90_gradients* gradients, void* workspace);

#ifdef __cplusplus
}
#endif
