// Host side of a launch: the caller's device is kept, the shape is checked, the block is chosen, every CUDA call's result is returned.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "rows.cuh"

namespace attn_cuda {

// Makes `device` current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device_) error_ = cudaSetDevice(device_);
  }
  ~DeviceScope() {
    if (error_ == cudaSuccess && previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int device_;
  int previous_ = -1;
  cudaError_t error_;
};

constexpr int kChunk = 1024;  // tiles whose states a block holds at a time

struct Block {
  int threads;
  int rows;     // rows at a time
  bool wide;    // a block per row, else a warp per row
  bool staged;  // the row fits in shared memory, else global memory is read twice
  size_t shared_bytes;
};

// Block for rows of `keys` keys with `values_per_key` binary32 values staged and `state_bytes` for each tile. The choice moves no bit.
inline cudaError_t choose_block(int device, int64_t keys, int values_per_key, int state_bytes, Block* block) {
  int limit = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const int64_t tiles = (keys + attn::kTile - 1) / attn::kTile;
  const int64_t row_bytes = tiles * attn::kTile * 4 * values_per_key;
  const int64_t states = (tiles < kChunk ? tiles : kChunk) * state_bytes;
  const int64_t reserved = 64;
  if (tiles <= 4) {
    *block = Block{128, 4, false, true, static_cast<size_t>(4 * (row_bytes + states))};
    return cudaSuccess;
  }
  // Two blocks an SM at least, so that one loads while the other computes.
  const bool staged = row_bytes + states + reserved <= limit / 2;
  const int threads = !staged ? 512 : row_bytes <= 20480 ? 128 : row_bytes <= 40960 ? 256 : 512;
  *block = Block{threads, 1, true, staged, static_cast<size_t>((staged ? row_bytes : 0) + states + reserved)};
  return cudaSuccess;
}

inline int check_shape(const attn_cuda_shape* shape, const attn_cuda_mask* mask) {
  if (shape == nullptr) return ATTN_CUDA_NULL_POINTER;
  for (const int64_t size : shape->sizes)
    if (size < 0) return ATTN_CUDA_BAD_SIZE;
  if (shape->keys < 1 || shape->keys > INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  if (mask != nullptr) {
    if (mask->kept == nullptr || mask->positions == nullptr || mask->counts == nullptr) return ATTN_CUDA_NULL_POINTER;
    if (mask->rows_per_batch < 1) return ATTN_CUDA_BAD_SIZE;
  }
  return 0;
}

inline Axes axes_of(const attn_cuda_shape& shape) {
  const int64_t rows = shape.sizes[0] * shape.sizes[1] * shape.sizes[2];
  return Axes{rows, shape.sizes[1], shape.sizes[2], shape.sizes[0] == 1 && shape.sizes[1] == 1, rows <= INT32_MAX};
}

inline Source source_of(const attn_cuda_rows& rows, int32_t dtype) {
  const bool is_float = rows.dtype == ATTN_CUDA_FLOAT32 && dtype != ATTN_CUDA_FLOAT32;
  return Source{rows.data, {rows.strides[0], rows.strides[1], rows.strides[2]}, is_float};
}

inline int64_t size_of(int32_t dtype) { return dtype == ATTN_CUDA_FLOAT32 ? 4 : 2; }

// Two neighbouring keys can be accessed at once: every row starts at a multiple of two elements.
inline bool pairs(const void* data, int32_t dtype, const int64_t (&strides)[3]) {
  const bool even = strides[0] % 2 == 0 && strides[1] % 2 == 0 && strides[2] % 2 == 0;
  return even && reinterpret_cast<uintptr_t>(data) % (2 * size_of(dtype)) == 0;
}

inline bool contiguous_pairs(const void* data, int32_t dtype, int64_t keys) {
  return keys % 2 == 0 && reinterpret_cast<uintptr_t>(data) % (2 * size_of(dtype)) == 0;
}

template <typename Arguments>
cudaError_t launch(void (*kernel)(Arguments), const Arguments& arguments, int64_t rows, const Block& block, void* stream) {
  const int64_t blocks = (rows + block.rows - 1) / block.rows;
  if (block.shared_bytes > 48 * 1024) {
    const auto bytes = static_cast<int>(block.shared_bytes);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX));
  config.blockDim = dim3(static_cast<unsigned>(block.threads));
  config.dynamicSmemBytes = block.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace attn_cuda
