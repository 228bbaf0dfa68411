// Test code. Lets XLA's CPU platform call the handlers of an engine's library (ATTN_ENGINE is its name), which ask for a stream: the call
// frame goes through unchanged but for the two functions that answer what only a device has, its stream and its index. Results and the
// workspace are filled with 0xFF bytes first, which are NaN in every float type: what a kernel leaves out shows.
#include <cstring>

#include "xla/ffi/api/ffi.h"

#define ATTN_JOIN(A, B, C) A##B##C
#define ATTN_HANDLER(ENGINE, DIRECTION) ATTN_JOIN(attn_jax_rocm_sink_, ENGINE, DIRECTION)

extern "C" XLA_FFI_Error* ATTN_HANDLER(ATTN_ENGINE, _forward)(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* ATTN_HANDLER(ATTN_ENGINE, _backward)(XLA_FFI_CallFrame* frame);

namespace {

// The runtime's default stream.
XLA_FFI_Error* default_stream(XLA_FFI_Stream_Get_Args* arguments) {
  arguments->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* first_device(XLA_FFI_DeviceOrdinal_Get_Args* arguments) {
  arguments->device_ordinal = 0;
  return nullptr;
}

void poison(const XLA_FFI_Rets& results) {
  for (int64_t i = 0; i < results.size; ++i) {
    const auto* buffer = static_cast<const XLA_FFI_Buffer*>(results.rets[i]);
    size_t bytes = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(buffer->dtype));
    for (int64_t axis = 0; axis < buffer->rank; ++axis) bytes *= static_cast<size_t>(buffer->dims[axis]);
    if (bytes != 0) std::memset(buffer->data, 0xFF, bytes);
  }
}

XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  poison(frame->rets);  // none while XLA asks for the handler's metadata
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = default_stream;
  api.XLA_FFI_DeviceOrdinal_Get = first_device;
  const XLA_FFI_Api* const original = frame->api;
  frame->api = &api;
  XLA_FFI_Error* const error = handler(frame);
  frame->api = original;
  return error;
}

}  // namespace

extern "C" XLA_FFI_Error* attn_cpu_platform_forward(XLA_FFI_CallFrame* frame) { return call(ATTN_HANDLER(ATTN_ENGINE, _forward), frame); }
extern "C" XLA_FFI_Error* attn_cpu_platform_backward(XLA_FFI_CallFrame* frame) { return call(ATTN_HANDLER(ATTN_ENGINE, _backward), frame); }
