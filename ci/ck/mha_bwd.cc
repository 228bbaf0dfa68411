// Test code. aiter::mha_bwd as a call of Composable Kernel's own fmha_bwd: the sum dout . out, dk and dv with a float32 dq of each split of
// keys, and the sum of the splits.
//
// Source of the names: fmha_bwd.hpp of Composable Kernel, example/ck_tile/01_fmha.
#include <mha_bwd.h>

#include <stdexcept>

#include "fmha_bwd.hpp"

namespace aiter {

#define COPY(NAME) to.NAME = a.NAME

float mha_bwd(mha_bwd_args a, const ck_tile::stream_config& config) {
  if (a.is_group_mode || a.bias_type != 0 || a.has_dropout || !a.is_deterministic)
    throw std::runtime_error("the kernels that were built have no such option");
  fmha_bwd_traits traits{};
  traits.hdim_q = a.hdim_q;
  traits.hdim_v = a.hdim_v;
  traits.data_type = a.data_type;
  traits.mask_type = mask_enum::mask_top_left;  // of the kernel that was built; without a bound it hides nothing
  traits.bias_type = bias_enum::no_bias;
  traits.is_deterministic = true;
  fmha_bwd_args to{};
  COPY(q_ptr), COPY(k_ptr), COPY(v_ptr), COPY(o_ptr), COPY(lse_ptr), COPY(do_ptr);
  COPY(d_ptr), COPY(dq_ptr), COPY(dk_ptr), COPY(dv_ptr), COPY(cu_seqlen_q_ptr), COPY(cu_seqlen_k_ptr);
  COPY(seqlen_q), COPY(seqlen_k), COPY(batch), COPY(max_seqlen_q), COPY(max_seqlen_k), COPY(hdim_q), COPY(hdim_v), COPY(nhead_q);
  COPY(nhead_k), COPY(scale), COPY(p_undrop), COPY(window_size_left), COPY(window_size_right);
  COPY(stride_q), COPY(stride_k), COPY(stride_v), COPY(stride_o), COPY(stride_do), COPY(stride_dq), COPY(stride_dk), COPY(stride_dv);
  COPY(nhead_stride_q), COPY(nhead_stride_k), COPY(nhead_stride_v), COPY(nhead_stride_o), COPY(nhead_stride_do), COPY(nhead_stride_lsed);
  COPY(nhead_stride_dq), COPY(nhead_stride_dk), COPY(nhead_stride_dv);
  COPY(batch_stride_q), COPY(batch_stride_k), COPY(batch_stride_v), COPY(batch_stride_o), COPY(batch_stride_do), COPY(batch_stride_lsed);
  COPY(batch_stride_dq), COPY(batch_stride_dk), COPY(batch_stride_dv);
  to.mask_type = a.mask_type == 0 ? 1 : a.mask_type;
  constexpr int64_t kSplit = 128;  // keys of the kernels up to 128 columns
  const int64_t head = int64_t{a.seqlen_q} * a.hdim_q, split = head * a.nhead_q * a.batch;
  // A causal kernel writes no split that its rows do not see.
  to.dq_acc_ptr = a.workspace_alloc(4 * split * ((a.seqlen_k + kSplit - 1) / kSplit), true);
  to.stride_dq_acc = a.hdim_q;
  to.nhead_stride_dq_acc = static_cast<ck_tile::index_t>(head);
  to.batch_stride_dq_acc = static_cast<ck_tile::index_t>(head * a.nhead_q);
  to.split_stride_dq_acc = static_cast<ck_tile::index_t>(split);
  return fmha_bwd<2>(traits, to, config);
}

}  // namespace aiter
