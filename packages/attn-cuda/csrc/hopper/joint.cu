// Copies of the rows of joint attention: kept text in order, zeros, image. No arithmetic happens here.
#include "hopper/joint.h"

#include "launch.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kPiece = 8;  // halves that a thread copies

// A block for an item.
__global__ void __launch_bounds__(kThreads) joint_places_kernel(const __grid_constant__ attn_cuda_joint_places to) {
  __shared__ int kept_of_warp[kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < to.batch; item += gridDim.x) {
    const int64_t base = item * to.text;
    int written = 0;
    for (int64_t first = 0; first < to.text; first += kThreads) {
      const int64_t row = first + thread;
      const bool keep = row < to.text && to.mask[base + row] != 0;
      const unsigned kept_lanes = __ballot_sync(kAllLanes, keep);
      if (lane == 0) kept_of_warp[warp] = __popc(kept_lanes);
      __syncthreads();
      int before = 0, total = 0;
      for (int i = 0; i < kWarps; ++i) {
        before += i < warp ? kept_of_warp[i] : 0;
        total += kept_of_warp[i];
      }
      const int slot = written + before + __popc(kept_lanes & ((1u << lane) - 1u));
      if (row < to.text) to.slots[base + row] = keep ? slot : -1;
      if (keep) to.rows[base + slot] = static_cast<int32_t>(row);
      written += total;
      __syncthreads();
    }
    for (int64_t slot = written + thread; slot < to.text; slot += kThreads) to.rows[base + slot] = -1;
    const int64_t slots = to.first + to.image;
    for (int64_t slot = thread; slot < slots; slot += kThreads) to.kept[item * slots + slot] = slot < written || slot >= to.first;
  }
}

struct Piece {
  int64_t batch, head, row, column;
};

// Piece `id` of [batch, heads, rows, columns].
__device__ __forceinline__ Piece piece_of(int64_t id, int64_t heads, int64_t rows, int64_t columns) {
  const int64_t pieces = columns / kPiece, row = id / pieces, head = row / rows, batch = head / heads;
  return Piece{batch, head - batch * heads, row - head * rows, (id - row * pieces) * kPiece};
}

__device__ __forceinline__ uint4* at(const attn_cuda_array& array, Piece piece, int64_t row) {
  const int64_t element = piece.batch * array.strides[0] + piece.head * array.strides[1] + row * array.strides[2] + piece.column;
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(array.data)) + element);
}

__global__ void __launch_bounds__(kThreads) join_rows_kernel(const __grid_constant__ attn_cuda_joint_rows to) {
  const int64_t rows = to.first + to.image_rows, count = to.batch * to.heads * rows * (to.columns / kPiece);
  for (int64_t id = int64_t{blockIdx.x} * kThreads + threadIdx.x; id < count; id += int64_t{gridDim.x} * kThreads) {
    const Piece piece = piece_of(id, to.heads, rows, to.columns);
    uint4 values = make_uint4(0, 0, 0, 0);
    if (piece.row >= to.first) {
      values = *at(to.image, piece, piece.row - to.first);
    } else if (piece.row < to.text_rows) {
      const int32_t row = to.rows[piece.batch * to.text_rows + piece.row];
      if (row >= 0) values = *at(to.text, piece, row);
    }
    *at(to.joined, piece, piece.row) = values;
  }
}

__global__ void __launch_bounds__(kThreads) part_rows_kernel(const __grid_constant__ attn_cuda_joint_rows to) {
  const int64_t rows = to.text_rows + to.image_rows, count = to.batch * to.heads * rows * (to.columns / kPiece);
  for (int64_t id = int64_t{blockIdx.x} * kThreads + threadIdx.x; id < count; id += int64_t{gridDim.x} * kThreads) {
    const Piece piece = piece_of(id, to.heads, rows, to.columns);
    const int64_t image_row = piece.row - to.text_rows;
    if (image_row >= 0) {
      *at(to.image, piece, image_row) = *at(to.joined, piece, to.first + image_row);
      continue;
    }
    const int32_t slot = to.slots[piece.batch * to.text_rows + piece.row];
    *at(to.text, piece, piece.row) = slot < 0 ? make_uint4(0, 0, 0, 0) : *at(to.joined, piece, slot);
  }
}

int copy(int device, void* stream, const attn_cuda_joint_rows* rows, void (*kernel)(attn_cuda_joint_rows), bool parts) {
  if (rows == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (rows->columns % kPiece != 0 || rows->text_rows > rows->first) return ATTN_CUDA_BAD_SIZE;
  const int64_t lines = (parts ? rows->text_rows : rows->first) + rows->image_rows;
  const int64_t pieces = rows->batch * rows->heads * lines * (rows->columns / kPiece);
  if (pieces == 0) return 0;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  return launch(kernel, *rows, pieces, Block{kThreads, kThreads, false, false, 0}, stream);
}

}  // namespace
}  // namespace attn_cuda::hopper

extern "C" int attn_cuda_find_joint_places(int device, void* stream, const attn_cuda_joint_places* places) {
  using namespace attn_cuda;
  if (places == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (places->text > INT32_MAX || places->text > places->first) return ATTN_CUDA_BAD_SIZE;
  if (places->batch == 0) return 0;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const Block block{hopper::kThreads, 1, true, false, 0};
  return launch(hopper::joint_places_kernel, *places, places->batch, block, stream);
}

extern "C" int attn_cuda_join_rows(int device, void* stream, const attn_cuda_joint_rows* rows) {
  return attn_cuda::hopper::copy(device, stream, rows, attn_cuda::hopper::join_rows_kernel, false);
}

extern "C" int attn_cuda_part_rows(int device, void* stream, const attn_cuda_joint_rows* rows) {
  return attn_cuda::hopper::copy(device, stream, rows, attn_cuda::hopper::part_rows_kernel, true);
}
