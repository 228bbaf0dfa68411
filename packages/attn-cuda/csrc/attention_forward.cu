// Attention forward in two passes over the keys: row states, then scores again, P and the chains of out. A block owns 64 or 32 rows of one
// kv head's group.
#include "attention_forward.cuh"

namespace attn_cuda {
namespace {

constexpr int kHalf = attn::kTile / 2;
constexpr int kHalfPitch = kHalf + 4;  // rows of both half warps are read without a bank conflict
constexpr int kValueFloats = 8192;     // V staged at a time
constexpr int kStageFloats = attn::kTile * kChunkPitch;
static_assert(kValueFloats <= kStageFloats, "keys and values share the stage");

// Outputs of one lane: columns of a few rows of its warp.
template <int Width>
struct Columns {
  static constexpr int kLanesOfRow = Width / 4 < kLanes ? Width / 4 : kLanes;
  static constexpr int kGroups = kLanes / kLanesOfRow;
  static constexpr int kOwnRows = kWarpRows / kGroups;
  static constexpr int kVectors = Width / 4 / kLanesOfRow;
  static constexpr int kKeys = kValueFloats / Width;
  // Accumulators wait in shared memory while scores need their registers.
  static constexpr bool kParks = Width <= 128;

  __device__ static __forceinline__ int row(int i) { return lane_id() / kLanesOfRow * kOwnRows + i; }
  __device__ static __forceinline__ int column(int vector) { return (vector * kLanesOfRow + lane_id() % kLanesOfRow) * 4; }
};

template <int Width>
using Outputs = float[Columns<Width>::kOwnRows][Columns<Width>::kVectors][4];

// out goes on over kKeys keys. `probs` are the warp's rows at those keys. With Select a masked pair has no term even against infinities and
// NaN.
template <int Width, bool Select>
__device__ __forceinline__ void multiply_values(const float* probs, const float* values, Outputs<Width>& out) {
  using C = Columns<Width>;
  const float* own = probs + C::row(0) * kHalfPitch;
  const float* columns = values + C::column(0);
#pragma unroll 2
  for (int key = 0; key < C::kKeys; key += 4) {
    float4 p[C::kOwnRows];
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) p[i] = *reinterpret_cast<const float4*>(own + i * kHalfPitch + key);
#pragma unroll
    for (int vector = 0; vector < C::kVectors; ++vector) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const float4 v = *reinterpret_cast<const float4*>(columns + (key + step) * Width + vector * (C::kLanesOfRow * 4));
#pragma unroll
        for (int i = 0; i < C::kOwnRows; ++i) {
          const float weight = step == 0 ? p[i].x : step == 1 ? p[i].y : step == 2 ? p[i].z : p[i].w;
          float (&o)[4] = out[i][vector];
          if (Select && is_masked(weight)) continue;
          o[0] = exact_fma(weight, v.x, o[0]);
          o[1] = exact_fma(weight, v.y, o[1]);
          o[2] = exact_fma(weight, v.z, o[2]);
          o[3] = exact_fma(weight, v.w, o[3]);
        }
      }
    }
  }
}

// Accumulators of one tile at a time: in registers, or parked in the warp's part of the P buffer while scores are computed.
template <int Width>
struct Accumulators {
  using C = Columns<Width>;
  Outputs<Width> out;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
#pragma unroll
      for (int vector = 0; vector < C::kVectors; ++vector)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[i][vector][c] = 0.0f;
  }

  __device__ __forceinline__ void park(float* probs) const {
    auto* at = reinterpret_cast<float4*>(probs) + lane_id();
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
#pragma unroll
      for (int vector = 0; vector < C::kVectors; ++vector) {
        const float (&o)[4] = out[i][vector];
        at[(i * C::kVectors + vector) * kLanes] = make_float4(o[0], o[1], o[2], o[3]);
      }
  }

  __device__ __forceinline__ void unpark(const float* probs) {
    const auto* at = reinterpret_cast<const float4*>(probs) + lane_id();
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
#pragma unroll
      for (int vector = 0; vector < C::kVectors; ++vector) {
        const float4 four = at[(i * C::kVectors + vector) * kLanes];
        out[i][vector][0] = four.x;
        out[i][vector][1] = four.y;
        out[i][vector][2] = four.z;
        out[i][vector][3] = four.w;
      }
  }

  __device__ __forceinline__ bool has_nan() const {
    bool nan = false;
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
#pragma unroll
      for (int vector = 0; vector < C::kVectors; ++vector)
#pragma unroll
        for (int c = 0; c < 4; ++c) nan = nan || attn::is_nan(out[i][vector][c]);
    return nan;
  }
};

// Scores of a tile to P, then the chains of out over its 256 keys, half a tile of P in shared memory at a time.
template <int Width, int Warps>
__device__ __forceinline__ void add_tile(const Attention& problem, const Work& work, const Range& any, int32_t tile, bool active,
                                         bool select, float (&x)[kWarpRows][kSlots], float* stage, float* probs, Outputs<Width>& out) {
  using C = Columns<Width>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (active) {
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
        for (int j = 0; j < kSlots / 2; ++j) probs[r * kHalfPitch + j * kLanes + lane_id()] = x[r][half * (kSlots / 2) + j];
      __syncwarp();
    }
#pragma unroll 1
    for (int key = 0; key < kHalf; key += C::kKeys) {
      const int32_t first = tile + half * kHalf + key;
      if (first >= any.end || first + C::kKeys <= any.begin) continue;
      __syncthreads();
      load_rows<Warps * kLanes, C::kKeys, Width>(problem.v, 0, Width, stage,
                                                 [&](int i) { return key_offset(problem.v, work.item, work.v_base, first + i); });
      __syncthreads();
      if (!active) continue;
      if (select) {
        multiply_values<Width, true>(probs + key, stage, out);
      } else {
        multiply_values<Width, false>(probs + key, stage, out);
      }
    }
  }
}

__device__ __forceinline__ void tile_probabilities(attn::RowState state, float (&x)[kWarpRows][kSlots]) {
  const Divisor own = divisor(state.sum);
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const int from = lane_of_row(r);
    const Divisor sum{__shfl_sync(kAllLanes, own.value, from), __shfl_sync(kAllLanes, own.reciprocal, from),
                      __shfl_sync(kAllLanes, own.correction, from)};
    row_probabilities(x[r], __shfl_sync(kAllLanes, state.max, from), sum);
  }
}

template <int Width, int Warps>
__device__ __forceinline__ void store_outputs(const ForwardArguments& arguments, const Item& item, const BlockRows<Warps>& block,
                                              const Outputs<Width>& out) {
  using C = Columns<Width>;
  const Attention& problem = arguments.problem;
#pragma unroll
  for (int i = 0; i < C::kOwnRows; ++i) {
    const Row row = block.row(C::row(i));
    if (row.head < 0) continue;
    const int64_t offset = query_result(problem, item, row, problem.value_dim);
#pragma unroll
    for (int vector = 0; vector < C::kVectors; ++vector) {
      const int column = C::column(vector);
      store_four(arguments.out, arguments.out_dtype, offset + column, out[i][vector], problem.value_dim - column, arguments.vectors);
    }
  }
}

template <int Width, int Warps>
__global__ void __launch_bounds__(Warps* kLanes, Width <= 128 && Warps == kMostWarps ? 2 : 1)
    attention_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  using C = Columns<Width>;
  const Attention& problem = arguments.problem;
  extern __shared__ float4 storage[];
  __shared__ Work work;
  __shared__ BlockRows<Warps> block;
  float* stage = reinterpret_cast<float*>(storage);
  float* probs = stage + kStageFloats + warp_id() * kWarpRows * kHalfPitch;
  float* queries = stage + kStageFloats + Warps * kWarpRows * kHalfPitch;
  if (!share_work(problem, blockIdx.x, arguments.per_item, arguments.plan, &work)) return;
  block.find(problem, work);
  load_query_rows<Warps>(problem.q, work.item, block.rows, queries);

  // Pass 0 finds the row states, pass 1 sums out. A NaN in out may come from a masked pair's zero product with an infinity or a NaN; then
  // pass 2 sums again without those terms.
  attn::RowState state = attn::empty_row();
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    Accumulators<Width> sums;
    sums.clear();
    if constexpr (C::kParks) sums.park(probs);
#pragma unroll 1
    for (int32_t begin = block.first_tile(); begin < block.any.end; begin += attn::kTile) {
      const bool active = block.warp().meets(begin, attn::kTile);
      float x[kWarpRows][kSlots];
      multiply_rows<Warps>(queries, problem.k, work.item, work.k_base, stage, active, x, [&](int i) { return begin + i; });
      if (active) {
        finish_scores(problem, work.item, block, block.warp().covers(begin, attn::kTile), x,
                      [&](int j) { return begin + j * kLanes + lane_id(); });
        if (pass == 0) {
          state = merged(state, tile_states(x));
        } else {
          tile_probabilities(state, x);
        }
      }
      if (pass == 0) continue;
      if constexpr (C::kParks) {
        Accumulators<Width> parked;
        parked.unpark(probs);
        add_tile<Width, Warps>(problem, work, block.any, begin, active, pass == 2, x, stage, probs, parked.out);
        __syncwarp();
        parked.park(probs);
      } else {
        add_tile<Width, Warps>(problem, work, block.any, begin, active, pass == 2, x, stage, probs, sums.out);
      }
    }
    if (pass == 0) {
      const Row own = block.row(row_of_lane());
      if (problem.sinks != nullptr && own.head >= 0) state = merged(state, attn::RowState{problem.sinks[own.head], 1.0f});
      if (own.head >= 0 && lane_id() == lane_of_row(row_of_lane())) store_state(arguments, work.item, own, state);
      continue;
    }
    if constexpr (C::kParks) sums.unpark(probs);
    if (__syncthreads_or(sums.has_nan()) && pass == 1) continue;
    store_outputs<Width, Warps>(arguments, work.item, block, sums.out);
    break;
  }
}

size_t forward_bytes(const Attention& problem, int warps) {
  return sizeof(float) * (kStageFloats + static_cast<size_t>(warps) * kWarpRows * (kHalfPitch + padded_columns(problem.q.columns)));
}

template <int Width>
int launch_forward(const ForwardArguments& arguments, int64_t blocks, int warps, void* stream) {
  const auto kernel = warps == kMostWarps ? attention_forward_kernel<Width, kMostWarps> : attention_forward_kernel<Width, kMostWarps / 2>;
  return launch(kernel, arguments, blocks, Block{warps * kLanes, 1, true, false, forward_bytes(arguments.problem, warps)}, stream);
}

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_attention_forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes) {
  using namespace attn_cuda;
  if (problem == nullptr || bytes == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check_attention(*problem)) return refusal;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  Limits limits;
  if (const int error = find_limits(device, &limits)) return error;
  const Split split = choose_split(limits, *problem);
  *bytes = input_bytes(*problem) + plan_bytes(*problem, 1) + split_bytes(*problem, split);
  return 0;
}

extern "C" int attn_cuda_attention_forward(int device, void* stream, const attn_cuda_attention* problem,
                                           const attn_cuda_attention_results* results, void* workspace) {
  using namespace attn_cuda;
  if (problem == nullptr || results == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check_attention(*problem)) return refusal;
  if (!is_dtype(results->out_dtype)) return ATTN_CUDA_BAD_DTYPE;
  if (problem->batch == 0 && problem->cu_seqlens_q == nullptr) return 0;
  if (problem->queries == 0 || problem->heads == 0) return 0;
  if (results->out == nullptr || results->lse == nullptr || results->row_max == nullptr || results->row_sum == nullptr)
    return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  Workspace space(workspace);
  ForwardArguments arguments{};
  if (const int error = prepare(device, stream, *problem, space, &arguments.problem)) return error;
  const int64_t rows = problem->queries * problem->heads;
  if (problem->cu_seqlens_q != nullptr) {
    const int64_t bytes = rows * problem->value_dim * size_of(results->out_dtype);
    if (const int error = fill_bytes(results->out, bytes, stream)) return error;
    if (const int error = fill_empty_rows(results->lse, results->row_max, results->row_sum, rows, stream)) return error;
  }
  arguments.out = results->out;
  arguments.out_dtype = results->out_dtype;
  arguments.vectors = stores_fours(results->out, results->out_dtype, problem->value_dim);
  arguments.lse = results->lse;
  arguments.row_max = results->row_max;
  arguments.row_sum = results->row_sum;
  Limits limits;
  if (const int error = find_limits(device, &limits)) return error;
  const Split split = choose_split(limits, *problem);
  if (split.tiles > 0) return launch_split(*problem, arguments, split, space, stream);
  const int warps = fits(limits, forward_bytes(arguments.problem, kMostWarps)) ? kMostWarps : kMostWarps / 2;
  Blocks blocks;
  if (const int error = plan_rows(*problem, arguments.problem, warps * kWarpRows, space, stream, &blocks)) return error;
  arguments.per_item = blocks.per_item;
  arguments.plan = blocks.plan;
  if (blocks.count == 0) return 0;
  if (problem->value_dim <= 64) return launch_forward<64>(arguments, blocks.count, warps, stream);
  if (problem->value_dim <= 128) return launch_forward<128>(arguments, blocks.count, warps, stream);
  return launch_forward<256>(arguments, blocks.count, warps, stream);
}
