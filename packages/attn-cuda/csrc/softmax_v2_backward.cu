// Softmax of contract ordered-v2, backward: P from the exponentials of each tile and (row_max, row_sum), the tile sums of P * dP, their
// left-to-right sum delta, then dX. P and dP stay in the registers of a warp; teams with more tiles than warps read and compute twice.
#include "long_launch.cuh"

namespace attn_cuda {
namespace {

template <typename T, int V, bool Masked>
__device__ __forceinline__ void load_cotangent(const void* row, const Keys& keys, LongTile tile, int lane, LongSlots& dp) {
  LongScores<T> loaded;
  load_long<T, V, Masked>(static_cast<const T*>(row), keys, tile, lane, loaded);
#pragma unroll
  for (int k = 0; k < kLongSlots; ++k) dp[k] = loaded[k];
}

// P, dP and the sum of P * dP of one tile. A masked slot has a bit in `masked` and a term of +0; its dP is never used.
template <typename In, int V, bool Masked>
__device__ __forceinline__ float load_pair(const In* scores, const Cotangents<In>& dprobs, const Keys& keys, LongTile tile, int lane,
                                           attn::RowState state, LongSlots& p, LongSlots& dp, uint32_t& masked) {
  LongScores<In> loaded;
  load_long<In, V, Masked>(scores, keys, tile, lane, loaded);
  if (dprobs.is_float) {
    load_cotangent<float, V, Masked>(dprobs.data, keys, tile, lane, dp);
  } else {
    load_cotangent<In, V, Masked>(dprobs.data, keys, tile, lane, dp);
  }
  const float max = long_exponentials(loaded, tile, p, masked);
  long_probabilities(p, long_factor(max, state), masked);
  LongSlots terms;
#pragma unroll
  for (int k = 0; k < kLongSlots; ++k) terms[k] = mul(p[k], dp[k]);
  if (masked != 0) {
#pragma unroll
    for (int k = 0; k < kLongSlots; ++k) terms[k] = (masked >> k) & 1 ? 0.0f : terms[k];
  }
  return long_tree_sum<V>(terms, lane);
}

// dP of one tile to dX.
template <typename In, int V, bool Masked>
__device__ __forceinline__ void store_gradients(In* dscores, const Keys& keys, LongTile tile, int lane, const LongSlots& p, LongSlots& dp,
                                                uint32_t masked, float delta) {
#pragma unroll
  for (int k = 0; k < kLongSlots; ++k) dp[k] = attn::score_gradient(p[k], dp[k], delta);
  if (masked != 0) {
#pragma unroll
    for (int k = 0; k < kLongSlots; ++k) dp[k] = (masked >> k) & 1 ? 0.0f : dp[k];
  }
  store_long<In, V, Masked>(dscores, keys, tile, lane, dp);
}

// `Resident`: a team has a warp for every tile.
template <typename In, int V, bool Masked, bool Wide, bool Resident>
__global__ void __launch_bounds__(Wide ? kLongBackwardWarps * kLanes : kNarrowThreads,
                                  Wide ? kLongBackwardWideBlocks : kLongBackwardNarrowBlocks)
    softmax_v2_backward_kernel(const __grid_constant__ SoftmaxBackward arguments) {
  __shared__ float sums[kLongChunk];
  const Team<Wide> team;
  const Axes& axes = arguments.axes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place(); row < axes.rows; row += step) {
    In* dscores = static_cast<In*>(arguments.dscores) + row * arguments.keys;
    const attn::RowState state{arguments.row_max[row], arguments.row_sum[row]};
    const In* scores = scores_of<In>(axes, arguments.scores, row);
    const Cotangents<In> dprobs(axes, arguments.dprobs, row);
    const Keys keys = keys_of_row<Masked>(axes, arguments.mask, arguments.keys, row);
    // A row without a state has masked keys alone, all of them stored as +0; to ask first would have the loads wait for the state.
    const int tiles = long_tiles(keys.count);
    LongSlots p, dp;
    uint32_t masked;
    float delta = 0.0f;
    if constexpr (Resident) {
      const bool active = team.warp < tiles;
      const LongTile tile(keys, active ? team.warp : 0);
      if (active) {
        const float sum = load_pair<In, V, Masked>(scores, dprobs, keys, tile, team.lane, state, p, dp, masked);
        if constexpr (!Wide) delta = add(delta, sum);
        if (Wide && team.lane == 0) sums[team.warp] = sum;
      }
      if constexpr (Wide) {
        team.sync();
        for (int index = 0; index < tiles; ++index) delta = add(delta, sums[index]);
      }
      if (active) store_gradients<In, V, Masked>(dscores, keys, tile, team.lane, p, dp, masked, delta);
    } else {
      for (int begin = 0; begin < tiles; begin += kLongChunk) {
        const int end = min(tiles, begin + kLongChunk);
        for (int index = begin + team.warp; index < end; index += team.warps) {
          const LongTile tile(keys, index);
          const float sum = load_pair<In, V, Masked>(scores, dprobs, keys, tile, team.lane, state, p, dp, masked);
          if (team.lane == 0) sums[index - begin] = sum;
        }
        team.sync();
        for (int index = 0; index < end - begin; ++index) delta = add(delta, sums[index]);
        team.sync();
      }
      for (int index = team.warp; index < tiles; index += team.warps) {
        const LongTile tile(keys, index);
        load_pair<In, V, Masked>(scores, dprobs, keys, tile, team.lane, state, p, dp, masked);
        store_gradients<In, V, Masked>(dscores, keys, tile, team.lane, p, dp, masked, delta);
      }
    }
    if constexpr (Masked) store_zeros(dscores, keys.kept, static_cast<int>(arguments.keys), team.member, team.size);
    if constexpr (Wide) team.sync();  // the next row's sums go where these were
  }
}

template <typename In>
struct Kernels {
  template <int V, bool Masked, bool Wide, bool Resident>
  static auto kernel() {
    return softmax_v2_backward_kernel<In, V, Masked, Wide, Resident>;
  }
};

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_softmax_v2_backward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                             const attn_cuda_rows* dprobs, const attn_cuda_mask* mask, const float* row_max,
                                             const float* row_sum, void* dscores) {
  using namespace attn_cuda;
  return run_backward<4>(device, shape, scores, dprobs, mask, row_max, row_sum, dscores,
                         [&](auto element, const SoftmaxBackward& arguments, bool vectors) {
                           const Block block = long_block(arguments.keys, kLongBackwardWarps);
                           const auto kernel = choose_kernel<Kernels<decltype(element)>, 4, 4>(block, mask != nullptr, vectors);
                           return static_cast<int>(launch(kernel, arguments, arguments.axes.rows, block, stream));
                         });
}
