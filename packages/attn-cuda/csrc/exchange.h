// Tensors as torch hands them out in C: the part of DLPack's exchange table that reads a tensor object in place. It is plain data with a
// version, so a consumer needs no header of torch and runs with every torch that has the table.
//
// Source: DLPack 1.3, DLTensor and DLPackExchangeAPI (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

struct ExchangedTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t axes;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data) + byte_offset; }
};

struct ExchangeTable {
  uint32_t major, minor;
  const void* earlier;
  void (*allocate)();
  void (*share)();
  void (*to_python)();
  int (*read)(void* object, ExchangedTensor* out);
  void (*stream)();
};

constexpr uint32_t kExchangeMajor = 1;

// The table that a tensor class shows; std::runtime_error for one of another layout or without a way to read a tensor in place.
inline const ExchangeTable* exchange_table(const pybind11::capsule& capsule) {
  const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw pybind11::error_already_set();
  if (table->major != kExchangeMajor || table->read == nullptr)
    throw std::runtime_error("attn_cuda: the exchange table of torch.Tensor cannot be read");
  return table;
}
