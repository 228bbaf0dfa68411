// The cuda engine: the kernels of attn-cuda through its table of C functions (attn/cuda/interface.h). Compiled without a CUDA toolkit.
#pragma once

#include "../engine.h"
#include "attn/cuda/interface.h"

namespace attn::engine {

// Takes the table for every later call of the process. Why it is refused, or empty.
std::string bind_cuda(const attn_cuda_interface* table);

class CudaEngine : public Engine {
 public:
  const char* name() const override { return "cuda"; }
  Kept kept() const override { return {false, false, true}; }

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config& config, Pass pass, Plan& plan) const override;
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

}  // namespace attn::engine
