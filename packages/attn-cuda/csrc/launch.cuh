// Host side of a launch: the caller's device is kept, the block is chosen, every CUDA call's result is returned.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
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

// Shared memory of a row of `tiles` tiles, in pieces of 16 bytes: `staged` bytes, `of_tile` for each of kChunk tiles, and what belongs to
// the row.
__host__ __device__ constexpr int64_t team_bytes(int64_t tiles, int64_t staged, int of_tile) {
  constexpr int kOfRow = 64;
  return (staged + (tiles < kChunk ? tiles : kChunk) * of_tile + kOfRow + 15) / 16 * 16;
}

struct Block {
  int threads;
  int rows;     // rows at a time
  bool wide;    // a block per row, else a warp per row
  bool staged;  // the row fits in shared memory, else global memory is read twice
  size_t shared_bytes;
};

// Warps, at most `most_warps`, of a block that takes a row of `tiles` tiles: as many tiles at work on an SM as registers and shared memory
// allow when `blocks` blocks could use it. Warps that would idle in the last round do not count; fewer warps win, for their shorter waits.
inline int choose_warps(int most_warps, int64_t tiles, int64_t blocks, int64_t block_bytes, int64_t shared_bytes) {
  int chosen = 4;
  double most = 0;
  for (int warps = 4; warps <= most_warps; ++warps) {
    const int64_t resident = std::min({blocks, static_cast<int64_t>(most_warps * kWideBlocks / warps), shared_bytes / block_bytes});
    const int64_t rounds = (tiles + warps - 1) / warps;
    const double working = static_cast<double>(resident * tiles) / static_cast<double>(rounds);
    if (working > most) {
      most = working;
      chosen = warps;
    }
  }
  return chosen;
}

// Block for `rows` rows of `keys` keys, of which staged_of(tiles) bytes can be staged; `of_tile` is that of team_bytes. The choice moves no
// bit.
template <typename StagedOf>
cudaError_t choose_block(int device, int most_threads, int64_t rows, int64_t keys, StagedOf staged_of, int of_tile, Block* block) {
  int limit = 0, total = 0, processors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&total, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t tiles = (keys + kRowTile - 1) / kRowTile;
  if (tiles <= 4) {
    const int teams = kNarrowThreads / kLanes;
    *block = Block{kNarrowThreads, teams, false, true, static_cast<size_t>(teams * team_bytes(tiles, staged_of(tiles), of_tile))};
    return cudaSuccess;
  }
  // Two blocks an SM at least, so that one loads while the other computes.
  const bool staged = team_bytes(tiles, staged_of(tiles), of_tile) <= limit / 2;
  const int64_t bytes = team_bytes(tiles, staged ? staged_of(tiles) : 0, of_tile);
  const int64_t of_system = 1024;  // shared memory that every block takes besides its own
  const int warps = choose_warps(most_threads / kLanes, tiles, (rows + processors - 1) / processors, bytes + of_system, total);
  *block = Block{warps * kLanes, 1, true, staged, static_cast<size_t>(bytes)};
  return cudaSuccess;
}

inline int64_t size_of(int32_t dtype) { return dtype == ATTN_CUDA_FLOAT32 ? 4 : 2; }

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
