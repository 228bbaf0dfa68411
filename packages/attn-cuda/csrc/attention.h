// C interface of the products and of fused attention, whose structs are in attn/cuda/interface.h. The conventions are those of attn_cuda.h:
// device pointers, a device, a stream, no allocation, no synchronisation, 0 or a code for attn_cuda_message.
#pragma once

#include "attn/cuda/interface.h"
#include "attn_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

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
