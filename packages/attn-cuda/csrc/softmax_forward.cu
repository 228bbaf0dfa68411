// Softmax of contract ordered-v1, section 2, forward. A team (block or warp) takes one row: its warps find the states of different tiles,
// one warp merges them left to right, and all normalise. Global memory is read once and written once; rows too long for shared memory are
// read twice.
#include "softmax_launch.cuh"

namespace attn_cuda {
namespace {

constexpr int kForwardWords = 3;  // of shared memory for each tile besides the scores

// One row's values in shared memory for a team. Of wide rows kChunk tiles at a time have their state here.
struct Shared {
  float* scores;
  attn::RowState* tiles;
  attn::RowState* row;
  float* narrow_max;  // of each tile, of staged rows
};

template <bool Wide, bool Staged>
__device__ __forceinline__ Shared shared_of_team(float* storage, int64_t keys, int place) {
  const int tiles = static_cast<int>((keys + kRowTile - 1) / kRowTile);
  const int staged = Staged ? tiles * kRowTile : 0;
  const int states = min(tiles, kChunk);
  float* mine = storage + place * (staged + kForwardWords * states);
  auto* first = reinterpret_cast<attn::RowState*>(mine + staged);
  return Shared{mine, first, first + states, reinterpret_cast<float*>(first + states + (Wide ? 1 : 0))};
}

// P of a row that holds NaN or +inf: NaN, and +0 where masked. Of a dead row: +0.
template <typename In, typename Out, bool Masked>
__device__ void store_special(const In* scores, Out* probs, const Keys& keys, attn::RowState state, int total, int first, int step) {
  if (!attn::is_live(state)) {
    store_zeros(probs, nullptr, total, first, step);
    return;
  }
#pragma unroll 1
  for (int logical = first; logical < keys.count; logical += step) {
    const int key = position<Masked>(keys, logical);
    probs[key] = rounded<Out>(widened(scores[key]) == attn::negative_infinity() ? 0.0f : state.sum);
  }
  if constexpr (Masked) store_zeros(probs, keys.kept, total, first, step);
}

template <typename In, typename Out, int V, bool Masked, bool Wide, bool Staged>
__device__ __forceinline__ void normalise(const In* scores, Out* probs, const Shared& shared, const Keys& keys, attn::RowState state,
                                          int total, const Team<Wide>& team) {
  if (!attn::is_live(state) || attn::is_nan(state.sum)) {
    store_special<In, Out, Masked>(scores, probs, keys, state, total, team.member, team.size);
    return;
  }
  const Divisor sum = divisor(state.sum);
  const int tiles = keys.tiles();
  for (int tile = team.warp; tile < tiles; tile += team.warps) {
    RowSlots values, probabilities_of_tile;
    if constexpr (Staged) {
      staged_tile<V>(shared.scores + tile * kRowTile, team.lane, values);
      if (sub(shared.narrow_max[tile], state.max) >= kNear) {
        normal_probabilities(values, state.max, sum, probabilities_of_tile);
      } else {
        probabilities(values, state.max, sum, probabilities_of_tile);
      }
    } else {
      load_tile<In, V, Masked>(scores, keys, tile * kRowTile, team.lane, attn::negative_infinity(), values);
      probabilities(values, state.max, sum, probabilities_of_tile);
    }
    store_tile<Out, V, Masked>(probs, keys, tile * kRowTile, team.lane, probabilities_of_tile);
  }
  if constexpr (Masked) store_zeros(probs, keys.kept, total, team.member, team.size);
}

template <typename In, int V, bool Masked, bool Wide, bool Staged>
__global__ void __launch_bounds__(Wide ? kForwardThreads : kNarrowThreads, Wide ? kWideBlocks : 1)
    softmax_forward_kernel(const __grid_constant__ SoftmaxForward arguments) {
  extern __shared__ float4 storage[];
  const Team<Wide> team;
  const Axes& axes = arguments.axes;
  const Shared shared = shared_of_team<Wide, Staged>(reinterpret_cast<float*>(storage), arguments.keys, team.place());
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place(); row < axes.rows; row += step) {
    const In* scores = scores_of<In>(axes, arguments.scores, row);
    const Keys keys = keys_of_row<Masked>(axes, arguments.mask, arguments.keys, row);
    const int tiles = keys.tiles(), total = static_cast<int>(arguments.keys);
    attn::RowState state = attn::empty_row();
    int begin = 0;
    do {
      const int end = min(tiles, begin + kChunk);
      for (int tile = begin + team.warp; tile < end; tile += team.warps) {
        RowSlots values;
        load_tile<In, V, Masked>(scores, keys, tile * kRowTile, team.lane, attn::negative_infinity(), values);
        if constexpr (Staged) stage_tile<V>(shared.scores + tile * kRowTile, team.lane, values);
        const TileState found = tile_state<V>(values, team.lane);
        if (team.lane == 0) {
          shared.tiles[tile - begin] = found.state;
          if constexpr (Staged) shared.narrow_max[tile] = found.narrow_max;
        }
      }
      team.sync();
      if (team.warp == 0) state = merge_tiles(shared.tiles, end - begin, state, team.lane);
      begin = end;
      if (begin < tiles) team.sync();
    } while (begin < tiles);
    if (team.member == 0 && arguments.row_max != nullptr) {
      arguments.row_max[row] = state.max;
      arguments.row_sum[row] = state.sum;
    }
    if constexpr (Wide) {
      if (team.member == 0) *shared.row = state;
      team.sync();
      state = *shared.row;
    } else {
      team.sync();
    }
    if (arguments.probs_are_float) {
      float* probs = static_cast<float*>(arguments.probs) + row * arguments.keys;
      normalise<In, float, V, Masked, Wide, Staged>(scores, probs, shared, keys, state, total, team);
    } else if constexpr (sizeof(In) != sizeof(float)) {
      In* probs = static_cast<In*>(arguments.probs) + row * arguments.keys;
      normalise<In, In, V, Masked, Wide, Staged>(scores, probs, shared, keys, state, total, team);
    }
  }
}

template <typename In>
struct Kernels {
  template <int V, bool Masked, bool Wide, bool Staged>
  static auto kernel() {
    return softmax_forward_kernel<In, V, Masked, Wide, Staged>;
  }
};

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_softmax_forward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                         const attn_cuda_mask* mask, void* probs, int32_t probs_dtype, float* row_max, float* row_sum) {
  using namespace attn_cuda;
  return run_forward<2>(device, shape, scores, mask, probs, probs_dtype, row_max, row_sum,
                        [&](auto element, const SoftmaxForward& arguments, bool vectors) {
                          Block block;
                          const auto staged_of = [](int64_t tiles) { return tiles * kRowTile * static_cast<int64_t>(sizeof(float)); };
                          if (const int error = choose_block(device, kForwardThreads, arguments.axes.rows, arguments.keys, staged_of,
                                                             kForwardWords * sizeof(float), &block))
                            return error;
                          const auto kernel = choose_kernel<Kernels<decltype(element)>, 1, 2>(block, mask != nullptr, vectors);
                          return static_cast<int>(launch(kernel, arguments, arguments.axes.rows, block, stream));
                        });
}
