// Logical keys of a key padding mask: the stored positions of the kept keys of each batch item, in order.
#include "launch.cuh"

namespace attn_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;

struct CompactArguments {
  const uint8_t* kept;
  int64_t batch;
  int64_t keys;
  int32_t* positions;
  int32_t* counts;
};

__global__ void __launch_bounds__(kThreads) compact_keys_kernel(const __grid_constant__ CompactArguments arguments) {
  __shared__ int kept_of_warp[kWarps];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  for (int64_t item = blockIdx.x; item < arguments.batch; item += gridDim.x) {
    const uint8_t* kept = arguments.kept + item * arguments.keys;
    int32_t* positions = arguments.positions + item * arguments.keys;
    int written = 0;
    for (int64_t base = 0; base < arguments.keys; base += kThreads) {
      const int64_t key = base + threadIdx.x;
      const bool keep = key < arguments.keys && kept[key] != 0;
      const unsigned kept_lanes = __ballot_sync(kAllLanes, keep);
      if (lane == 0) kept_of_warp[warp] = __popc(kept_lanes);
      __syncthreads();
      int before = 0, total = 0;
      for (int i = 0; i < kWarps; ++i) {
        before += i < warp ? kept_of_warp[i] : 0;
        total += kept_of_warp[i];
      }
      if (keep) positions[written + before + __popc(kept_lanes & ((1u << lane) - 1u))] = static_cast<int32_t>(key);
      written += total;
      __syncthreads();
    }
    if (threadIdx.x == 0) arguments.counts[item] = written;
  }
}

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_compact_keys(int device, void* stream, const uint8_t* kept, int64_t batch, int64_t keys, int32_t* positions,
                                      int32_t* counts) {
  using namespace attn_cuda;
  if (batch < 0 || keys < 1 || keys > INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  if (batch == 0) return 0;
  if (kept == nullptr || positions == nullptr || counts == nullptr) return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const Block block{kThreads, 1, true, false, 0};
  return launch(compact_keys_kernel, CompactArguments{kept, batch, keys, positions, counts}, batch, block, stream);
}
