// Contract sm90-v1, for every engine that has it. Source: docs/contracts/sm90-v1.md, sections 2 and 3.
#pragma once

#include <cmath>
#include <limits>

#include "engine.h"

namespace attn::engine {

// c = RN(scale * log2 e): the product in binary64, then one rounding.
inline float sm90_factor(const Config& config) { return static_cast<float>(config.scale * 1.4426950408889634); }

// What the contract lacks; `widest` is the largest head dim of the engine.
inline void add_sm90_reasons(const Config& config, int64_t widest, Reasons& reasons) {
  const int64_t width = config.head_dim;
  const bool known = (width == 64 || width == 128 || width == 256) && width <= widest;
  reasons.add(!known || config.value_dim != width, "head_dim=" + std::to_string(width) + ", value_dim=" + std::to_string(config.value_dim) +
                                                       " (supported: 64, 128" + (widest > 128 ? ", 256" : "") + ", both the same)");
  reasons.add(config.dtype == DType::float32, "dtype float32 (supported: bfloat16, float16)");
  reasons.add(config.out_dtype != config.dtype, std::string("out of ") + name_of(config.out_dtype) + " (supported: the dtype of q)");
  reasons.add(config.key_padding_mask != 0, "key_padding_mask (not supported)");
  reasons.add(has_bias(config), "bias (not supported)");
  reasons.add(has_dropout(config), "dropout (not supported)");
  const float factor = sm90_factor(config);
  reasons.add(!(factor >= std::numeric_limits<float>::min() && std::isfinite(factor)),
              "scale=" + std::to_string(config.scale) + " (supported: scale * log2(e) a normal positive float32)");
}

}  // namespace attn::engine
