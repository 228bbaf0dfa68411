// The host engine: the compiled CPU kernels of contract ordered-v1, and the model of contract sm90-v1.
#pragma once

#include "../engine.h"
#include "attn/host/attention.h"

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

// Takes the table of ex2, float32 [2^23] (attn/sm90.h), for every later call of the process.
void bind_ex2(const float* table);

class Sm90HostEngine : public Engine {
 public:
  const char* name() const override { return "host_sm90"; }
  Kept kept() const override { return {true, true, false}; }

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config&, Pass, Plan&) const override {}
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

int worker_threads();
host::Strides strides_of(const Strides& strides);
// Throws for values that only the kernels read: lengths, positions and offsets.
host::AttentionProblem host_problem(const Config& config, const Tensors& tensors);

}  // namespace attn::engine
