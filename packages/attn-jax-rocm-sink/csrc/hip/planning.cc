#include "planning.h"

#include "attention.h"

namespace attn::engine {
namespace {

constexpr int64_t kFloat = 4, kInteger = 4;

std::string limit(const char* name, int64_t value, int64_t most) {
  return std::string(name) + "=" + std::to_string(value) + " (supported: 0 to " + std::to_string(most) + ")";
}

}  // namespace

std::string hip_reasons(const Config& config) {
  Reasons reasons;
  const auto outside = [](int64_t value, int64_t most) { return value < 0 || value > most; };
  const auto strided = [](const Strides& strides, int64_t columns) { return columns > 1 && strides.column != 1; };
  reasons.add(outside(config.head_dim, hip::kMostColumns), limit("head_dim", config.head_dim, hip::kMostColumns));
  reasons.add(outside(config.value_dim, hip::kMostColumns), limit("value_dim", config.value_dim, hip::kMostColumns));
  reasons.add(outside(config.queries, hip::kMostPositions), limit("queries", config.queries, hip::kMostPositions));
  reasons.add(outside(config.keys, hip::kMostPositions), limit("keys", config.keys, hip::kMostPositions));
  reasons.add(strided(config.q, config.head_dim) || strided(config.k, config.head_dim) || strided(config.v, config.value_dim) ||
                  strided(config.out, config.value_dim),
              "columns that are not contiguous");
  reasons.add(config.alignment == Alignment::top_left, "top-left alignment without q_start (supported: q_start)");
  reasons.add(has_bias(config) && config.bias_dtype != DType::float32,
              std::string("a bias in ") + name_of(config.bias_dtype) + " (supported: float32)");
  reasons.add(config.packed != 0 && has_bias(config), "a bias of packed input");
  reasons.add(config.packed != 0 && config.key_padding_mask != 0, "a key padding mask of packed input");
  return reasons.text();
}

void add_hip_parts(const Config& config, Pass pass, Plan& plan) {
  if (config.key_padding_mask != 0) {
    plan.add("key_positions", config.batch * config.keys * kInteger);
    plan.add("key_counts", config.batch * kInteger);
  }
  if (pass == Pass::forward) return;
  plan.add("delta", rows_of(config) * kFloat);
  if (!wants(config, kDsinks)) return;
  plan.add("dsink", rows_of(config) * kFloat);
  plan.add("sink_items", config.batch * config.heads * kFloat);
}

}  // namespace attn::engine
