#include <algorithm>
#include <atomic>
#include <cstring>

#include "../sm90.h"
#include "attn/host/sm90.h"
#include "engine.h"

namespace attn::engine {
namespace {

std::atomic<const float*> bound{nullptr};

host::Sm90Options options_of(const Config& config) { return {sm90_factor(config), bound.load(std::memory_order_acquire)}; }

// Rows outside packed segments are written by nobody else.
void clear(void* array, int64_t elements) { std::memset(array, 0, static_cast<size_t>(elements) * 2); }

}  // namespace

void bind_ex2(const float* table) { bound.store(table, std::memory_order_release); }

std::string Sm90HostEngine::refuse(const Config& config, Pass) const {
  Reasons reasons;
  reasons.add(bound.load(std::memory_order_acquire) == nullptr, "the table of ex2 is not loaded in this process");
  reasons.add(config.alignment == Alignment::top_left, "top-left alignment without q_start (supported: q_start)");
  add_sm90_reasons(config, 256, reasons);
  return reasons.text();
}

void Sm90HostEngine::run_forward(const Config& config, const Tensors& tensors, const Workspace&, void*) const {
  clear(tensors.out, rows_of(config) * config.value_dim);
  std::fill_n(tensors.lse, rows_of(config), -std::numeric_limits<float>::infinity());
  host::Sm90Forward results{};
  results.out = {tensors.out, strides_of(config.out)};
  results.lse = tensors.lse;
  host::sm90_forward(host_problem(config, tensors), options_of(config), results, worker_threads());
}

void Sm90HostEngine::run_backward(const Config& config, const Tensors& tensors, const Workspace&, void*) const {
  const int64_t keys = outer_of(config) * config.kv_heads * config.keys;
  if (tensors.dq != nullptr) clear(tensors.dq, rows_of(config) * config.head_dim);
  for (void* gradient : {tensors.dk, tensors.dv})
    if (gradient != nullptr) clear(gradient, keys * config.head_dim);
  host::Sm90Backward gradients{};
  gradients.dout = {tensors.dout, strides_of(config.out)};
  gradients.out = {tensors.out, strides_of(config.out)};
  gradients.lse = tensors.lse;
  gradients.dlse = tensors.dlse;
  gradients.dq = tensors.dq;
  gradients.dk = tensors.dk;
  gradients.dv = tensors.dv;
  gradients.dsinks = tensors.dsinks;
  host::sm90_backward(host_problem(config, tensors), options_of(config), gradients, worker_threads());
}

}  // namespace attn::engine
