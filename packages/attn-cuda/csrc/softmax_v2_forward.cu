// Softmax of contract ordered-v2, forward. A warp takes a tile and keeps its exponentials in registers while one warp of the row's team
// merges the tiles; global memory is read once and written once. Blocks stay for many rows.
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

// The tile of one warp: where its row's keys are, and its scores.
template <typename In, int V, bool Masked>
struct WarpTile {
  Keys keys;
  LongScores<In> scores;

  // Loads tile `index` of `row`, or nothing where there is none.
  __device__ __forceinline__ void load(const SoftmaxForward& arguments, int64_t row, int index, int lane) {
    if (row >= arguments.axes.rows) return;
    keys = keys_of_row<Masked>(arguments.axes, arguments.mask, arguments.keys, row);
    if (index >= long_tiles(keys.count)) return;
    load_long<In, V, Masked>(scores_of<In>(arguments.axes, arguments.scores, row), keys, LongTile(keys, index), lane, scores);
  }
};

__device__ __forceinline__ void store_state(const SoftmaxForward& arguments, int64_t row, attn::RowState state) {
  if (arguments.row_max == nullptr) return;
  arguments.row_max[row] = state.max;
  arguments.row_sum[row] = state.sum;
}

// A warp has a tile for itself: the row is read once. The next row's tile is loaded as soon as this one's exponentials are known, so that
// its way through memory lies behind the sums, the merge and the stores.
template <typename In, int V, bool Masked, bool Wide>
__global__ void __launch_bounds__(Wide ? kLongWarps<In> * kLanes : kNarrowThreads, Wide ? kLongWideBlocks : kLongNarrowBlocks)
    resident_kernel(const __grid_constant__ SoftmaxForward arguments) {
  __shared__ attn::RowState states[Wide ? kLongWarps<In> : 1];
  __shared__ float factors[Wide ? kLongWarps<In> : 1];
  const Team<Wide> team;
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams();
  int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place();
  WarpTile<In, V, Masked> next;
  next.load(arguments, row, team.warp, team.lane);
  for (; row < arguments.axes.rows; row += step) {
    const Keys keys = next.keys;
    const int tiles = long_tiles(keys.count);
    const LongTile tile(keys, team.warp);
    const bool active = team.warp < tiles;
    attn::RowState state = attn::empty_row();
    LongSlots values;
    uint32_t masked = 0;
    float max = attn::negative_infinity();
    if (active) max = long_exponentials(next.scores, tile, values, masked);
    next.load(arguments, row + step, team.warp, team.lane);
    if constexpr (!Wide) {
      if (active) {
        state = long_state<V>(values, max, team.lane);
        long_probabilities(values, long_factor(max, state), masked);
      }
    } else {
      if (active) {
        const attn::RowState found = long_state<V>(values, max, team.lane);
        if (team.lane == 0) states[team.warp] = found;
      }
      team.sync();
      if (team.warp == 0) {
        state = merge_tiles<attn::v2::exp_nonpositive>(states, tiles, state, team.lane);
        if (team.lane < tiles) factors[team.lane] = long_factor(states[team.lane].max, state);
      }
      team.sync();
      if (active) long_probabilities(values, factors[team.warp], masked);
    }
    if (active) store_probs<In, V, Masked>(arguments, row, keys, tile, team.lane, values);
    if (team.member == 0) store_state(arguments, row, state);
    if constexpr (Masked) store_dropped<In>(arguments, row, keys.kept, team.member, team.size);
  }
}

// Rows of more tiles than a block has warps: read twice, the exponentials computed again.
template <typename In, int V, bool Masked>
__global__ void __launch_bounds__(kLongWarps<In>* kLanes, 1) twice_kernel(const __grid_constant__ SoftmaxForward arguments) {
  __shared__ attn::RowState states[kLongChunk];
  __shared__ attn::RowState shared_row;
  const Team<true> team;
  const Axes& axes = arguments.axes;
  for (int64_t row = blockIdx.x; row < axes.rows; row += gridDim.x) {
    const In* scores = scores_of<In>(axes, arguments.scores, row);
    const Keys keys = keys_of_row<Masked>(axes, arguments.mask, arguments.keys, row);
    const int tiles = long_tiles(keys.count);
    attn::RowState state = attn::empty_row();
    LongScores<In> loaded;
    LongSlots values;
    uint32_t masked = 0;
    for (int begin = 0; begin < tiles; begin += kLongChunk) {
      const int end = min(tiles, begin + kLongChunk);
      for (int index = begin + team.warp; index < end; index += team.warps) {
        const LongTile tile(keys, index);
        load_long<In, V, Masked>(scores, keys, tile, team.lane, loaded);
        const float max = long_exponentials(loaded, tile, values, masked);
        const attn::RowState found = long_state<V>(values, max, team.lane);
        if (team.lane == 0) states[index - begin] = found;
      }
      team.sync();
      if (team.warp == 0) state = merge_tiles<attn::v2::exp_nonpositive>(states, end - begin, state, team.lane);
      if (end < tiles) team.sync();
    }
    if (team.member == 0) {
      shared_row = state;
      store_state(arguments, row, state);
    }
    team.sync();
    state = shared_row;
    for (int index = team.warp; index < tiles; index += team.warps) {
      const LongTile tile(keys, index);
      load_long<In, V, Masked>(scores, keys, tile, team.lane, loaded);
      const float max = long_exponentials(loaded, tile, values, masked);
      long_probabilities(values, long_factor(max, state), masked);
      store_probs<In, V, Masked>(arguments, row, keys, tile, team.lane, values);
    }
    if constexpr (Masked) store_dropped<In>(arguments, row, keys.kept, team.member, team.size);
    team.sync();  // the next row's states go where these were
  }
}

template <typename In>
struct Kernels {
  template <int V, bool Masked, bool Wide, bool Resident>
  static auto kernel() {
    if constexpr (Resident)
      return resident_kernel<In, V, Masked, Wide>;
    else
      return twice_kernel<In, V, Masked>;
  }
};

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_softmax_v2_forward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                            const attn_cuda_mask* mask, void* probs, int32_t probs_dtype, float* row_max, float* row_sum) {
  using namespace attn_cuda;
  return run_forward<kLongVector, true>(
      device, shape, scores, mask, probs, probs_dtype, row_max, row_sum, [&](auto element, const SoftmaxForward& arguments, bool vectors) {
        const int most = kLongWarps<decltype(element)>;
        const Block block = long_block(arguments.keys, most);
        const auto kernel = choose_kernel<Kernels<decltype(element)>, kLongVector, kLongVector>(block, mask != nullptr, vectors);
        int64_t rows = arguments.axes.rows;
        if (block.staged)
          if (const int error = resident_rows(device, block, most * kLongWideBlocks, &rows)) return error;
        return static_cast<int>(launch(kernel, arguments, rows, block, stream));
      });
}
