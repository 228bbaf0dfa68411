// XLA FFI handlers of the host engine, for XLA's CPU platform.
#include "../xla/handlers.h"
#include "../xla/build.h"
#include "attn/host/arrays.h"
#include "engine.h"

namespace attn::engine {

const Engine& host_engine() {
  static const HostEngine engine;
  return engine;
}

const Engine& host_sm90_engine() {
  static const Sm90HostEngine engine;
  return engine;
}

const char* fingerprint() { return host::build_fingerprint(); }

}  // namespace attn::engine

ATTN_DEFINE_HOST_ENGINE(host, attn::engine::host_engine);
ATTN_DEFINE_HOST_ENGINE(host_sm90, attn::engine::host_sm90_engine);

extern "C" void attn_jax_rocm_sink_host_sm90_bind(const float* table) { attn::engine::bind_ex2(table); }
