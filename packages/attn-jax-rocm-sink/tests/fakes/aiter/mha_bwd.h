// Stands for AITER's header of the same name; see mha_fwd.h.
#pragma once

#include <functional>
#include <memory>

#include "mha_fwd.h"

namespace aiter {

struct mha_bwd_args {
  std::function<void*(size_t bytes, bool zero_init)> workspace_alloc;
#if !defined(FAKE_AITER_OLD)
  std::function<std::shared_ptr<void>(size_t bytes)> pinned_host_alloc;
  const void* sink_ptr;
  void* d_sink_ptr;
#endif
  float p_drop, p_undrop, scale;
  int mask_type, window_size_left, window_size_right, bias_type, v3_bf16_cvt;
  const void *q_ptr, *k_ptr, *v_ptr, *bias_ptr, *o_ptr, *lse_ptr, *do_ptr;
  void *d_ptr, *rand_val_ptr, *dq_ptr, *dk_ptr, *dv_ptr, *dbias_ptr;
  const void *seqstart_q_ptr, *seqstart_k_ptr, *seqlen_q_ptr, *seqlen_k_ptr, *cu_seqlen_q_ptr, *cu_seqlen_k_ptr;
  bool use_asm_v3, v3_atomic_fp32, v3_api_check, is_group_mode, has_dbias, has_dropout, is_store_randval, is_deterministic;
  std::string data_type;
  int seqlen_q, seqlen_k, batch, max_seqlen_q, max_seqlen_k, hdim_q, hdim_v, nhead_q, nhead_k;
  int stride_q, stride_k, stride_v, stride_bias, stride_o, stride_randval, stride_do, stride_dq, stride_dk, stride_dv, stride_dbias;
  int nhead_stride_q, nhead_stride_k, nhead_stride_v, nhead_stride_bias, nhead_stride_o, nhead_stride_randval, nhead_stride_do,
      nhead_stride_lsed, nhead_stride_dq, nhead_stride_dk, nhead_stride_dv, nhead_stride_dbias;
  int batch_stride_q, batch_stride_k, batch_stride_v, batch_stride_bias, batch_stride_o, batch_stride_randval, batch_stride_do,
      batch_stride_lsed, batch_stride_dq, batch_stride_dk, batch_stride_dv, batch_stride_dbias;
  SeedAndOffset drop_seed_offset;
};

float mha_bwd(mha_bwd_args arguments, const ck_tile::stream_config& config);

}  // namespace aiter
