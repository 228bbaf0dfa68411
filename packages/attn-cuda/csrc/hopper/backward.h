// Backward functions of attn/cuda/sm90_interface.h.
#pragma once

#include "attn/cuda/sm90_interface.h"

#ifdef __cplusplus
extern "C" {
#endif

int attn_cuda_sm90_backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_sm90_gradients* gradients,
                                      int64_t* bytes);
int attn_cuda_sm90_backward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                            const attn_cuda_sm90_gradients* gradients, void* workspace);

#ifdef __cplusplus
}
#endif
