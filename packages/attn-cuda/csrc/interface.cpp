// The table of attn/cuda/interface.h, a symbol of the compiled module that needs no interpreter state.
#include "attention.h"

extern "C" __attribute__((visibility("default"))) const attn_cuda_interface* attn_cuda_interface_v1() {
  static const attn_cuda_interface table = {
      ATTN_CUDA_INTERFACE_VERSION,
      sizeof(attn_cuda_attention),
      sizeof(attn_cuda_attention_results),
      sizeof(attn_cuda_attention_gradients),
      attn_cuda_fingerprint,
      attn_cuda_architectures,
      attn_cuda_message,
      attn_cuda_probe,
      attn_cuda_probe_names,
      attn_cuda_attention_forward_workspace,
      attn_cuda_attention_backward_workspace,
      attn_cuda_attention_forward,
      attn_cuda_attention_backward,
  };
  return &table;
}
