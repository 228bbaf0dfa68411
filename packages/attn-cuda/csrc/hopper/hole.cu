// Where the masked keys of each batch item begin and end, for joint attention.
#include "hopper/hole.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;

struct HoleArguments {
  const uint8_t* kept;
  int64_t batch, keys;
  Hole* holes;
};

// A block for an item.
__global__ void __launch_bounds__(kThreads) find_holes_kernel(const __grid_constant__ HoleArguments arguments) {
  __shared__ int32_t firsts[kWarps], lasts[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const auto keys = static_cast<int32_t>(arguments.keys);
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < arguments.batch; item += gridDim.x) {
    const uint8_t* kept = arguments.kept + item * arguments.keys;
    int32_t first = INT32_MAX, last = -1;
    for (int64_t key = thread; key < arguments.keys; key += kThreads) {
      if (kept[key] != 0) continue;
      first = min(first, static_cast<int32_t>(key));
      last = static_cast<int32_t>(key);
    }
    first = __reduce_min_sync(kAllLanes, first);
    last = __reduce_max_sync(kAllLanes, last);
    if (thread % kLanes == 0) firsts[thread / kLanes] = first, lasts[thread / kLanes] = last;
    __syncthreads();
    if (thread == 0) {
      for (int warp = 1; warp < kWarps; ++warp) first = min(first, firsts[warp]), last = max(last, lasts[warp]);
      const int64_t end = (static_cast<int64_t>(last) / attn::sm90::kSegment + 1) * attn::sm90::kSegment;
      arguments.holes[item] = last < 0 ? Hole{kNoKey, kNoKey} : Hole{first, end < keys ? static_cast<int32_t>(end) : keys};
    }
    __syncthreads();
  }
}

}  // namespace

int find_holes(const attn_cuda_attention& problem, Workspace& space, void* stream, const Hole** holes) {
  *holes = nullptr;
  if (problem.key_mask == nullptr || problem.batch == 0) return 0;
  Hole* found = space.take<Hole>(problem.batch);
  *holes = found;
  const Block block{kThreads, 1, true, false, 0};
  return launch(find_holes_kernel, HoleArguments{problem.key_mask, problem.batch, problem.keys, found}, problem.batch, block, stream);
}

}  // namespace attn_cuda::hopper
