#include "engine.h"

#include <atomic>

namespace attn::engine {
namespace {

constexpr int64_t kMostHeadDim = 256;
constexpr int64_t kMostSize = (int64_t{1} << 31) - 1025;

std::atomic<const attn_cuda_interface*> bound{nullptr};

const attn_cuda_interface& table() {
  const attn_cuda_interface* found = bound.load(std::memory_order_acquire);
  if (found == nullptr) throw std::runtime_error("the kernels of attn-cuda are not loaded in this process");
  return *found;
}

}  // namespace

void check_cuda(int code, const char* function) {
  if (code == 0) return;
  const std::string text = std::string("attn-cuda ") + function + ": " + table().message(code) + " (code " + std::to_string(code) + ")";
  if (code < 0) throw InvalidCall(text);
  throw std::runtime_error(text);
}

attn_cuda_array cuda_array(const void* data, DType dtype, const Strides& strides) {
  return {data, static_cast<int32_t>(dtype), {strides.batch, strides.head, strides.row, strides.column}};
}

attn_cuda_attention cuda_problem(const Config& config, const Tensors& tensors) {
  attn_cuda_attention problem{};
  problem.batch = config.batch;
  problem.heads = config.heads;
  problem.kv_heads = config.kv_heads;
  problem.queries = config.queries;
  problem.keys = config.keys;
  problem.head_dim = config.head_dim;
  problem.value_dim = config.value_dim;
  problem.q = cuda_array(tensors.q, config.dtype, config.q);
  problem.k = cuda_array(tensors.k, config.dtype, config.k);
  problem.v = cuda_array(tensors.v, config.dtype, config.v);
  problem.key_mask = tensors.key_padding_mask;
  problem.kv_lengths = tensors.kv_lengths;
  problem.q_start = tensors.q_start;
  problem.k_start = tensors.k_start;
  problem.cu_seqlens_q = tensors.cu_seqlens_q;
  problem.cu_seqlens_k = tensors.cu_seqlens_k;
  problem.seqlens_q = tensors.seqlens_q;
  problem.seqlens_k = tensors.seqlens_k;
  if (has_sinks(config)) problem.sinks = tensors.sinks;
  if (has_bias(config)) {
    const Strides strides = bias_strides(config);
    problem.bias = static_cast<const float*>(tensors.bias);
    problem.bias_strides[0] = strides.batch;
    problem.bias_strides[1] = strides.head;
    problem.bias_strides[2] = strides.row;
    problem.bias_strides[3] = strides.column;
  }
  problem.causal = config.causal != 0;
  problem.window_left = config.window_left;
  problem.window_right = config.window_right;
  problem.scale = static_cast<float>(config.scale);
  return problem;
}

namespace {

attn_cuda_attention_gradients gradients_of(const Config& config, const Tensors& tensors) {
  attn_cuda_attention_gradients gradients{};
  gradients.dout = cuda_array(tensors.dout, config.out_dtype, config.out);
  gradients.dlse = tensors.dlse;
  gradients.row_max = tensors.row_max;
  gradients.row_sum = tensors.row_sum;
  gradients.dq = tensors.dq;
  gradients.dk = tensors.dk;
  gradients.dv = tensors.dv;
  gradients.dsinks = tensors.dsinks;
  gradients.dbias = tensors.dbias;
  for (int axis = 0; axis < 4; ++axis) gradients.dbias_shape[axis] = config.bias_shape[axis];
  return gradients;
}

}  // namespace

Tensors planned(const Config& config, Pass pass, const Kept& kept) {
  Tensors tensors{};
  for (const auto& names : {operands(config, pass, kept), results(config, pass, kept)})
    for (std::string_view name : names) at(tensors, name) = reinterpret_cast<void*>(uintptr_t{kAlignment});
  return tensors;
}

namespace {

int64_t workspace_bytes(const Config& config, Pass pass, const Tensors& tensors) {
  const int device = static_cast<int>(config.device);
  const attn_cuda_attention problem = cuda_problem(config, tensors);
  int64_t bytes = 0;
  if (pass == Pass::forward) {
    check_cuda(table().forward_workspace(device, &problem, &bytes), "forward_workspace");
  } else {
    const attn_cuda_attention_gradients gradients = gradients_of(config, tensors);
    check_cuda(table().backward_workspace(device, &problem, &gradients, &bytes), "backward_workspace");
  }
  return bytes;
}

}  // namespace

bool is_empty(const Config& config, Pass pass) {
  if (pass == Pass::forward) return rows_of(config) == 0;
  const int64_t outer = outer_of(config), keys = outer * config.kv_heads * config.keys;
  return !((wants(config, kDq) && rows_of(config) * config.head_dim > 0) || (wants(config, kDk) && keys * config.head_dim > 0) ||
           (wants(config, kDv) && keys * config.value_dim > 0) || (wants(config, kDsinks) && config.heads > 0) ||
           (wants(config, kDbias) && bias_count(config) > 0));
}

void add_cuda_reasons(const Config& config, Reasons& reasons) {
  const int64_t longest = config.queries > config.keys ? config.queries : config.keys;
  reasons.add(longest > kMostSize, "length " + std::to_string(longest) + " (supported: up to " + std::to_string(kMostSize) + ")");
  reasons.add(config.alignment == Alignment::top_left, "top-left alignment without q_start (supported: q_start)");
}

std::string bind_cuda(const attn_cuda_interface* candidate) {
  if (candidate == nullptr) return "attn-cuda gave no table of functions";
  if (candidate->version != ATTN_CUDA_INTERFACE_VERSION)
    return "attn-cuda has version " + std::to_string(candidate->version) + " of its C interface; this build needs version " +
           std::to_string(ATTN_CUDA_INTERFACE_VERSION);
  if (candidate->attention_bytes != sizeof(attn_cuda_attention) || candidate->results_bytes != sizeof(attn_cuda_attention_results) ||
      candidate->gradients_bytes != sizeof(attn_cuda_attention_gradients))
    return "attn-cuda was built with other structs of its C interface; install both packages in one version";
  bound.store(candidate, std::memory_order_release);
  return "";
}

std::string CudaEngine::refuse(const Config& config, Pass) const {
  Reasons reasons;
  reasons.add(bound.load(std::memory_order_acquire) == nullptr, "the kernels of attn-cuda are not loaded in this process");
  reasons.add(has_dropout(config), "dropout (not supported)");
  const int64_t widest = config.head_dim > config.value_dim ? config.head_dim : config.value_dim;
  reasons.add(widest > kMostHeadDim, "head_dim=" + std::to_string(widest) + " (supported: up to " + std::to_string(kMostHeadDim) + ")");
  add_cuda_reasons(config, reasons);
  reasons.add(config.packed != 0 && has_bias(config), "a bias of packed input");
  reasons.add(has_bias(config) && config.bias_dtype != DType::float32, "a bias that is not float32");
  return reasons.text();
}

void CudaEngine::size(const Config& config, Pass pass, Plan& plan) const {
  if (!is_empty(config, pass)) plan.add("attn_cuda", workspace_bytes(config, pass, planned(config, pass, kept())));
}

void CudaEngine::run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  if (is_empty(config, Pass::forward)) return;
  require_aligned(config, Pass::forward, tensors, kept(), workspace_bytes);
  const attn_cuda_attention problem = cuda_problem(config, tensors);
  const attn_cuda_attention_results results{tensors.out, static_cast<int32_t>(config.out_dtype), tensors.lse, tensors.row_max,
                                            tensors.row_sum};
  check_cuda(table().forward(static_cast<int>(config.device), stream, &problem, &results, workspace.part<void>("attn_cuda")), "forward");
}

void CudaEngine::run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  if (is_empty(config, Pass::backward)) return;
  require_aligned(config, Pass::backward, tensors, kept(), workspace_bytes);
  const attn_cuda_attention problem = cuda_problem(config, tensors);
  const attn_cuda_attention_gradients gradients = gradients_of(config, tensors);
  check_cuda(table().backward(static_cast<int>(config.device), stream, &problem, &gradients, workspace.part<void>("attn_cuda")),
             "backward");
}

}  // namespace attn::engine
