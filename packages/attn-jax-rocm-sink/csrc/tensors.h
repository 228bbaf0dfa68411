// The buffers of a pass by name. `operands` and `results` are the one list of what a configuration has: callers pack by it, handlers
// unpack by it, and engines are refused a null pointer by it.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "config.h"

namespace attn::engine {

// Pointers to memory of the engine's device; null when absent. Rows are contiguous float32 [B, H, S], packed [H, queries].
struct Tensors {
  // Inputs of both passes.
  const void *q, *k, *v;
  const uint8_t* key_padding_mask;                                     // [B, T], 0 drops
  const int64_t *kv_lengths, *q_start, *k_start;                       // [B]
  const int64_t *cu_seqlens_q, *cu_seqlens_k, *seqlens_q, *seqlens_k;  // [B + 1] offsets, [B] used lengths
  const float* sinks;                                                  // [H]
  const void* bias;                                                    // contiguous over bias_shape
  const uint32_t* dropout_seed;  // [4]: seed, low word first; batch item and head at which its counters begin
  // Results of forward; those that an engine keeps are inputs of backward.
  void* out;
  float *lse, *row_max, *row_sum;
  // Backward. Gradients are contiguous in the layout of their input, dsinks [H], dbias over bias_shape.
  const void* dout;
  const float* dlse;
  void *dq, *dk, *dv;
  float *dsinks, *dbias;
};

// What an engine keeps of a forward pass for its backward pass.
struct Kept {
  bool out, lse, row_state;  // row_state: row_max and row_sum
};

inline std::vector<std::string_view> operands(const Config& config, Pass pass, const Kept& kept) {
  std::vector<std::string_view> names = {"q", "k", "v"};
  const auto add = [&names](bool present, std::initializer_list<std::string_view> more) {
    if (present) names.insert(names.end(), more);
  };
  add(config.key_padding_mask != 0, {"key_padding_mask"});
  add(config.kv_lengths != 0, {"kv_lengths"});
  add(config.alignment == Alignment::operands, {"q_start"});
  add(config.k_start != 0, {"k_start"});
  add(config.packed != 0, {"cu_seqlens_q", "cu_seqlens_k"});
  add(config.seqlens != 0, {"seqlens_q", "seqlens_k"});
  add(has_sinks(config), {"sinks"});
  add(has_bias(config), {"bias"});
  add(has_dropout(config), {"dropout_seed"});
  if (pass == Pass::forward) return names;
  add(kept.out, {"out"});
  add(kept.lse, {"lse"});
  add(kept.row_state, {"row_max", "row_sum"});
  add(true, {"dout"});
  add(config.dlse != 0, {"dlse"});
  return names;
}

inline std::vector<std::string_view> results(const Config& config, Pass pass, const Kept& kept) {
  if (pass == Pass::forward) {
    if (kept.row_state) return {"out", "lse", "row_max", "row_sum"};
    return {"out", "lse"};
  }
  std::vector<std::string_view> names;
  if (wants(config, kDq)) names.push_back("dq");
  if (wants(config, kDk)) names.push_back("dk");
  if (wants(config, kDv)) names.push_back("dv");
  if (wants(config, kDsinks)) names.push_back("dsinks");
  if (wants(config, kDbias)) names.push_back("dbias");
  return names;
}

// Pointer of a name. Every member of Tensors is a pointer to an object.
struct Slot {
  std::string_view name;
  size_t offset;
};

#define ATTN_SLOT(name) \
  Slot { #name, offsetof(Tensors, name) }
constexpr Slot kSlots[] = {
    ATTN_SLOT(q),
    ATTN_SLOT(k),
    ATTN_SLOT(v),
    ATTN_SLOT(key_padding_mask),
    ATTN_SLOT(kv_lengths),
    ATTN_SLOT(q_start),
    ATTN_SLOT(k_start),
    ATTN_SLOT(sinks),
    ATTN_SLOT(cu_seqlens_q),
    ATTN_SLOT(cu_seqlens_k),
    ATTN_SLOT(seqlens_q),
    ATTN_SLOT(seqlens_k),
    ATTN_SLOT(bias),
    ATTN_SLOT(dropout_seed),
    ATTN_SLOT(out),
    ATTN_SLOT(lse),
    ATTN_SLOT(row_max),
    ATTN_SLOT(row_sum),
    ATTN_SLOT(dout),
    ATTN_SLOT(dlse),
    ATTN_SLOT(dq),
    ATTN_SLOT(dk),
    ATTN_SLOT(dv),
    ATTN_SLOT(dsinks),
    ATTN_SLOT(dbias),
};
#undef ATTN_SLOT
static_assert(sizeof(kSlots) / sizeof(Slot) == sizeof(Tensors) / sizeof(void*));

inline void* const& at(const Tensors& tensors, std::string_view name) {
  for (const Slot& slot : kSlots)
    if (slot.name == name) return *reinterpret_cast<void* const*>(reinterpret_cast<const char*>(&tensors) + slot.offset);
  throw std::logic_error("no buffer is named " + std::string(name));
}
inline void*& at(Tensors& tensors, std::string_view name) { return const_cast<void*&>(at(static_cast<const Tensors&>(tensors), name)); }

}  // namespace attn::engine
