// The hip engine: contract ordered-v1 by the project's own HIP kernels. All pointers are device memory; the stream is a hipStream_t.
#pragma once

#include "attention.h"
#include "planning.h"

namespace attn::engine {

class HipEngine : public HipPlanning<Engine> {
 protected:
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

}  // namespace attn::engine
