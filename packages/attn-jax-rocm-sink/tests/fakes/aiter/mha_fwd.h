// Stands for AITER's header of the same name: the members that the adapter may set, by the names that AITER documents, in an order of its
// own. FAKE_AITER_OLD leaves out what versions before the sinks lack; FAKE_AITER_OVER_CK takes the types of HIP and CK from CK's header.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#if defined(FAKE_AITER_OVER_CK)
#include <ck_tile/core.hpp>
#include <ck_tile/host/stream_config.hpp>
#else
using hipStream_t = struct FakeStream*;

namespace ck_tile {
using index_t = int32_t;
struct stream_config {
  hipStream_t stream_id_ = nullptr;
  bool time_kernel_ = true;
  int log_level_ = 0;
};
}  // namespace ck_tile
#endif

namespace aiter {

using SeedAndOffset = std::variant<std::pair<uint64_t, uint64_t>, std::pair<const void*, const void*>>;

struct mha_fwd_args {
  float p_drop, scale_s, logits_soft_cap;
  int mask_type, window_size_left, window_size_right, sink_size, min_seqlen_q;
  const void *q_ptr, *k_ptr, *v_ptr, *bias_ptr;
  void *rand_val_ptr, *lse_ptr, *o_ptr;
  const void *seqstart_q_ptr, *seqstart_k_ptr, *seqlen_q_ptr, *seqlen_k_ptr, *cu_seqlen_q_ptr, *cu_seqlen_k_ptr;
#if !defined(FAKE_AITER_OLD)
  const void* sink_ptr;
  bool has_sink;
#endif
  bool use_asm_v3, v3_api_check, is_group_mode, has_lse, s_randval;
  int how_v3_bf16_cvt, bias_type, qscale_type;
  std::string data_type;
  int seqlen_q, seqlen_k, batch, max_seqlen_q, hdim_q, hdim_v, nhead_q, nhead_k;
  int stride_q, stride_k, stride_v, stride_bias, stride_randval, stride_o;
  int nhead_stride_q, nhead_stride_k, nhead_stride_v, nhead_stride_bias, nhead_stride_randval, nhead_stride_lse, nhead_stride_o;
  int batch_stride_q, batch_stride_k, batch_stride_v, batch_stride_bias, batch_stride_randval, batch_stride_lse, batch_stride_o;
  SeedAndOffset drop_seed_offset;
};

float mha_fwd(mha_fwd_args arguments, const ck_tile::stream_config& config);

}  // namespace aiter
