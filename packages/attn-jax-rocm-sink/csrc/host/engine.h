// The host engine: the compiled CPU kernels of contract ordered-v1.
#pragma once

#include "../engine.h"

namespace attn::engine {

class HostEngine : public Engine {
 public:
  const char* name() const override { return "host"; }
  Kept kept() const override { return {false, false, true}; }

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config&, Pass, Plan&) const override {}
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

}  // namespace attn::engine
