// Softmax of contract ordered-v2, forward. A warp takes a tile and keeps its exponentials in registers while one warp of the row's team
// merges the tiles; global memory is read once and written once. Teams with more tiles than warps read twice and recompute.
#include "long_launch.cuh"

namespace attn_cuda {
namespace {

template <typename In, int V, bool Masked>
__device__ __forceinline__ void store_probs(const SoftmaxForward& arguments, int64_t row, const Keys& keys, LongTile tile, int lane,
                                            const LongSlots& values) {
  if (sizeof(In) == sizeof(float) || arguments.probs_are_float) {
    store_long<float, V, Masked>(static_cast<float*>(arguments.probs) + row * arguments.keys, keys, tile, lane, values);
  } else {
    store_long<In, V, Masked>(static_cast<In*>(arguments.probs) + row * arguments.keys, keys, tile, lane, values);
  }
}

template <typename In>
__device__ __forceinline__ void store_dropped(const SoftmaxForward& arguments, int64_t row, const uint8_t* kept, int first, int step) {
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
    softmax_v2_forward_kernel(const __grid_constant__ SoftmaxForward arguments) {
  __shared__ attn::RowState states[kLongChunk];
  __shared__ float factors[kLongChunk];
  __shared__ attn::RowState shared_row;
  const Team<Wide> team;
  const Axes& axes = arguments.axes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place(); row < axes.rows; row += step) {
    const In* scores = scores_of<In>(axes, arguments.scores, row);
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
        state = merge_tiles<attn::v2::exp_nonpositive>(states, tiles, state, team.lane);
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
        if (team.warp == 0) state = merge_tiles<attn::v2::exp_nonpositive>(states, end - begin, state, team.lane);
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
    if (team.member == 0 && arguments.row_max != nullptr) {
      arguments.row_max[row] = state.max;
      arguments.row_sum[row] = state.sum;
    }
    if constexpr (Masked) store_dropped<In>(arguments, row, keys.kept, team.member, team.size);
    if constexpr (Wide) team.sync();  // the next row's states go where these were
  }
}

template <typename In>
struct Kernels {
  template <int V, bool Masked, bool Wide, bool Resident>
  static auto kernel() {
    return softmax_v2_forward_kernel<In, V, Masked, Wide, Resident>;
  }
};

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_softmax_v2_forward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                            const attn_cuda_mask* mask, void* probs, int32_t probs_dtype, float* row_max, float* row_sum) {
  using namespace attn_cuda;
  return run_forward<4>(device, shape, scores, mask, probs, probs_dtype, row_max, row_sum,
                        [&](auto element, const SoftmaxForward& arguments, bool vectors) {
                          const Block block = long_block(arguments.keys, kLongWarps<decltype(element)>);
                          const auto kernel = choose_kernel<Kernels<decltype(element)>, 4, 4>(block, mask != nullptr, vectors);
                          return static_cast<int>(launch(kernel, arguments, arguments.axes.rows, block, stream));
                        });
}
