// The hip engine: contract ordered-v1 by the project's own HIP kernels. All pointers are device memory; the stream is a hipStream_t.
#pragma once

#include "../engine.h"
#include "attention.h"

namespace attn::engine {

class HipEngine : public Engine {
 public:
  const char* name() const override { return "hip"; }
  Kept kept() const override { return {false, false, true}; }

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config& config, Pass pass, Plan& plan) const override;
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

}  // namespace attn::engine
