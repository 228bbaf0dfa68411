// The face of an engine's library: two XLA FFI handlers, and what Python asks while it traces. ATTN_DEFINE_HOST_ENGINE or
// ATTN_DEFINE_DEVICE_ENGINE in one source file defines all of it.
#pragma once

#include <exception>

#include "answer.h"
#include "call.h"

namespace attn::engine {

using Words = ffi::Span<const int64_t>;

// No exception may cross into XLA.
template <typename Function>
ffi::Error guarded(Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return ffi::Error::InvalidArgument(std::string("attn_jax_rocm_sink: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("attn_jax_rocm_sink: ") + error.what());
  }
}

inline ffi::Error run(const Engine& engine, Pass pass, Memory memory, void* stream, int64_t device, const ffi::RemainingArgs& arguments,
                      const ffi::RemainingRets& returns, std::string_view operand_names, std::string_view result_names, Words words) {
  return guarded([&] {
    Config config = config_from(words.begin(), words.size());
    config.device = device;
    Call(engine, pass, memory, config, name_buffers(operand_names, arguments), name_buffers(result_names, returns)).run(stream);
  });
}

inline const char* answer_supports(const Planner& engine, int64_t pass, const int64_t* words, int64_t count) {
  try {
    return answer(engine.supports(config_from(words, static_cast<size_t>(count)), static_cast<Pass>(pass)));
  } catch (const std::exception& error) {
    return answer(error.what());
  }
}

// A line "name offset bytes" for each part of the workspace, then " bytes"; or "! " and why there is no plan.
inline const char* answer_plan(const Planner& engine, int64_t pass, const int64_t* words, int64_t count) {
  try {
    const Plan plan = engine.plan(config_from(words, static_cast<size_t>(count)), static_cast<Pass>(pass));
    std::string text;
    for (const Part& part : plan.parts()) text += part.name + " " + std::to_string(part.offset) + " " + std::to_string(part.bytes) + "\n";
    return answer(text + " " + std::to_string(plan.bytes()));
  } catch (const std::exception& error) {
    return answer(std::string("! ") + error.what());
  }
}

// Handlers of an engine that a function returns.
template <const Engine& (*engine)(), Pass pass>
ffi::Error run_on_host(ffi::RemainingArgs arguments, ffi::RemainingRets returns, std::string_view operand_names,
                       std::string_view result_names, Words words) {
  return run(engine(), pass, Memory::host, nullptr, 0, arguments, returns, operand_names, result_names, words);
}

template <const Engine& (*engine)(), Pass pass>
ffi::Error run_on_device(void* stream, int32_t device, ffi::RemainingArgs arguments, ffi::RemainingRets returns,
                         std::string_view operand_names, std::string_view result_names, Words words) {
  return run(engine(), pass, Memory::device, stream, device, arguments, returns, operand_names, result_names, words);
}

template <typename Binding>
auto bind_call(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("operands")
      .template Attr<std::string_view>("results")
      .template Attr<Words>("config");
}

inline auto bind_host() { return bind_call(ffi::Ffi::Bind()); }
inline auto bind_device() { return bind_call(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>()); }

}  // namespace attn::engine

#define ATTN_DEFINE_QUESTIONS_(NAME, GET)                                                                          \
  extern "C" const char* attn_jax_rocm_sink_##NAME##_supports(int64_t pass, const int64_t* words, int64_t count) { \
    return ::attn::engine::answer_supports(GET(), pass, words, count);                                             \
  }                                                                                                                \
  extern "C" const char* attn_jax_rocm_sink_##NAME##_plan(int64_t pass, const int64_t* words, int64_t count) {     \
    return ::attn::engine::answer_plan(GET(), pass, words, count);                                                 \
  }

// GET is a function with external linkage that returns `const Engine&`.
#define ATTN_DEFINE_HOST_ENGINE(NAME, GET)                                                                                                \
  ATTN_DEFINE_QUESTIONS_(NAME, GET)                                                                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_##NAME##_forward, (::attn::engine::run_on_host<GET, ::attn::engine::Pass::forward>),   \
                                ::attn::engine::bind_host());                                                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_##NAME##_backward, (::attn::engine::run_on_host<GET, ::attn::engine::Pass::backward>), \
                                ::attn::engine::bind_host())

// The further arguments are traits, for example ::xla::ffi::Traits::kCmdBufferCompatible.
#define ATTN_DEFINE_DEVICE_ENGINE(NAME, GET, ...)                                                                                         \
  ATTN_DEFINE_QUESTIONS_(NAME, GET)                                                                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_##NAME##_forward, (::attn::engine::run_on_device<GET, ::attn::engine::Pass::forward>), \
                                ::attn::engine::bind_device(), {__VA_ARGS__});                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_##NAME##_backward,                                                                     \
                                (::attn::engine::run_on_device<GET, ::attn::engine::Pass::backward>), ::attn::engine::bind_device(),      \
                                {__VA_ARGS__})
