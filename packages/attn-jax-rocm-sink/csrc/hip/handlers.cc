// XLA FFI handlers of the hip engine, for XLA's ROCm platform. A call only enqueues kernels and fills on XLA's stream, from memory that XLA
// owns, so it may be part of a command buffer.
#include "../xla/handlers.h"
#include "../xla/build.h"
#include "engine.h"

#if !defined(ATTN_HIP_FINGERPRINT)
#error "the build must define ATTN_HIP_FINGERPRINT"
#endif

namespace attn::engine {

const Engine& hip_engine() {
  static const HipEngine engine;
  return engine;
}

const char* fingerprint() { return ATTN_HIP_FINGERPRINT; }

}  // namespace attn::engine

ATTN_DEFINE_DEVICE_ENGINE(hip, attn::engine::hip_engine, ::xla::ffi::Traits::kCmdBufferCompatible);
