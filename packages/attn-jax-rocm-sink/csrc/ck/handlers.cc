// XLA FFI handlers of the ck engine, for XLA's ROCm platform. CK's packed backward calls back to the host and uses page-locked memory, so
// no call may be part of a command buffer.
#include "../xla/handlers.h"
#include "../xla/build.h"
#include "engine.h"

#if !defined(ATTN_CK_FINGERPRINT)
#error "the build must define ATTN_CK_FINGERPRINT"
#endif

namespace attn::engine {

const Engine& ck_engine() {
  static const CkEngine engine;
  return engine;
}

const char* fingerprint() { return ATTN_CK_FINGERPRINT; }

}  // namespace attn::engine

ATTN_DEFINE_DEVICE_ENGINE(ck, attn::engine::ck_engine);

extern "C" const char* attn_jax_rocm_sink_ck_sinks() { return attn::engine::CkEngine::has_native_sinks() ? "native" : "rescaled"; }
