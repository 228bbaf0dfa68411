// delta of every row: P and dP of whole tiles in the layout of the forward kernel, for the tree of P * dP; and the gradient of the sinks.
#include "attention_backward.cuh"
#include "attention_rows.cuh"

namespace attn_cuda {
namespace {

constexpr int kMostDeltaWarps = 8;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kHalfSlots = kSlots / 2;

struct DeltaArguments {
  BackwardInputs inputs;
  int64_t per_item;
  const int64_t* plan;
  float* delta;
  float* dsink;  // of each row, null when not wanted
};

__device__ __forceinline__ float sink_gradient(const Attention& problem, Row row, attn::RowState state, float delta) {
  const float sink = problem.sinks[row.head];
  return sink == attn::negative_infinity() ? 0.0f : mul(-attn::probability(sink, state), delta);
}

// Half a tile: the 32-slot groups of one parity. Their part of the tree down to 32 slots is within a lane. `live` gets bit r when row r has
// an unmasked slot.
template <int Warps>
__device__ __forceinline__ void half_products(const DeltaArguments& arguments, const Work& work, const BlockRows<Warps>& block,
                                              const float* queries, const float* upstream, float* stage, int32_t begin, bool active,
                                              bool all_visible, attn::RowState state, float (&products)[kWarpRows], uint32_t& live) {
  const Attention& problem = arguments.inputs.problem;
  const auto slot_of_key = [&](int i) { return begin + i / kLanes * (2 * kLanes) + i % kLanes; };
  float x[kWarpRows][kHalfSlots], dp[kWarpRows][kHalfSlots];
  multiply_rows<Warps>(queries, problem.k, work.item, work.k_base, stage, active, x, slot_of_key);
  if (active) {
    finish_scores(problem, work.item, block, all_visible, x, [&](int j) { return begin + j * (2 * kLanes) + lane_id(); });
    const Divisor own = divisor(state.sum);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int from = lane_of_row(r);
      const Divisor sum{__shfl_sync(kAllLanes, own.value, from), __shfl_sync(kAllLanes, own.reciprocal, from),
                        __shfl_sync(kAllLanes, own.correction, from)};
      row_probabilities(x[r], __shfl_sync(kAllLanes, state.max, from), sum);
    }
  }
  multiply_rows<Warps>(upstream, problem.v, work.item, work.v_base, stage, active, dp, slot_of_key);
  if (!active) return;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    float product[kHalfSlots];
#pragma unroll
    for (int j = 0; j < kHalfSlots; ++j) {
      const bool masked = is_masked(x[r][j]);
      product[j] = masked ? 0.0f : mul(x[r][j], dp[r][j]);
      live |= masked ? 0u : 1u << r;
    }
    products[r] = add(add(product[0], product[2]), add(product[1], product[3]));
  }
}

template <int Warps>
__global__ void __launch_bounds__(Warps* kLanes, Warps == kMostDeltaWarps ? 2 : 1)
    delta_kernel(const __grid_constant__ DeltaArguments arguments) {
  const Attention& problem = arguments.inputs.problem;
  extern __shared__ float4 storage[];
  __shared__ Work work;
  __shared__ BlockRows<Warps> block;
  float* stage = reinterpret_cast<float*>(storage);
  float* queries = stage + kHalfSlots * kLanes * kChunkPitch;
  float* upstream = queries + Warps * kWarpRows * padded_columns(problem.q.columns);
  if (!share_work(problem, blockIdx.x, arguments.per_item, arguments.plan, &work)) return;
  block.find(problem, work);
  load_query_rows<Warps>(problem.q, work.item, block.rows, queries);
  load_query_rows<Warps>(arguments.inputs.dout, work.item, block.rows, upstream);
  const Row own = block.row(row_of_lane());
  const int64_t index = own.head < 0 ? 0 : row_index(problem, work.item, own);
  const attn::RowState state =
      own.head < 0 ? attn::RowState{0.0f, 1.0f} : attn::RowState{arguments.inputs.row_max[index], arguments.inputs.row_sum[index]};
  float delta = 0.0f;
  bool begun = false;
#pragma unroll 1
  for (int32_t begin = block.first_tile(); begin < block.any.end; begin += attn::kTile) {
    const bool active = block.warp().meets(begin, attn::kTile), all_visible = block.warp().covers(begin, attn::kTile);
    float sums[kWarpRows];
    uint32_t live = 0;
#pragma unroll 1
    for (int parity = 0; parity < 2; ++parity) {
      float products[kWarpRows];
      half_products(arguments, work, block, queries, upstream, stage, begin + parity * kLanes, active, all_visible, state, products, live);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) sums[r] = parity == 0 ? products[r] : add(sums[r], products[r]);
    }
    if (!active) continue;
    const float sum = reduce_lanes(sums, [](float a, float b) { return add(a, b); });
    live = __reduce_or_sync(kAllLanes, live);
    if (live >> row_of_lane() & 1u) {
      delta = begun ? add(delta, sum) : sum;
      begun = true;
    }
  }
  if (own.head < 0 || lane_id() != lane_of_row(row_of_lane())) return;
  if (arguments.inputs.dlse != nullptr) delta = sub(delta, arguments.inputs.dlse[index]);
  arguments.delta[index] = delta;
  if (arguments.dsink != nullptr) arguments.dsink[index] = sink_gradient(problem, own, state, delta);
}

struct SinkArguments {
  Attention problem;
  const float* rows;
  float* items;  // [batch, H]
  float* dsinks;
};

// Sums over the queries of one head of one item, ascending, by one warp: lanes load, every lane adds.
__global__ void __launch_bounds__(kThreads) sink_rows_kernel(const __grid_constant__ SinkArguments arguments) {
  const Attention& problem = arguments.problem;
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id();
  if (id >= problem.batch * problem.heads) return;
  const int64_t batch = id / problem.heads;
  const Item item = item_of(problem, batch);
  const Row row{static_cast<int32_t>(id - batch * problem.heads), 0};
  const float* rows = arguments.rows + row_index(problem, item, row);
  float sum = 0.0f;
  for (int64_t base = 0; base < item.queries; base += kLanes) {
    const float own = base + lane_id() < item.queries ? rows[base + lane_id()] : 0.0f;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const float term = __shfl_sync(kAllLanes, own, i);
      sum = base + i < item.queries ? add(sum, term) : sum;
    }
  }
  if (lane_id() == 0) arguments.items[id] = sum;
}

__global__ void __launch_bounds__(kThreads) sink_items_kernel(const __grid_constant__ SinkArguments arguments) {
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (head >= arguments.problem.heads) return;
  float sum = 0.0f;
  for (int64_t batch = 0; batch < arguments.problem.batch; ++batch) sum = add(sum, arguments.items[batch * arguments.problem.heads + head]);
  arguments.dsinks[head] = attn::positive_zero(sum);
}

size_t delta_bytes(const BackwardInputs& inputs, int warps) {
  const int columns = padded_columns(inputs.problem.q.columns) + padded_columns(inputs.dout.columns);
  return sizeof(float) * (kHalfSlots * kLanes * kChunkPitch + static_cast<size_t>(warps) * kWarpRows * columns);
}

}  // namespace

int delta_rows(const Limits& limits, const BackwardInputs& inputs) {
  return (fits(limits, delta_bytes(inputs, kMostDeltaWarps)) ? kMostDeltaWarps : kMostDeltaWarps / 2) * kWarpRows;
}

int launch_delta(const BackwardInputs& inputs, const Blocks& blocks, int rows, float* delta, float* dsink, void* stream) {
  if (blocks.count == 0) return 0;
  const DeltaArguments arguments{inputs, blocks.per_item, blocks.plan, delta, dsink};
  const int warps = rows / kWarpRows;
  const auto kernel = warps == kMostDeltaWarps ? delta_kernel<kMostDeltaWarps> : delta_kernel<kMostDeltaWarps / 2>;
  return launch(kernel, arguments, blocks.count, Block{warps * kLanes, 1, true, false, delta_bytes(inputs, warps)}, stream);
}

int launch_sinks(const Attention& problem, const float* rows, float* items, float* dsinks, void* stream) {
  const SinkArguments arguments{problem, rows, items, dsinks};
  const int64_t blocks = (problem.batch * problem.heads + kWarps - 1) / kWarps;
  if (blocks > 0)
    if (const int error = launch(sink_rows_kernel, arguments, blocks, Block{kThreads, 1, true, false, 0}, stream)) return error;
  return launch(sink_items_kernel, arguments, (problem.heads + kThreads - 1) / kThreads, Block{kThreads, 1, true, false, 0}, stream);
}

}  // namespace attn_cuda
