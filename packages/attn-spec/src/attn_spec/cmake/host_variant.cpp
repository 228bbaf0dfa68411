// One variant of the host kernels. Compiled once for each instruction set with ATTN_HOST_VARIANT set to its name.
#include "attn/host/bias_gradient_kernel.h"
#include "attn/host/product_kernel.h"
#include "attn/host/sm90_backward_kernel.h"
#include "attn/host/softmax_v2_kernel.h"

namespace attn::host::ATTN_HOST_VARIANT {

const Kernels kernels = {
    attention_forward,   attention_backward,  bias_gradient,      softmax_forward,   softmax_backward,
    softmax_v2_forward,  softmax_v2_backward, sm90_chain,         sm90_forward,      sm90_row_sums,
    sm90_query_gradient, sm90_key_gradients,  product_over_width, product_over_keys, product_over_queries,
};

}  // namespace attn::host::ATTN_HOST_VARIANT
