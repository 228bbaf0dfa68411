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

// Rows of a block of delta.
int delta_rows(const Limits& limits, const BackwardInputs& inputs);

// Widest column count and rows or keys of a block of the sums over pairs.
struct PairShape {
  int width, edge;
};

PairShape pair_shape(const Limits& limits, const Attention& problem);

int launch_delta(const BackwardInputs& inputs, const Blocks& blocks, int rows, float* delta, float* dsink, void* stream);
int launch_sinks(const Attention& problem, const float* rows, float* items, float* dsinks, void* stream);
int launch_query_sums(const BackwardInputs& inputs, const float* delta, const Blocks& blocks, PairShape shape, void* dq, void* stream);
int launch_key_sums(const BackwardInputs& inputs, const float* delta, const Blocks& blocks, PairShape shape, void* dk, void* dv,
                    void* stream);
int launch_bias_sums(const Limits& limits, const BackwardInputs& inputs, const float* delta, float* dbias, const int64_t (&shape)[4],
                     void* stream);

}  // namespace attn_cuda
