// What CK runs, as data: the GPUs, the head dims of its instances and where its assembly kernels apply. Refusals and launches read the
// same rows.
#pragma once

#include <string_view>

#include "../config.h"

namespace attn::ck {

using engine::Bias;
using engine::Config;
using engine::DType;

struct Gpu {
  std::string_view name;
  bool assembly;  // has forward kernels in assembly
};
constexpr Gpu kGpus[] = {{"gfx90a", false}, {"gfx942", true}, {"gfx950", true}};

// An instance takes head dims up to these, in steps of 8.
struct HeadDims {
  int64_t qk, v;
  int64_t split;  // keys that a split of the deterministic dq takes at least
  bool assembly;  // bfloat16 forward in assembly
};
constexpr HeadDims kHeadDims[] = {
    {32, 32, 128, false}, {64, 64, 128, false}, {96, 128, 128, false}, {128, 128, 128, true}, {192, 128, 64, true}, {256, 256, 64, true},
};

inline const Gpu* find_gpu(std::string_view name) {
  for (const Gpu& gpu : kGpus)
    if (gpu.name == name) return &gpu;
  return nullptr;
}

inline const HeadDims* find_head_dims(const Config& config) {
  if (config.head_dim < 1 || config.value_dim < 1 || config.head_dim % 8 != 0 || config.value_dim % 8 != 0) return nullptr;
  for (const HeadDims& dims : kHeadDims)
    if (config.head_dim <= dims.qk && config.value_dim <= dims.v) return &dims;
  return nullptr;
}

// Whether forward takes an assembly kernel. They know no sink, so one turns them off; sizing and launch ask here alike. Backward is
// deterministic, which they are not, and never takes one.
inline bool uses_assembly(const Config& config, const Gpu& gpu) {
  const HeadDims* dims = find_head_dims(config);
  return gpu.assembly && dims != nullptr && dims->assembly && dims->qk == config.head_dim && dims->v == config.value_dim &&
         config.dtype == DType::bfloat16 && !has_sinks(config) && !has_bias(config) && !has_dropout(config) && config.kv_lengths == 0 &&
         config.packed == 0 && config.window_left < 0 && (config.causal != 0 || config.window_right < 0);
}

// CK's enumeration of masks.
enum MaskKind { kNoMask = 0, kTopLeft = 1, kBottomRight = 2 };

struct Mask {
  int kind;
  int64_t left, right;  // -1: no bound
};

inline Mask mask_of(const Config& config) {
  const int64_t right = config.causal != 0 ? 0 : config.window_right;
  if (config.window_left < 0 && right < 0) return {kNoMask, -1, -1};
  return {config.alignment == engine::Alignment::top_left ? kTopLeft : kBottomRight, config.window_left, right};
}

}  // namespace attn::ck
