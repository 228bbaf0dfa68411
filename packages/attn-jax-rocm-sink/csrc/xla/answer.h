#pragma once

#include <string>
#include <utility>

namespace attn::engine {

// Text that lives until the thread's next question.
inline const char* answer(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace attn::engine
