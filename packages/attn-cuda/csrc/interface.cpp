// The tables of attn/cuda/interface.h and sm90_interface.h, symbols of the compiled module that need no interpreter state.
#include "attention.h"
#include "attn/cuda/sm90_interface.h"
#ifdef ATTN_CUDA_SM90
#include "hopper/backward.h"
#include "hopper/forward.h"
#endif

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

extern "C" __attribute__((visibility("default"))) const attn_cuda_sm90_interface* attn_cuda_sm90_interface_v1() {
#ifdef ATTN_CUDA_SM90
  static const attn_cuda_sm90_interface table = {
      ATTN_CUDA_SM90_INTERFACE_VERSION, sizeof(attn_cuda_attention),       sizeof(attn_cuda_sm90_results), sizeof(attn_cuda_sm90_gradients),
      attn_cuda_sm90_forward_workspace, attn_cuda_sm90_backward_workspace, attn_cuda_sm90_forward,         attn_cuda_sm90_backward,
  };
  return &table;
#else
  return nullptr;
#endif
}
