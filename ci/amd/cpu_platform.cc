// Test code. Lets XLA's CPU platform call the handlers of the hip engine's library, which ask for a stream: the call frame goes through
// unchanged but for the two functions that answer what only a device has, its stream and its index.
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* attn_jax_rocm_sink_hip_forward(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* attn_jax_rocm_sink_hip_backward(XLA_FFI_CallFrame* frame);

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

XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
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

extern "C" XLA_FFI_Error* attn_cpu_platform_forward(XLA_FFI_CallFrame* frame) { return call(attn_jax_rocm_sink_hip_forward, frame); }
extern "C" XLA_FFI_Error* attn_cpu_platform_backward(XLA_FFI_CallFrame* frame) { return call(attn_jax_rocm_sink_hip_backward, frame); }
