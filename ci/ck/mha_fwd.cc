// Test code. aiter::mha_fwd as a call of Composable Kernel's own fmha_fwd, which chooses the kernel, forms its arguments and launches it.
//
// Source of the names: fmha_fwd.hpp of Composable Kernel, example/ck_tile/01_fmha.
#include <mha_fwd.h>

#include <stdexcept>

#include "fmha_fwd.hpp"

namespace aiter {

#define COPY(NAME) to.NAME = a.NAME

float mha_fwd(mha_fwd_args a, const ck_tile::stream_config& config) {
  if (a.is_group_mode || a.bias_type != 0 || a.p_drop != 0) throw std::runtime_error("the kernels that were built have no such option");
  fmha_fwd_traits traits{};
  traits.hdim_q = a.hdim_q;
  traits.hdim_v = a.hdim_v;
  traits.data_type = a.data_type;
  traits.is_v_rowmajor = true;
  traits.mask_type = mask_enum::mask_top_left;  // of the kernel that was built; without a bound it hides nothing
  traits.bias_type = bias_enum::no_bias;
  traits.has_lse = a.has_lse;
  fmha_fwd_args to{};
  COPY(q_ptr), COPY(k_ptr), COPY(v_ptr), COPY(lse_ptr), COPY(o_ptr);
  COPY(cu_seqlen_q_ptr), COPY(cu_seqlen_k_ptr);
  COPY(seqlen_q), COPY(seqlen_k), COPY(batch), COPY(max_seqlen_q), COPY(hdim_q), COPY(hdim_v), COPY(nhead_q), COPY(nhead_k), COPY(scale_s);
  COPY(stride_q), COPY(stride_k), COPY(stride_v), COPY(stride_o);
  COPY(nhead_stride_q), COPY(nhead_stride_k), COPY(nhead_stride_v), COPY(nhead_stride_o), COPY(nhead_stride_lse);
  COPY(batch_stride_q), COPY(batch_stride_k), COPY(batch_stride_v), COPY(batch_stride_o), COPY(batch_stride_lse);
  COPY(window_size_left), COPY(window_size_right);
  to.mask_type = a.mask_type == 0 ? 1 : a.mask_type;
  to.scale_p = 1;
  to.scale_o = 1;
  return fmha_fwd(traits, to, config);
}

}  // namespace aiter
