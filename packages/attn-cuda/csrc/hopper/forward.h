// Forward functions of attn/cuda/sm90_interface.h.
#pragma once

#include "attn/cuda/sm90_interface.h"

#ifdef __cplusplus
extern "C" {
#endif

int attn_cuda_sm90_forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes);
int attn_cuda_sm90_forward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                           const attn_cuda_sm90_results* results, void* workspace);

#ifdef __cplusplus
}
#endif
