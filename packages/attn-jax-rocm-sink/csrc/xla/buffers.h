// Operands and results of one XLA FFI call, addressed by name. The call carries its names as attributes, so that an absent optional
// operand is a missing name and never a null pointer or a zero size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../config.h"
#include "xla/ffi/api/ffi.h"

namespace attn::engine {

namespace ffi = ::xla::ffi;

class Buffers {
 public:
  void add(std::string_view name, ffi::AnyBuffer buffer) {
    if (!buffers_.emplace(std::string(name), buffer).second) throw InvalidCall("operand " + std::string(name) + " is given twice");
  }

  const ffi::AnyBuffer* find(std::string_view name) const {
    const auto found = buffers_.find(name);
    return found == buffers_.end() ? nullptr : &found->second;
  }

  const ffi::AnyBuffer& at(std::string_view name) const {
    const ffi::AnyBuffer* found = find(name);
    if (found == nullptr) throw InvalidCall("operand " + std::string(name) + " is missing");
    return *found;
  }

  // Refuses buffers that are in none of the lists.
  void require_only(const std::vector<std::string_view>& names, const std::vector<std::string_view>& more) const {
    for (const auto& entry : buffers_)
      if (std::find(names.begin(), names.end(), entry.first) == names.end() &&
          std::find(more.begin(), more.end(), entry.first) == more.end())
        throw InvalidCall("operand " + entry.first + " has no place in this call");
  }

 private:
  std::map<std::string, ffi::AnyBuffer, std::less<>> buffers_;
};

inline std::vector<std::string_view> split(std::string_view names) {
  std::vector<std::string_view> found;
  while (!names.empty()) {
    const size_t end = names.find(' ');
    found.push_back(names.substr(0, end));
    names = end == std::string_view::npos ? std::string_view() : names.substr(end + 1);
  }
  return found;
}

// Names the operands (RemainingArgs) or results (RemainingRets) in the order of ``names``.
template <typename List>
Buffers name_buffers(std::string_view names, const List& list) {
  const std::vector<std::string_view> order = split(names);
  if (order.size() != list.size())
    throw InvalidCall("the call has " + std::to_string(list.size()) + " buffers for the names '" + std::string(names) + "'");
  Buffers buffers;
  for (size_t i = 0; i < order.size(); ++i) {
    auto buffer = list.template get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) throw InvalidCall(buffer.error().message());
    if constexpr (std::is_same_v<List, ffi::RemainingRets>) {
      buffers.add(order[i], **buffer);
    } else {
      buffers.add(order[i], *buffer);
    }
  }
  return buffers;
}

inline void require_count(std::string_view name, const ffi::AnyBuffer& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.element_count()) != count)
    throw InvalidCall(std::string(name) + " has " + std::to_string(buffer.element_count()) + " elements; the call needs " +
                      std::to_string(count));
}

inline void require_type(std::string_view name, const ffi::AnyBuffer& buffer, ffi::DataType type) {
  if (buffer.element_type() != type) throw InvalidCall(std::string(name) + " has an element type that this handler does not take");
}

inline DType float_type(std::string_view name, const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return DType::float32;
    case ffi::BF16:
      return DType::bfloat16;
    case ffi::F16:
      return DType::float16;
    default:
      throw InvalidCall(std::string(name) + " must be float32, bfloat16 or float16");
  }
}

// XLA may hand out a null pointer for a buffer without elements; engines read null as absent.
inline void* data_of(const ffi::AnyBuffer& buffer) {
  static int64_t empty;
  return buffer.element_count() == 0 ? &empty : buffer.untyped_data();
}

}  // namespace attn::engine
