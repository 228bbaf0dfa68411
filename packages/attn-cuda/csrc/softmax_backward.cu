// Softmax of contract ordered-v1, section 2, backward: P from (row_max, row_sum), the tile sums of P * dP, their left-to-right sum delta,
// then dX. P and dP stay in shared memory between the two passes; rows too long for it recompute P and read dP again.
#include "softmax_launch.cuh"

namespace attn_cuda {
namespace {

// What is kept of a tile: the sum of its terms, and whether it is narrow, hence without a masked key.
struct TileSum {
  float sum;
  bool narrow;
};
constexpr int kBackwardWords = sizeof(TileSum) / sizeof(float);

constexpr float kMasked = -1.0f;  // stands for the P of a masked key, which no P equals

// P and dP of one tile and the terms P * dP. Unless it is `narrow` it may hold a masked key, which has P = kMasked and a term of +0;
// whatever its dP holds is never used.
template <typename In, int V, bool Masked>
__device__ __forceinline__ bool load_pair(const In* scores, const Cotangents<In>& dprobs, const Keys& keys, int base, int lane,
                                          float row_max, Divisor row_sum, RowSlots& p, RowSlots& dp, RowSlots& terms) {
  RowSlots values;
  load_tile<In, V, Masked>(scores, keys, base, lane, attn::negative_infinity(), values);
  if (dprobs.is_float) {
    load_tile<float, V, Masked>(static_cast<const float*>(dprobs.data), keys, base, lane, 0.0f, dp);
  } else {
    load_tile<In, V, Masked>(static_cast<const In*>(dprobs.data), keys, base, lane, 0.0f, dp);
  }
  const bool narrow = is_narrow(values, row_max);
  if (narrow) {
    normal_probabilities(values, row_max, row_sum, p);
#pragma unroll
    for (int k = 0; k < kRowSlots; ++k) terms[k] = mul(p[k], dp[k]);
  } else {
    probabilities(values, row_max, row_sum, p);
#pragma unroll
    for (int k = 0; k < kRowSlots; ++k) {
      p[k] = values[k] == attn::negative_infinity() ? kMasked : p[k];
      terms[k] = p[k] == kMasked ? 0.0f : mul(p[k], dp[k]);
    }
  }
  return narrow;
}

template <typename In, int V, bool Masked, bool Wide, bool Staged>
__global__ void __launch_bounds__(Wide ? kBackwardThreads : kNarrowThreads, Wide ? kWideBlocks : 1)
    softmax_backward_kernel(const __grid_constant__ SoftmaxBackward arguments) {
  extern __shared__ float4 storage[];
  const Team<Wide> team;
  const Axes& axes = arguments.axes;
  const int total = static_cast<int>(arguments.keys);
  const int capacity = static_cast<int>((arguments.keys + kRowTile - 1) / kRowTile), staged = Staged ? capacity * kRowTile : 0;
  float* staged_p = reinterpret_cast<float*>(storage) + team.place() * (2 * staged + kBackwardWords * min(capacity, kChunk));
  float* staged_dp = staged_p + staged;
  auto* sums = reinterpret_cast<TileSum*>(staged_dp + staged);
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place(); row < axes.rows; row += step) {
    In* dscores = static_cast<In*>(arguments.dscores) + row * arguments.keys;
    const attn::RowState state{arguments.row_max[row], arguments.row_sum[row]};
    if (!attn::is_live(state)) {
      store_zeros(dscores, nullptr, total, team.member, team.size);
      continue;
    }
    const In* scores = scores_of<In>(axes, arguments.scores, row);
    const Cotangents<In> dprobs(axes, arguments.dprobs, row);
    const Keys keys = keys_of_row<Masked>(axes, arguments.mask, arguments.keys, row);
    const int tiles = keys.tiles();
    const Divisor sum = divisor(state.sum);
    // The contract starts from the first live tile; a dead one adds +0, which can only change the sign of a zero delta, and that never
    // reaches dX.
    float delta = 0.0f;
    for (int begin = 0; begin < tiles; begin += kChunk) {
      const int end = min(tiles, begin + kChunk);
      for (int tile = begin + team.warp; tile < end; tile += team.warps) {
        RowSlots p, dp, terms;
        const bool narrow = load_pair<In, V, Masked>(scores, dprobs, keys, tile * kRowTile, team.lane, state.max, sum, p, dp, terms);
        if constexpr (Staged) {
          stage_tile<V>(staged_p + tile * kRowTile, team.lane, p);
          stage_tile<V>(staged_dp + tile * kRowTile, team.lane, dp);
        }
        const float found = tree_sum<V>(terms, team.lane);
        if (team.lane == 0) sums[tile - begin] = TileSum{found, narrow};
      }
      team.sync();
      for (int i = 0; i < end - begin; ++i) delta = add(delta, sums[i].sum);
      if (begin + kChunk < tiles) team.sync();
    }
    for (int tile = team.warp; tile < tiles; tile += team.warps) {
      RowSlots p, dp;
      bool narrow = false;
      if constexpr (Staged) {
        narrow = sums[tile].narrow;
        staged_tile<V>(staged_p + tile * kRowTile, team.lane, p);
        staged_tile<V>(staged_dp + tile * kRowTile, team.lane, dp);
      } else {
        RowSlots terms;
        load_pair<In, V, Masked>(scores, dprobs, keys, tile * kRowTile, team.lane, state.max, sum, p, dp, terms);
      }
      if (narrow) {
#pragma unroll
        for (int k = 0; k < kRowSlots; ++k) dp[k] = attn::score_gradient(p[k], dp[k], delta);
      } else {
#pragma unroll
        for (int k = 0; k < kRowSlots; ++k) dp[k] = p[k] == kMasked ? 0.0f : attn::score_gradient(p[k], dp[k], delta);
      }
      store_tile<In, V, Masked>(dscores, keys, tile * kRowTile, team.lane, dp);
    }
    // The next row's sums go where these are read.
    team.sync();
    if constexpr (Masked) store_zeros(dscores, keys.kept, total, team.member, team.size);
  }
}

template <typename In>
struct Kernels {
  template <int V, bool Masked, bool Wide, bool Staged>
  static auto kernel() {
    return softmax_backward_kernel<In, V, Masked, Wide, Staged>;
  }
};

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_softmax_backward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                          const attn_cuda_rows* dprobs, const attn_cuda_mask* mask, const float* row_max,
                                          const float* row_sum, void* dscores) {
  using namespace attn_cuda;
  return run_backward<2>(
      device, shape, scores, dprobs, mask, row_max, row_sum, dscores, [&](auto element, const SoftmaxBackward& arguments, bool vectors) {
        Block block;
        if (const int error = choose_block(device, kBackwardThreads, arguments.axes.rows, arguments.keys, 2, sizeof(TileSum), &block))
          return error;
        const auto kernel = choose_kernel<Kernels<decltype(element)>, 1, 2>(block, mask != nullptr, vectors);
        return static_cast<int>(launch(kernel, arguments, arguments.axes.rows, block, stream));
      });
}
