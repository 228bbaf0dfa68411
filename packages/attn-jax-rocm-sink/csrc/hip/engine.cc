#include "engine.h"

namespace attn::engine {
namespace {

hip::Space space_of(const Workspace& workspace) {
  hip::Space space{};
  space.key_positions = workspace.part<int32_t>("key_positions");
  space.key_counts = workspace.part<int32_t>("key_counts");
  space.delta = workspace.part<float>("delta");
  space.dsink = workspace.part<float>("dsink");
  space.sink_items = workspace.part<float>("sink_items");
  return space;
}

void require_success(int code) {
  if (code != 0) throw std::runtime_error(std::string("HIP: ") + hip::error_message(code));
}

}  // namespace

void HipEngine::run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  require_success(hip::attention_forward(config, tensors, space_of(workspace), stream));
}

void HipEngine::run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  require_success(hip::attention_backward(config, tensors, space_of(workspace), stream));
}

}  // namespace attn::engine
