// XLA FFI handlers of the cuda engine, for XLA's CUDA platform.
#include "../xla/handlers.h"
#include "engine.h"

namespace attn::engine {

const Engine& cuda_engine() {
  static const CudaEngine engine;
  return engine;
}

const Engine& cuda_sm90_engine() {
  static const Sm90CudaEngine engine;
  return engine;
}

}  // namespace attn::engine

// attn-cuda enqueues kernels and memsets on the stream, allocates nothing and never waits.
ATTN_DEFINE_DEVICE_ENGINE(cuda, attn::engine::cuda_engine, ::xla::ffi::Traits::kCmdBufferCompatible);
ATTN_DEFINE_DEVICE_ENGINE(cuda_sm90, attn::engine::cuda_sm90_engine, ::xla::ffi::Traits::kCmdBufferCompatible);
