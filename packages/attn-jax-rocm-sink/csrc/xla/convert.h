// Conversion of small operands in host memory to what engines take: contiguous float32 and int64. Exact; gradients are rounded once on the
// way back.
#pragma once

#include <vector>

#include "attn/float_bits.h"
#include "buffers.h"

namespace attn::engine {

template <typename T>
std::vector<float> widen(const void* data, size_t count) {
  const T* values = static_cast<const T*>(data);
  std::vector<float> wide(count);
  for (size_t i = 0; i < count; ++i) wide[i] = to_float(values[i]);
  return wide;
}

template <typename T>
void narrow(const std::vector<float>& values, void* data) {
  T* narrow_values = static_cast<T*>(data);
  for (size_t i = 0; i < values.size(); ++i) narrow_values[i] = from_float<T>(values[i]);
}

// A float operand as float32: the buffer itself, or a converted copy.
class FloatOperand {
 public:
  FloatOperand() = default;
  FloatOperand(std::string_view name, const ffi::AnyBuffer& buffer) {
    const DType type = float_type(name, buffer);
    if (type == DType::float32) {
      data_ = static_cast<const float*>(data_of(buffer));
      return;
    }
    const void* source = data_of(buffer);
    copy_ = type == DType::bfloat16 ? widen<bfloat16>(source, buffer.element_count()) : widen<float16>(source, buffer.element_count());
    copy_.reserve(1);
    data_ = copy_.data();
  }

  const float* data() const { return data_; }

 private:
  std::vector<float> copy_;
  const float* data_ = nullptr;
};

// A float result that a kernel writes as float32: the buffer itself, or a copy that ``store`` rounds into it.
class FloatResult {
 public:
  FloatResult() = default;
  FloatResult(std::string_view name, const ffi::AnyBuffer& buffer) : type_(float_type(name, buffer)), target_(data_of(buffer)) {
    if (type_ != DType::float32) copy_.resize(buffer.element_count());
    copy_.reserve(1);
  }

  float* data() { return type_ == DType::float32 ? static_cast<float*>(target_) : copy_.data(); }

  void store() const {
    if (type_ == DType::bfloat16) narrow<bfloat16>(copy_, target_);
    if (type_ == DType::float16) narrow<float16>(copy_, target_);
  }

 private:
  DType type_ = DType::float32;
  void* target_ = nullptr;
  std::vector<float> copy_;
};

// int32 or int64 as int64; without 64-bit mode JAX has int32 only.
inline std::vector<int64_t> integers(std::string_view name, const ffi::AnyBuffer& buffer) {
  const size_t size = buffer.element_count();
  std::vector<int64_t> wide;
  wide.reserve(size + 1);
  if (buffer.element_type() == ffi::S32) {
    const int32_t* values = static_cast<const int32_t*>(data_of(buffer));
    wide.assign(values, values + size);
  } else if (buffer.element_type() == ffi::S64) {
    const int64_t* values = static_cast<const int64_t*>(data_of(buffer));
    wide.assign(values, values + size);
  } else {
    throw InvalidCall(std::string(name) + " must be int32 or int64");
  }
  return wide;
}

}  // namespace attn::engine
