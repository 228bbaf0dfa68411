#include <atomic>

#include "../sm90.h"
#include "engine.h"

namespace attn::engine {
namespace {

std::atomic<const attn_cuda_sm90_interface*> bound{nullptr};

const attn_cuda_sm90_interface& table() {
  const attn_cuda_sm90_interface* found = bound.load(std::memory_order_acquire);
  if (found == nullptr) throw std::runtime_error("the kernels of attn-cuda for contract sm90-v1 are not loaded in this process");
  return *found;
}

attn_cuda_sm90_gradients gradients_of(const Config& config, const Tensors& tensors) {
  attn_cuda_sm90_gradients gradients{};
  gradients.dout = cuda_array(tensors.dout, config.out_dtype, config.out);
  gradients.out = cuda_array(tensors.out, config.out_dtype, config.out);
  gradients.lse = tensors.lse;
  gradients.dlse = tensors.dlse;
  gradients.dq = tensors.dq;
  gradients.dk = tensors.dk;
  gradients.dv = tensors.dv;
  gradients.dsinks = tensors.dsinks;
  return gradients;
}

int64_t workspace_bytes(const Config& config, Pass pass, const Tensors& tensors) {
  const int device = static_cast<int>(config.device);
  const attn_cuda_attention problem = cuda_problem(config, tensors);
  int64_t bytes = 0;
  if (pass == Pass::forward) {
    check_cuda(table().forward_workspace(device, &problem, &bytes), "sm90_forward_workspace");
  } else {
    const attn_cuda_sm90_gradients gradients = gradients_of(config, tensors);
    check_cuda(table().backward_workspace(device, &problem, &gradients, &bytes), "sm90_backward_workspace");
  }
  return bytes;
}

}  // namespace

std::string bind_cuda_sm90(const attn_cuda_sm90_interface* candidate) {
  if (candidate == nullptr) return "attn-cuda was built without 90a, which contract sm90-v1 needs";
  if (candidate->version != ATTN_CUDA_SM90_INTERFACE_VERSION)
    return "attn-cuda has version " + std::to_string(candidate->version) + " of its C interface of sm90-v1; this build needs version " +
           std::to_string(ATTN_CUDA_SM90_INTERFACE_VERSION);
  if (candidate->attention_bytes != sizeof(attn_cuda_attention) || candidate->results_bytes != sizeof(attn_cuda_sm90_results) ||
      candidate->gradients_bytes != sizeof(attn_cuda_sm90_gradients))
    return "attn-cuda was built with other structs of its C interface; install both packages in one version";
  bound.store(candidate, std::memory_order_release);
  return "";
}

std::string probe_cuda_sm90(int64_t device) {
  Config config{};
  config.batch = config.heads = config.kv_heads = config.queries = config.keys = 1;
  config.head_dim = config.value_dim = 64;
  config.dtype = config.out_dtype = DType::bfloat16;
  config.device = device;
  config.scale = 1;
  try {
    workspace_bytes(config, Pass::forward, planned(config, Pass::forward, {true, true, false}));
    return "";
  } catch (const std::exception& error) {
    return "contract sm90-v1 needs compute capability 9.0; device " + std::to_string(device) + ": " + error.what();
  }
}

std::string Sm90CudaEngine::refuse(const Config& config, Pass) const {
  Reasons reasons;
  reasons.add(bound.load(std::memory_order_acquire) == nullptr,
              "the kernels of attn-cuda for contract sm90-v1 are not loaded in this process");
  add_cuda_reasons(config, reasons);
  add_sm90_reasons(config, 128, reasons);
  return reasons.text();
}

void Sm90CudaEngine::size(const Config& config, Pass pass, Plan& plan) const {
  if (!is_empty(config, pass)) plan.add("attn_cuda", workspace_bytes(config, pass, planned(config, pass, kept())));
}

void Sm90CudaEngine::run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  if (is_empty(config, Pass::forward)) return;
  require_aligned(config, Pass::forward, tensors, kept(), workspace_bytes);
  const attn_cuda_attention problem = cuda_problem(config, tensors);
  const attn_cuda_sm90_results results{tensors.out, tensors.lse};
  check_cuda(
      table().forward(static_cast<int>(config.device), stream, &problem, sm90_factor(config), &results, workspace.part<void>("attn_cuda")),
      "sm90_forward");
}

void Sm90CudaEngine::run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  if (is_empty(config, Pass::backward)) return;
  require_aligned(config, Pass::backward, tensors, kept(), workspace_bytes);
  const attn_cuda_attention problem = cuda_problem(config, tensors);
  const attn_cuda_sm90_gradients gradients = gradients_of(config, tensors);
  check_cuda(table().backward(static_cast<int>(config.device), stream, &problem, sm90_factor(config), &gradients,
                              workspace.part<void>("attn_cuda")),
             "sm90_backward");
}

}  // namespace attn::engine
