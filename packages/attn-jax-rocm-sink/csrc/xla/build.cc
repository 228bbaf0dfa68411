// What this library was built from, readable without JAX: a runtime older than these headers must be refused before a handler is
// registered.
#include "build.h"

#include "xla/ffi/api/c_api.h"

#if !defined(ATTN_BUILD_JAXLIB)
#error "the build must define ATTN_BUILD_JAXLIB"
#endif

#define ATTN_TEXT_(value) #value
#define ATTN_TEXT(value) ATTN_TEXT_(value)

extern "C" const char* attn_jax_rocm_sink_jaxlib() { return ATTN_BUILD_JAXLIB; }

extern "C" const char* attn_jax_rocm_sink_ffi_version() { return ATTN_TEXT(XLA_FFI_API_MAJOR) "." ATTN_TEXT(XLA_FFI_API_MINOR); }

extern "C" const char* attn_jax_rocm_sink_fingerprint() { return attn::engine::fingerprint(); }
