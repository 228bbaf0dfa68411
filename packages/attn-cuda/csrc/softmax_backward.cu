// Softmax of contract ordered-v1, section 2, backward: P from (row_max, row_sum), the tile sums of P * dP, their left-to-right sum delta,
// then dX. P and dP stay in shared memory between the two passes; rows too long for it recompute P and read dP again.
#include "softmax_launch.cuh"
#include "staged.cuh"

namespace attn_cuda {
namespace {

constexpr float kMasked = -1.0f;  // stands for the P of a masked key, which no P equals

constexpr int kBackwardBytes = sizeof(float) + sizeof(bool);  // of a tile besides P and dP

// One row in shared memory for a team: scores and dP as they are stored, and P as binary32, in the place of the scores where these are
// binary32 too.
// Of each tile whether it is narrow, hence without a masked key; the sums of kChunk tiles, and zeros up to a multiple of kSumsAtOnce.
struct Shared {
  char* scores;
  char* dp;
  float* p;
  float* sums;
  bool* narrow;
};
constexpr int kSumsAtOnce = 4;

template <bool Wide>
using Copies = RowCopies<2, Wide>;

// Bytes of the scores and dP of a staged row, and with P.
__host__ __device__ constexpr int64_t operand_bytes(int64_t tiles, int size, int dp_size) {
  return staged_bytes(tiles * kRowTile, size) + staged_bytes(tiles * kRowTile, dp_size);
}
__host__ __device__ constexpr int64_t row_bytes(int64_t tiles, int size, int dp_size) {
  return operand_bytes(tiles, size, dp_size) + (size == 4 ? 0 : 4 * tiles * kRowTile);
}

template <bool Staged>
__device__ __forceinline__ Shared shared_of_team(char* storage, int64_t keys, int size, int dp_size, int place) {
  const int tiles = static_cast<int>((keys + kRowTile - 1) / kRowTile);
  const int staged = Staged ? static_cast<int>(row_bytes(tiles, size, dp_size)) : 0;
  char* mine = storage + place * team_bytes(tiles, staged, kBackwardBytes);
  const int operands = static_cast<int>(operand_bytes(tiles, size, dp_size));
  auto* sums = reinterpret_cast<float*>(mine + staged);
  return Shared{mine, mine + staged_bytes(tiles * kRowTile, size), reinterpret_cast<float*>(mine + operands), sums,
                reinterpret_cast<bool*>(sums + min(tiles, kChunk) + kSumsAtOnce)};
}

// P of one tile and the terms P * dP. Unless the tile is narrow, the result, it may hold a masked key, which has P = kMasked and a term of
// +0; whatever its dP holds is never used.
__device__ __forceinline__ bool find_terms(const RowSlots& values, const RowSlots& dp, float row_max, Divisor row_sum, RowSlots& p,
                                           RowSlots& terms) {
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

// dP of one tile to dX.
template <typename In, int V, bool Masked>
__device__ __forceinline__ void store_gradients(In* dscores, const Keys& keys, int tile, int lane, bool narrow, const RowSlots& p,
                                                RowSlots& dp, float delta) {
  if (narrow) {
#pragma unroll
    for (int k = 0; k < kRowSlots; ++k) dp[k] = attn::score_gradient(p[k], dp[k], delta);
  } else {
#pragma unroll
    for (int k = 0; k < kRowSlots; ++k) dp[k] = p[k] == kMasked ? 0.0f : attn::score_gradient(p[k], dp[k], delta);
  }
  store_tile<In, V, Masked>(dscores, keys, tile * kRowTile, lane, dp);
}

// Sums of `count` tiles added to `delta` from left to right, and zeros after them. The contract starts from the first live tile; a dead one
// adds +0, which can only change the sign of a zero delta, and that never reaches dX.
__device__ __forceinline__ float add_sums(const float* sums, int count, float delta) {
  for (int i = 0; i < count; i += kSumsAtOnce) {
    const auto found = *reinterpret_cast<const Vector<float, kSumsAtOnce>*>(sums + i);
#pragma unroll
    for (int v = 0; v < kSumsAtOnce; ++v) delta = add(delta, found.lanes[v]);
  }
  return delta;
}

// Starts the copies of one row.
template <typename In, typename Cotangent, bool Masked, bool Wide>
__device__ __forceinline__ void start_row(const SoftmaxBackward& arguments, int64_t row, const Shared& shared, Copies<Wide>& copies) {
  const Keys keys = keys_of_row<Masked>(arguments.axes, arguments.mask, arguments.keys, row);
  copies.template start<Masked>(shared.scores, scores_of<In>(arguments.axes, arguments.scores, row), keys);
  copies.template start<Masked>(shared.dp, scores_of<Cotangent>(arguments.axes, arguments.dprobs, row), keys);
}

// One row whose dP is of type Cotangent.
template <typename In, typename Cotangent, int V, bool Masked, bool Wide, bool Staged>
__device__ __forceinline__ void find_gradients(const SoftmaxBackward& arguments, int64_t row, int turn, const Shared& shared,
                                               const Team<Wide>& team, Copies<Wide>& copies) {
  const Axes& axes = arguments.axes;
  In* dscores = static_cast<In*>(arguments.dscores) + row * arguments.keys;
  const In* scores = scores_of<In>(axes, arguments.scores, row);
  const Cotangent* dprobs = scores_of<Cotangent>(axes, arguments.dprobs, row);
  const Keys keys = keys_of_row<Masked>(axes, arguments.mask, arguments.keys, row);
  const int tiles = keys.tiles(), lane = team.lane;
  // A row without a state has masked keys alone, all of them stored as +0.
  const attn::RowState state{arguments.row_max[row], arguments.row_sum[row]};
  const Divisor sum = divisor(state.sum);
  RowSlots values, p, dp, terms;
  float delta = 0.0f;
  if constexpr (Staged) {
    In* staged = Copies<Wide>::template first<Masked>(shared.scores, scores);
    const Cotangent* staged_dp = Copies<Wide>::template first<Masked>(shared.dp, dprobs);
    float* staged_p = sizeof(In) == sizeof(float) ? reinterpret_cast<float*>(staged) : shared.p;
    if (team.member < kSumsAtOnce) shared.sums[tiles + team.member] = 0.0f;
    copies.wait(turn);
    for (int tile = team.warp; tile < tiles; tile += team.warps) {
      const int base = tile * kRowTile;
      read_tile<V>(staged + base, keys.count - base, lane, attn::negative_infinity(), values);
      read_tile<V>(staged_dp + base, kRowTile, lane, 0.0f, dp);
      const bool narrow = find_terms(values, dp, state.max, sum, p, terms);
      stage_tile<V>(staged_p + base, lane, p);
      const float found = tree_sum<V>(terms, lane);
      if (lane == 0) {
        shared.sums[tile] = found;
        shared.narrow[tile] = narrow;
      }
    }
    team.sync();
    delta = add_sums(shared.sums, tiles, delta);
    for (int tile = team.warp; tile < tiles; tile += team.warps) {
      read_tile<V>(staged_p + tile * kRowTile, kRowTile, lane, 0.0f, p);
      read_tile<V>(staged_dp + tile * kRowTile, kRowTile, lane, 0.0f, dp);
      store_gradients<In, V, Masked>(dscores, keys, tile, lane, shared.narrow[tile], p, dp, delta);
    }
  } else {
    for (int begin = 0; begin < tiles; begin += kChunk) {
      const int end = min(tiles, begin + kChunk);
      if (team.member < kSumsAtOnce) shared.sums[end - begin + team.member] = 0.0f;
      for (int tile = begin + team.warp; tile < end; tile += team.warps) {
        load_tile<In, V, Masked>(scores, keys, tile * kRowTile, lane, attn::negative_infinity(), values);
        load_tile<Cotangent, V, Masked>(dprobs, keys, tile * kRowTile, lane, 0.0f, dp);
        find_terms(values, dp, state.max, sum, p, terms);
        const float found = tree_sum<V>(terms, lane);
        if (lane == 0) shared.sums[tile - begin] = found;
      }
      team.sync();
      delta = add_sums(shared.sums, end - begin, delta);
      team.sync();
    }
    for (int tile = team.warp; tile < tiles; tile += team.warps) {
      load_tile<In, V, Masked>(scores, keys, tile * kRowTile, lane, attn::negative_infinity(), values);
      load_tile<Cotangent, V, Masked>(dprobs, keys, tile * kRowTile, lane, 0.0f, dp);
      const bool narrow = find_terms(values, dp, state.max, sum, p, terms);
      store_gradients<In, V, Masked>(dscores, keys, tile, lane, narrow, p, dp, delta);
    }
  }
  if constexpr (Masked) store_zeros(dscores, keys.kept, static_cast<int>(arguments.keys), team.member, team.size);
}

// The rows of a team.
template <typename In, typename Cotangent, int V, bool Masked, bool Wide, bool Staged>
__device__ __forceinline__ void find_all_gradients(const SoftmaxBackward& arguments, const Shared& shared, const Team<Wide>& team,
                                                   Copies<Wide>& copies) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.teams(), rows = arguments.axes.rows;
  int64_t row = static_cast<int64_t>(blockIdx.x) * team.teams() + team.place();
  for (int turn = 0; row < rows; row += step, ++turn) {
    if constexpr (Staged) start_row<In, Cotangent, Masked>(arguments, row, shared, copies);
    find_gradients<In, Cotangent, V, Masked, Wide, Staged>(arguments, row, turn, shared, team, copies);
    copies.end();
  }
}

template <typename In, int V, bool Masked, bool Wide, bool Staged>
__global__ void __launch_bounds__(Wide ? kBackwardThreads : kNarrowThreads, Wide ? kWideBlocks : 1)
    softmax_backward_kernel(const __grid_constant__ SoftmaxBackward arguments) {
  extern __shared__ float4 storage[];
  const Team<Wide> team;
  const bool is_float = sizeof(In) == sizeof(float) || arguments.dprobs.is_float;
  const Shared shared = shared_of_team<Staged>(reinterpret_cast<char*>(storage), arguments.keys, sizeof(In),
                                               is_float ? sizeof(float) : sizeof(In), team.place());
  __shared__ uint64_t barriers[Wide ? 1 : kNarrowThreads / kLanes];
  Copies<Wide> copies(barriers, team);
  if (is_float) {
    find_all_gradients<In, float, V, Masked, Wide, Staged>(arguments, shared, team, copies);
  } else {
    find_all_gradients<In, In, V, Masked, Wide, Staged>(arguments, shared, team, copies);
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
        const int dp_size = static_cast<int>(arguments.dprobs.is_float ? sizeof(float) : sizeof(element));
        const auto staged_of = [&](int64_t tiles) { return row_bytes(tiles, sizeof(element), dp_size); };
        if (const int error =
                choose_block(device, kBackwardThreads, arguments.axes.rows, arguments.keys, staged_of, kBackwardBytes, &block))
          return error;
        const auto kernel = choose_kernel<Kernels<decltype(element)>, 1, 2>(block, mask != nullptr, vectors);
        return static_cast<int>(launch(kernel, arguments, arguments.axes.rows, block, stream));
      });
}
