// The parts of the backward of attention: delta of the rows, sums over pairs for dq, dk and dv, and the sums of dsinks and dbias.
#pragma once

#include "attention_plan.cuh"

namespace attn_cuda {

struct BackwardInputs {
  Attention problem;
  Array dout;
  const float* dlse;
  const float* row_max;
  const float* row_sum;
};

RowsInWork query_sum_rows(const Limits& limits, const attn_cuda_attention& problem);

// delta and, where they are wanted, the gradient of each row's sink and dq. `held` is the workspace of `rows`, wanted for dq.
int launch_query_sums(const attn_cuda_attention& problem, const BackwardInputs& inputs, const RowsInWork& rows, const Blocks& blocks,
                      float* held, float* delta, float* dsink, void* dq, void* stream);
int launch_sinks(const Attention& problem, const float* rows, float* items, float* dsinks, void* stream);
RowsInWork key_sum_keys(const Limits& limits, const attn_cuda_attention& problem, int32_t upstream_dtype);
int launch_key_sums(const BackwardInputs& inputs, const RowsInWork& keys, const Blocks& blocks, float* held, const float* delta, void* dk,
                    void* dv, void* stream);
int launch_bias_sums(const Limits& limits, const BackwardInputs& inputs, const float* delta, float* dbias, const int64_t (&shape)[4],
                     void* stream);

}  // namespace attn_cuda
