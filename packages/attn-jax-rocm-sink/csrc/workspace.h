// Workspace of a pass as named parts. The same plan sizes the buffer and finds the parts in it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config.h"

namespace attn::engine {

constexpr int64_t kAlignment = 256;  // of every part; vector loads of 16 bytes need less

struct Part {
  std::string name;
  int64_t offset, bytes;
};

class Plan {
 public:
  // A part of `bytes`; none when it is zero.
  void add(std::string_view name, int64_t bytes) {
    if (bytes < 0) throw InvalidCall("workspace part " + std::string(name) + " has a negative size");
    if (find(name) != nullptr) throw std::logic_error("workspace part " + std::string(name) + " is planned twice");
    if (bytes == 0) return;
    parts_.push_back({std::string(name), bytes_, bytes});
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  const Part* find(std::string_view name) const {
    for (const Part& part : parts_)
      if (part.name == name) return &part;
    return nullptr;
  }

  int64_t bytes() const { return bytes_; }
  const std::vector<Part>& parts() const { return parts_; }

 private:
  std::vector<Part> parts_;
  int64_t bytes_ = 0;
};

// A buffer laid out by a plan; refuses one that is too small.
class Workspace {
 public:
  Workspace(const Plan& plan, void* data, int64_t bytes) : plan_(plan), data_(static_cast<char*>(data)) {
    if (bytes < plan.bytes())
      throw InvalidCall("the workspace has " + std::to_string(bytes) + " bytes and this call needs " + std::to_string(plan.bytes()));
    if (plan.bytes() > 0 && data == nullptr) throw InvalidCall("the workspace is a null pointer");
    if (plan.bytes() > 0 && reinterpret_cast<uintptr_t>(data) % 16 != 0) throw InvalidCall("the workspace is not aligned to 16 bytes");
  }

  // The part, or null when it was planned with no bytes or not at all.
  template <typename T>
  T* part(std::string_view name) const {
    const Part* found = plan_.find(name);
    return found == nullptr ? nullptr : reinterpret_cast<T*>(data_ + found->offset);
  }

 private:
  const Plan& plan_;
  char* data_;
};

}  // namespace attn::engine
