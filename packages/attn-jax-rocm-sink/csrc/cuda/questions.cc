// What Python asks of the kernels of attn-cuda before it uses them.
#include "../xla/answer.h"
#include "engine.h"

extern "C" const char* attn_jax_rocm_sink_cuda_bind(const attn_cuda_interface* table) {
  return attn::engine::answer(attn::engine::bind_cuda(table));
}

extern "C" const char* attn_jax_rocm_sink_cuda_fingerprint(const attn_cuda_interface* table) { return table->fingerprint(); }

// Why the kernels do not run on a device, or empty. Waits for the device.
extern "C" const char* attn_jax_rocm_sink_cuda_probe(const attn_cuda_interface* table, int64_t device) {
  uint32_t failed = 0;
  if (const int code = table->probe(static_cast<int>(device), &failed))
    return attn::engine::answer("attn-cuda, built for " + std::string(table->architectures()) + ", does not run on device " +
                                std::to_string(device) + ": " + table->message(code));
  if (failed == 0) return "";
  std::string names, left = table->probe_names();
  for (uint32_t bits = failed; bits != 0 && !left.empty(); bits >>= 1) {
    const size_t comma = left.find(',');
    if ((bits & 1) != 0) names += (names.empty() ? "" : ", ") + left.substr(0, comma);
    left = comma == std::string::npos ? "" : left.substr(comma + 1);
  }
  return attn::engine::answer("this build of attn-cuda does not compute IEEE arithmetic on device " + std::to_string(device) + ": " +
                              names);
}

extern "C" const char* attn_jax_rocm_sink_cuda_sm90_bind(const attn_cuda_sm90_interface* table) {
  return attn::engine::answer(attn::engine::bind_cuda_sm90(table));
}

extern "C" const char* attn_jax_rocm_sink_cuda_sm90_probe(int64_t device) {
  return attn::engine::answer(attn::engine::probe_cuda_sm90(device));
}
