// The ck engine: fused attention of AMD's Composable Kernel through AITER's C++ interface (mha_fwd and mha_bwd), with exact sinks on
// every version and sums in a fixed order. Its arithmetic is CK's: it keeps no contract.
#pragma once

#include "../engine.h"

namespace attn::engine {

class CkEngine : public Engine {
 public:
  const char* name() const override { return "ck"; }
  Kept kept() const override { return {true, true, false}; }

  // Whether the AITER that this was compiled against takes sinks in its forward.
  static bool has_native_sinks();

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config& config, Pass pass, Plan& plan) const override;
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

}  // namespace attn::engine
