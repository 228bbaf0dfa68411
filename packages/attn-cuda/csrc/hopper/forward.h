// C interface of the forward pass of contract sm90-v1 on compute capability 9.0. The conventions and the problem are those of
// attn/cuda/interface.h, with half q, k, v of equal head_dim 64 or 128 and neither masks nor bias.
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

// Bytes of workspace, 16-byte aligned device memory: copies of inputs that are not laid out for the copy engine, and the states of segments
// of a call with few rows, at most 512 MiB.
int attn_cuda_sm90_forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes);

// `factor` is c of the contract, RN(scale * log2 e) from scale in binary64.
int attn_cuda_sm90_forward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                           const attn_cuda_sm90_results* results, void* workspace);

#ifdef __cplusplus
}
#endif
