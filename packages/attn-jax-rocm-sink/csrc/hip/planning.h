// What the hip engine runs and the workspace that it needs, of the configuration alone: no HIP, so that every build of the package can
// lower a call for AMD GPUs.
#pragma once

#include "../engine.h"

namespace attn::engine {

std::string hip_reasons(const Config& config);
void add_hip_parts(const Config& config, Pass pass, Plan& plan);

// `Base` is Planner, or Engine where the kernels are.
template <typename Base>
class HipPlanning : public Base {
 public:
  const char* name() const override { return "hip"; }
  Kept kept() const override { return {false, false, true}; }

 protected:
  std::string refuse(const Config& config, Pass) const override { return hip_reasons(config); }
  void size(const Config& config, Pass pass, Plan& plan) const override { add_hip_parts(config, pass, plan); }
};

}  // namespace attn::engine
