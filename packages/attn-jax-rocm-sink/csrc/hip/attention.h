// The HIP kernels as the engine calls them. They enqueue on a stream, allocate nothing and do not synchronise, and return 0 or a code for
// error_message.
#pragma once

#include "../tensors.h"

namespace attn::hip {

// Parts of the workspace; null when a call has no need of them.
struct Space {
  int32_t* key_positions;  // [B, T], with a key mask
  int32_t* key_counts;     // [B]
  float* delta;            // backward: a float for each row of LSE
  float* dsink;            // the same, with a gradient of sinks
  float* sink_items;       // [H, B]
};

constexpr int64_t kMostColumns = 256;
constexpr int64_t kMostPositions = INT32_MAX - 1024;  // slots are 32-bit

int attention_forward(const engine::Config& config, const engine::Tensors& tensors, const Space& space, void* stream);
int attention_backward(const engine::Config& config, const engine::Tensors& tensors, const Space& space, void* stream);

const char* error_message(int code);

}  // namespace attn::hip
