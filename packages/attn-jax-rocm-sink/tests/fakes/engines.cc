// Engines of the package over their fakes in one library for the tests: XLA handlers of XLA's CPU platform that treat their buffers as
// device memory, and direct runs on named pointers.
#include <cstring>

#include "../../csrc/ck/engine.h"
#include "../../csrc/cuda/engine.h"
#include "../../csrc/host/engine.h"
#include "../../csrc/xla/build.h"
#include "../../csrc/xla/handlers.h"
#include "log.h"

namespace attn::engine {

const char* fingerprint() { return "fake"; }

const Engine& host_engine() {
  static const HostEngine engine;
  return engine;
}

const Engine& cuda_engine() {
  static const CudaEngine engine;
  return engine;
}

const Engine& cuda_sm90_engine() {
  static const Sm90CudaEngine engine;
  return engine;
}

const Engine& ck_engine() {
  static const CkEngine engine;
  return engine;
}

const Engine& engine_of(std::string_view name) {
  if (name == "host") return host_engine();
  if (name == "cuda") return cuda_engine();
  if (name == "cuda_sm90") return cuda_sm90_engine();
  if (name == "ck") return ck_engine();
  throw std::invalid_argument("no engine " + std::string(name));
}

// XLA's CPU has neither a stream nor an index of a device: the fakes see these.
constexpr uintptr_t kStream = 0x5EED;
constexpr int64_t kDevice = 1;

template <const Engine& (*engine)(), Pass pass>
ffi::Error run_on_fake(ffi::RemainingArgs arguments, ffi::RemainingRets returns, std::string_view operand_names,
                       std::string_view result_names, Words words) {
  return run(engine(), pass, Memory::device, reinterpret_cast<void*>(kStream), kDevice, arguments, returns, operand_names, result_names,
             words);
}

}  // namespace attn::engine

#define FAKE_DEVICE_ENGINE(NAME, GET)                                                                                                     \
  ATTN_DEFINE_QUESTIONS_(NAME, GET)                                                                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_##NAME##_forward, (::attn::engine::run_on_fake<GET, ::attn::engine::Pass::forward>),   \
                                ::attn::engine::bind_host());                                                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_##NAME##_backward, (::attn::engine::run_on_fake<GET, ::attn::engine::Pass::backward>), \
                                ::attn::engine::bind_host())

ATTN_DEFINE_QUESTIONS_(host, attn::engine::host_engine)
FAKE_DEVICE_ENGINE(cuda, attn::engine::cuda_engine);
FAKE_DEVICE_ENGINE(cuda_sm90, attn::engine::cuda_sm90_engine);
FAKE_DEVICE_ENGINE(ck, attn::engine::ck_engine);

extern "C" const char* fake_take_log() {
  std::string text;
  text.swap(fakes::log_text());
  return attn::engine::answer(std::move(text));
}

// Runs an engine on pointers: `names` are words, `pointers` in their order; the others are null. The error's text, or empty.
extern "C" const char* fake_run(const char* engine, int64_t pass, const int64_t* words, int64_t count, const char* names,
                                void* const* pointers, void* workspace, int64_t bytes) {
  using namespace attn::engine;
  try {
    Tensors tensors{};
    size_t index = 0;
    for (std::string_view name : split(names)) at(tensors, name) = pointers[index++];
    const Config config = config_from(words, static_cast<size_t>(count));
    void* stream = reinterpret_cast<void*>(kStream);
    if (static_cast<Pass>(pass) == Pass::forward) {
      engine_of(engine).forward(config, tensors, workspace, bytes, stream);
    } else {
      engine_of(engine).backward(config, tensors, workspace, bytes, stream);
    }
    return "";
  } catch (const std::exception& error) {
    return answer(error.what());
  }
}

// Names of the buffers of a call, operands then "|" then results.
extern "C" const char* fake_buffers(const char* engine, int64_t pass, const int64_t* words, int64_t count) {
  using namespace attn::engine;
  const Config config = config_from(words, static_cast<size_t>(count));
  std::string text;
  for (std::string_view name : operands(config, static_cast<Pass>(pass), engine_of(engine).kept())) text += std::string(name) + " ";
  text += "|";
  for (std::string_view name : results(config, static_cast<Pass>(pass), engine_of(engine).kept())) text += " " + std::string(name);
  return answer(text);
}
