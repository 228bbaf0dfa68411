// The arguments of AITER's mha_fwd and mha_bwd by name, on structs whose every member starts at zero: their members have moved between
// versions, so nothing here depends on an order, and a member that an old version lacks is left out where that is right.
//
// Source: csrc/include/mha_fwd.h and mha_bwd.h of github.com/ROCm/aiter.
#pragma once

#include <mha_bwd.h>
#include <mha_fwd.h>

#include <type_traits>

#include "../tensors.h"
#include "tables.h"

namespace attn::ck {

using engine::Pass;
using engine::Strides;
using engine::Tensors;

template <typename Arguments, typename = void>
struct TakesSinks : std::false_type {};
template <typename Arguments>
struct TakesSinks<Arguments, std::void_t<decltype(Arguments::sink_ptr), decltype(Arguments::has_sink)>> : std::true_type {};

template <typename Arguments, typename = void>
struct TakesPinned : std::false_type {};
template <typename Arguments>
struct TakesPinned<Arguments, std::void_t<decltype(Arguments::pinned_host_alloc)>> : std::true_type {};

// int32 offsets that a call needs; null where it does not.
struct Lengths {
  const int32_t *seqstart_q, *seqstart_k, *used_q, *used_k;
};

struct Scratch {
  void *d, *dq, *dk, *dv, *dbias;  // dk and dv of every query head; dbias of every pair
  const void* zero;                // 8 bytes of zeros: the offset of the random numbers
};

inline int narrow(int64_t value) { return static_cast<int>(value); }

// Strides of a contiguous array with `heads` heads.
inline Strides expanded(const Config& config, int64_t heads, int64_t rows, int64_t columns) {
  if (config.packed) return {0, columns, heads * columns, 1};
  return {heads * rows * columns, rows * columns, columns, 1};
}

#define ATTN_CK_STRIDES(TO, NAME, STRIDES)           \
  (TO).stride_##NAME = narrow((STRIDES).row);        \
  (TO).nhead_stride_##NAME = narrow((STRIDES).head); \
  (TO).batch_stride_##NAME = config.packed ? 0 : narrow((STRIDES).batch)

// What forward and backward name alike.
template <typename Arguments>
void fill_shared(const Config& config, const Tensors& tensors, const Lengths& lengths, const void* zero, Arguments& to) {
  to.data_type = config.dtype == DType::float16 ? "fp16" : "bf16";
  to.is_group_mode = config.packed != 0;
  to.bias_type = has_bias(config) ? 1 : 0;
  to.q_ptr = tensors.q;
  to.k_ptr = tensors.k;
  to.v_ptr = tensors.v;
  to.bias_ptr = has_bias(config) ? tensors.bias : nullptr;
  to.seqstart_q_ptr = lengths.seqstart_q;
  to.seqstart_k_ptr = lengths.seqstart_k;
  to.cu_seqlen_q_ptr = lengths.used_q;
  to.cu_seqlen_k_ptr = lengths.used_k;
  to.seqlen_q = narrow(config.queries);
  to.seqlen_k = narrow(config.keys);
  to.batch = narrow(config.batch);
  to.max_seqlen_q = narrow(config.queries);
  to.hdim_q = narrow(config.head_dim);
  to.hdim_v = narrow(config.value_dim);
  to.nhead_q = narrow(config.heads);
  to.nhead_k = narrow(config.kv_heads);
  ATTN_CK_STRIDES(to, q, config.q);
  ATTN_CK_STRIDES(to, k, config.k);
  ATTN_CK_STRIDES(to, v, config.v);
  ATTN_CK_STRIDES(to, o, config.out);
  if (has_bias(config)) {
    const Strides bias = bias_strides(config);
    to.stride_bias = narrow(bias.row);
    to.nhead_stride_bias = narrow(bias.head);
    to.batch_stride_bias = narrow(bias.batch);
  }
  const Mask mask = mask_of(config);
  to.mask_type = mask.kind;
  to.window_size_left = narrow(mask.left);
  to.window_size_right = narrow(mask.right);
  to.p_drop = static_cast<float>(config.dropout_p);
  if (has_dropout(config)) to.drop_seed_offset = std::pair<const void*, const void*>(tensors.dropout_seed, zero);
}

// With a mask and without has_sink, CK's kernels drop the sink: both are set by one predicate.
template <typename Arguments>
void set_sinks(const Config& config, const Tensors& tensors, Arguments& to) {
  if constexpr (TakesSinks<Arguments>::value) {
    to.has_sink = has_sinks(config);
    to.sink_ptr = has_sinks(config) ? tensors.sinks : nullptr;
  }
}

inline aiter::mha_fwd_args forward_arguments(const Config& config, const Gpu& gpu, const Tensors& tensors, const Lengths& lengths,
                                             const void* zero) {
  aiter::mha_fwd_args to{};
  fill_shared(config, tensors, lengths, zero, to);
  to.use_asm_v3 = uses_assembly(config, gpu);
  to.has_lse = true;
  to.lse_ptr = tensors.lse;
  to.o_ptr = tensors.out;
  to.scale_s = static_cast<float>(config.scale);
  to.nhead_stride_lse = narrow(config.queries);
  to.batch_stride_lse = config.packed ? 0 : narrow(config.heads * config.queries);
  set_sinks(config, tensors, to);
  return to;
}

// The log-sum-exp that is passed includes the sink, which is all that dq, dk and dv need of it. CK's own gradient of the sink adds
// atomically and loses a factor under dropout: it is never asked for.
inline aiter::mha_bwd_args backward_arguments(const Config& config, const Tensors& tensors, const Lengths& lengths,
                                              const Scratch& scratch) {
  aiter::mha_bwd_args to{};
  fill_shared(config, tensors, lengths, scratch.zero, to);
  to.max_seqlen_k = narrow(config.keys);
  to.has_dbias = wants(config, engine::kDbias);
  to.has_dropout = has_dropout(config);
  to.is_deterministic = true;
  to.o_ptr = tensors.out;
  to.lse_ptr = tensors.lse;
  to.do_ptr = tensors.dout;
  to.d_ptr = scratch.d;
  to.dq_ptr = scratch.dq;
  to.dk_ptr = scratch.dk;
  to.dv_ptr = scratch.dv;
  to.dbias_ptr = scratch.dbias;
  to.scale = static_cast<float>(config.scale);
  to.p_undrop = 1.0f - static_cast<float>(config.dropout_p);
  ATTN_CK_STRIDES(to, do, config.out);
  ATTN_CK_STRIDES(to, dq, expanded(config, config.heads, config.queries, config.head_dim));
  ATTN_CK_STRIDES(to, dk, expanded(config, config.heads, config.keys, config.head_dim));
  ATTN_CK_STRIDES(to, dv, expanded(config, config.heads, config.keys, config.value_dim));
  to.nhead_stride_lsed = narrow(config.queries);
  to.batch_stride_lsed = config.packed ? 0 : narrow(config.heads * config.queries);
  if (to.has_dbias) {
    to.stride_dbias = narrow(config.keys);
    to.nhead_stride_dbias = narrow(config.queries * config.keys);
    to.batch_stride_dbias = narrow(config.heads * config.queries * config.keys);
  }
  return to;
}

// Packed calls of newer versions copy their tables through page-locked memory of the caller.
template <typename Arguments, typename Allocate>
void set_pinned(Arguments& to, Allocate allocate) {
  if constexpr (TakesPinned<Arguments>::value) to.pinned_host_alloc = allocate;
}

#undef ATTN_CK_STRIDES

}  // namespace attn::ck
