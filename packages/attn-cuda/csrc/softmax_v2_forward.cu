// Softmax of contract ordered-v2, forward. A warp takes a tile and keeps its exponentials in registers while one warp of the row's team
// merges the tiles; global memory is read once and written once. Teams with more tiles than warps read twice and recompute.
#include "launch.cuh"
#include "long_launch.cuh"

namespace attn_cuda {
namespace {

struct ForwardArguments {
  Axes axes;
  int64_t keys;
  Source scores;
  attn_cuda_mask mask;
  void* probs;
  bool probs_are_float;
  float* row_max;
  float* row_sum;
};

template <typename In, int V, bool Masked>
__device__ __forceinline__ void store_probs(const ForwardArguments& arguments, int64_t row, const Keys& keys, LongTile tile, int lane,
                                            const LongSlots& values) {
  if (sizeof(In) == sizeof(float) || arguments.probs_are_float) {
    store_long<float, V, Masked>(static_cast<float*>(arguments.probs) + row * arguments.keys, keys, tile, lane, values);
  } else {
    store_long<In, V, Masked>(static_cast<In*>(arguments.probs) + row * arguments.keys, keys, tile, lane, values);
  }
}

template <typename In>
__device__ __forceinline__ void store_dropped(const ForwardArguments& arguments, int64_t row, const uint8_t* kept, int first, int step) {
  const int total = static_cast<int>(arguments.keys);
  if (sizeof(In) == sizeof(float) || arguments.probs_are_float) {
    store_zeros(static_cast<float*>(arguments.probs) + row * arguments.keys, kept, total, first, step);
  } else {
    store_zeros(static_cast<In*>(arguments.probs) + row * arguments.keys, kept, total, first, step);
  }
}

// `Resident`: a team has a warp for every tile.
template <typename In, int V, bool Masked, bool Wide, bool Resident>
__global__ void __launch_bounds__(Wide ? kLongWarps<In> * kLanes : kNarrowThreads, !Wide      ? kLongNarrowBlocks
                                                                                   : Resident ? kLongWideBlocks
                                                                                              : 1)
    softmax_v2_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ attn::RowState states[kLongChunk];
  __shared__ float factors[kLongChunk];
  __shared__ attn::RowState shared_row;
  const Team<Wide> team;
  const Axes& axes = arguments.axes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place(); row < axes.rows; row += step) {
    const In* scores = static_cast<const In*>(arguments.scores.data) + row_offset(axes, arguments.scores.strides, row);
    const Keys keys = keys_of_row<Masked>(axes, arguments.mask, arguments.keys, row);
    const int tiles = long_tiles(keys.count);
    attn::RowState state = attn::empty_row();
    LongScores<In> loaded;
    LongSlots values;
    uint32_t masked = 0;
    float max = attn::negative_infinity();
    if constexpr (!Wide) {
      if (tiles > 0) {
        const LongTile tile(keys, 0);
        load_long<In, V, Masked>(scores, keys, tile, team.lane, loaded);
        max = long_exponentials(loaded, tile, values, masked);
        state = long_state<V>(values, max, team.lane);
        long_probabilities(values, long_factor(max, state), masked);
        store_probs<In, V, Masked>(arguments, row, keys, tile, team.lane, values);
      }
    } else if constexpr (Resident) {
      if (team.warp < tiles) {
        const LongTile tile(keys, team.warp);
        load_long<In, V, Masked>(scores, keys, tile, team.lane, loaded);
        max = long_exponentials(loaded, tile, values, masked);
        const attn::RowState found = long_state<V>(values, max, team.lane);
        if (team.lane == 0) states[team.warp] = found;
      }
      team.sync();
      if (team.warp == 0) {
        state = merge_long_tiles(states, tiles, state, team.lane);
        if (team.lane < tiles) factors[team.lane] = long_factor(states[team.lane].max, state);
      }
      team.sync();
      if (team.warp < tiles) {
        const LongTile tile(keys, team.warp);
        long_probabilities(values, factors[team.warp], masked);
        store_probs<In, V, Masked>(arguments, row, keys, tile, team.lane, values);
      }
    } else {
      for (int begin = 0; begin < tiles; begin += kLongChunk) {
        const int end = min(tiles, begin + kLongChunk);
        for (int index = begin + team.warp; index < end; index += team.warps) {
          const LongTile tile(keys, index);
          load_long<In, V, Masked>(scores, keys, tile, team.lane, loaded);
          max = long_exponentials(loaded, tile, values, masked);
          const attn::RowState found = long_state<V>(values, max, team.lane);
          if (team.lane == 0) states[index - begin] = found;
        }
        team.sync();
        if (team.warp == 0) state = merge_long_tiles(states, end - begin, state, team.lane);
        if (end < tiles) team.sync();
      }
      if (team.member == 0) shared_row = state;
      team.sync();
      state = shared_row;
      for (int index = team.warp; index < tiles; index += team.warps) {
        const LongTile tile(keys, index);
        load_long<In, V, Masked>(scores, keys, tile, team.lane, loaded);
        max = long_exponentials(loaded, tile, values, masked);
        long_probabilities(values, long_factor(max, state), masked);
        store_probs<In, V, Masked>(arguments, row, keys, tile, team.lane, values);
      }
    }
    if (team.member == 0) {
      arguments.row_max[row] = state.max;
      arguments.row_sum[row] = state.sum;
    }
    if constexpr (Masked) store_dropped<In>(arguments, row, keys.kept, team.member, team.size);
    if constexpr (Wide) team.sync();  // the next row's states go where these were
  }
}

template <typename In>
cudaError_t launch_forward(const ForwardArguments& arguments, bool masked, bool vectors, void* stream) {
  const Block block = long_block(arguments.keys, kLongWarps<In>);
  void (*kernel)(ForwardArguments);
  if (!block.wide) {
    kernel = masked    ? softmax_v2_forward_kernel<In, 1, true, false, true>
             : vectors ? softmax_v2_forward_kernel<In, 4, false, false, true>
                       : softmax_v2_forward_kernel<In, 1, false, false, true>;
  } else if (!block.staged) {
    kernel = masked ? softmax_v2_forward_kernel<In, 1, true, true, false> : softmax_v2_forward_kernel<In, 1, false, true, false>;
  } else {
    kernel = masked    ? softmax_v2_forward_kernel<In, 1, true, true, true>
             : vectors ? softmax_v2_forward_kernel<In, 4, false, true, true>
                       : softmax_v2_forward_kernel<In, 1, false, true, true>;
  }
  return launch(kernel, arguments, arguments.axes.rows, block, stream);
}

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_softmax_v2_forward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                            const attn_cuda_mask* mask, void* probs, int32_t probs_dtype, float* row_max, float* row_sum) {
  using namespace attn_cuda;
  if (const int refusal = check_shape(shape, mask)) return refusal;
  if (scores == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (probs_dtype != scores->dtype && probs_dtype != ATTN_CUDA_FLOAT32) return ATTN_CUDA_BAD_DTYPE;
  const Axes axes = axes_of(*shape);
  if (axes.rows == 0) return 0;
  if (scores->data == nullptr || probs == nullptr || row_max == nullptr || row_sum == nullptr) return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const ForwardArguments arguments{axes,
                                   shape->keys,
                                   source_of(*scores, scores->dtype),
                                   mask == nullptr ? attn_cuda_mask{} : *mask,
                                   probs,
                                   probs_dtype == ATTN_CUDA_FLOAT32,
                                   row_max,
                                   row_sum};
  const bool vectors = quads(scores->data, scores->dtype, scores->strides) && contiguous_quads(probs, probs_dtype, shape->keys);
  switch (scores->dtype) {
    case ATTN_CUDA_FLOAT32:
      return launch_forward<float>(arguments, mask != nullptr, vectors, stream);
    case ATTN_CUDA_BFLOAT16:
      return launch_forward<attn::bfloat16>(arguments, mask != nullptr, vectors, stream);
    case ATTN_CUDA_FLOAT16:
      return launch_forward<attn::float16>(arguments, mask != nullptr, vectors, stream);
    default:
      return ATTN_CUDA_BAD_DTYPE;
  }
}
