// Interface of the host kernels of sm90-v1. The problem is that of attention.h with half operands, value_dim = head_dim in 64, 128, 256, no
// query_mask, bias or dropout, and must pass check_attention; key_mask masks in place; `scale` is RN(scale).
#pragma once

#include "attn/host/attention.h"

namespace attn::host {

struct Sm90Options {
  float factor;        // c = RN(scale * log2 e)
  const float* table;  // [2^23]: ex2 (attn/sm90.h)
};

// The rows of lse are contiguous float32 [B, H, S], packed: [H, total]; out has the dtype of q. Nothing is written for rows outside packed
// segments. With n, l and o, contiguous float32 [segments, rows] and [segments, rows, D], the states before the merge are written there
// instead, one for each segment that `problem.keys` keys can touch; they must hold dead states (-inf, +0, +0) before.
struct Sm90Forward {
  Output out;
  float* lse;
  float* n;
  float* l;
  float* o;
};

// Gradients are written for every non-null pointer, with the layouts of AttentionBackward. dout and out have the dtype of q; dlse may be
// null.
struct Sm90Backward {
  Input dout;
  Input out;
  const float* lse;
  const float* dlse;
  void* dq;
  void* dk;
  void* dv;
  float* dsinks;
};

// c[row][column] = the chain of tensor-core steps over `terms` terms, from c: contiguous a [rows][terms] and b [terms][columns], halves,
// and c [rows][columns] float32. Any sizes; missing terms of the last step are zeros.
struct Sm90Chain {
  int64_t rows, terms, columns;
  DType dtype;
  const void* a;
  const void* b;
  float* c;
};

void sm90_chain(const Sm90Chain& chain, int threads, Variant variant = Variant::automatic);
void sm90_forward(const AttentionProblem& problem, const Sm90Options& options, const Sm90Forward& results, int threads,
                  Variant variant = Variant::automatic);
void sm90_backward(const AttentionProblem& problem, const Sm90Options& options, const Sm90Backward& gradients, int threads,
                   Variant variant = Variant::automatic);

}  // namespace attn::host
