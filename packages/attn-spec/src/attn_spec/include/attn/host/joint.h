// Interface of the host (CPU) kernels of the joint operators of ordered-v1 and ordered-v2: the softmax rows and the three products behind
// qk and av.
#pragma once

#include "attn/host/arrays.h"

namespace attn::host {

// Softmax over the last axis of scores [B, H, S, T].
struct SoftmaxProblem {
  int64_t batch, heads, queries, keys;
  DType dtype;  // of scores and dscores
  Input scores;
  const uint8_t* key_mask;  // [B, T] bytes, 0 drops and compacts; or null
};

// row_max and row_sum: contiguous [B, H, S].
struct SoftmaxForward {
  Output probs;
  DType probs_dtype;
  float* row_max;
  float* row_sum;
};

struct SoftmaxBackward {
  Input dprobs;
  DType dprobs_dtype;
  const float* row_max;
  const float* row_sum;
  Output dscores;
};

void softmax_forward(const SoftmaxProblem& problem, const SoftmaxForward& results, int threads, Variant variant = Variant::automatic);
void softmax_backward(const SoftmaxProblem& problem, const SoftmaxBackward& gradients, int threads, Variant variant = Variant::automatic);

// The same of ordered-v2.
void softmax_v2_forward(const SoftmaxProblem& problem, const SoftmaxForward& results, int threads, Variant variant = Variant::automatic);
void softmax_v2_backward(const SoftmaxProblem& problem, const SoftmaxBackward& gradients, int threads,
                         Variant variant = Variant::automatic);

// One product; every output is RN(chain * scale), stored by the zero rule. W is D or V.
struct Product {
  int64_t batch, heads, kv_heads, queries, keys, width;
  float scale;
  Input left;
  DType left_dtype;
  Input right;
  DType right_dtype;
  Output out;
  DType out_dtype;
};

// out [B, H, S, T] = chain over W of left [B, H, S, W] and right [B, K, T, W]: scores, and dprobs (scale 1).
void product_over_width(const Product& product, int threads, Variant variant = Variant::automatic);

// out [B, H, S, W] = chain over T of left [B, H, S, T] and right [B, K, T, W]: out (scale 1), and dq.
void product_over_keys(const Product& product, int threads, Variant variant = Variant::automatic);

// out [B, K, T, W] = chain over (head in its group, query) of left [B, H, S, T] and right [B, H, S, W]: dk, and dv (scale 1).
void product_over_queries(const Product& product, int threads, Variant variant = Variant::automatic);

}  // namespace attn::host
