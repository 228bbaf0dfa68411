// Interface of an engine: supports, plan, forward and backward over one plain configuration.
//
// The public calls are the same for every engine and hold what may not differ: `plan` is a pure function of the configuration; a run
// recomputes it, and refuses an unsupported configuration, a null pointer and a small workspace before the engine launches anything.
#pragma once

#include <string>

#include "tensors.h"
#include "workspace.h"

namespace attn::engine {

// What an engine runs and the workspace that it needs: questions that no device has to be there for.
class Planner {
 public:
  virtual ~Planner() = default;

  virtual const char* name() const = 0;

  // What backward needs of forward: part of the lists of buffers.
  virtual Kept kept() const = 0;

  // Reasons against the configuration, joined by "; "; empty when the engine runs it.
  std::string supports(const Config& config, Pass pass) const {
    std::string reasons;
    if (config.kv_heads < 1 || config.heads % config.kv_heads != 0)
      reasons = "heads=" + std::to_string(config.heads) + " (supported: a multiple of kv_heads=" + std::to_string(config.kv_heads) + ")";
    if (reasons.empty() && pass == Pass::backward && wants(config, kDsinks) && !has_sinks(config)) reasons = "a gradient of absent sinks";
    if (reasons.empty() && pass == Pass::backward && wants(config, kDbias) && !has_bias(config)) reasons = "a gradient of an absent bias";
    return reasons.empty() ? refuse(config, pass) : reasons;
  }

  Plan plan(const Config& config, Pass pass) const {
    require_supported(config, pass);
    Plan plan;
    size(config, pass, plan);
    return plan;
  }

 protected:
  // Reasons of this engine, joined by "; "; empty when it runs the configuration.
  virtual std::string refuse(const Config& config, Pass pass) const = 0;
  // Adds the parts that a supported configuration needs.
  virtual void size(const Config& config, Pass pass, Plan& plan) const = 0;

  void require_supported(const Config& config, Pass pass) const {
    const std::string reasons = supports(config, pass);
    if (!reasons.empty()) throw InvalidCall(std::string("engine ") + name() + " does not run this call: " + reasons);
  }
};

class Engine : public Planner {
 public:
  void forward(const Config& config, const Tensors& tensors, void* workspace, int64_t bytes, void* stream) const {
    const Plan plan = prepare(config, Pass::forward, tensors);
    run_forward(config, tensors, Workspace(plan, workspace, bytes), stream);
  }

  void backward(const Config& config, const Tensors& tensors, void* workspace, int64_t bytes, void* stream) const {
    const Plan plan = prepare(config, Pass::backward, tensors);
    run_backward(config, tensors, Workspace(plan, workspace, bytes), stream);
  }

 protected:
  // Every pointer that `operands` and `results` list is given; the others are null. Throws InvalidCall or std::exception.
  virtual void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const = 0;
  virtual void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const = 0;

 private:
  Plan prepare(const Config& config, Pass pass, const Tensors& tensors) const {
    require_supported(config, pass);
    for (const auto& names : {operands(config, pass, kept()), results(config, pass, kept())})
      for (std::string_view buffer : names)
        if (at(tensors, buffer) == nullptr) throw InvalidCall(null_pointer(config, buffer));
    return plan(config, pass);
  }

  static std::string null_pointer(const Config& config, std::string_view buffer) {
    const std::string text(buffer);
    if (buffer == "sinks") return "sinks are required for softmax " + std::string(name_of(config.softmax)) + "; the pointer is null";
    return text + " is required for this call; the pointer is null";
  }
};

// Joins reasons.
class Reasons {
 public:
  void add(bool applies, const std::string& reason) {
    if (!applies) return;
    if (!text_.empty()) text_ += "; ";
    text_ += reason;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace attn::engine
