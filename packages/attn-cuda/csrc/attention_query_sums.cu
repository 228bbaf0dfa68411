// delta of every row, the tree of P * dP over whole tiles, then dq; and the gradient of the sinks. A block owns rows as in the forward, and
// P and dP of the first pass wait for the second in the workspace as scores do there.
#include "attention_backward.cuh"
#include "attention_columns.cuh"

namespace attn_cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kHalfSlots = kSlots / 2;
constexpr int kWarpTile = 2 * kWarpRows * attn::kTile;  // P and dP of a warp in one tile

template <int Warps>
using HalfKeys = KeyStage<Warps, kHalfSlots>;

struct QuerySumArguments {
  BackwardInputs inputs;
  int64_t per_item, blocks;
  const int64_t* plan;
  float* delta;
  float* dsink;  // of each row, null when not wanted
  void* dq;      // null when not wanted
  bool vectors;
  float* held;  // P and dP of held_tiles tiles for each block in work, and one more tile to park sums
  int32_t held_tiles;
};

struct alignas(16) GradientRow {
  RowConstants constants;
  float delta;
};

// Shared memory of a block; the second pass lays it out anew.
struct Memory {
  GradientRow* rows;  // of the warp
  char* raw;
  float* stage;
  float* queries;
  float* upstream;
  float* sum_stage;
  float* weights;  // dS of the warp
};

__device__ __forceinline__ float sink_gradient(const Attention& problem, Row row, attn::RowState state, float delta) {
  const float sink = problem.sinks[row.head];
  return sink == attn::negative_infinity() ? 0.0f : mul(-attn::probability(sink, state), delta);
}

// P and dP of neighbouring 32-slot groups of one parity: as many as a step of the second pass takes of each parity.
template <int Width>
struct HeldPairs {
  static constexpr int kEach = Columns<Width>::kStepSlots < 2 ? 1 : Columns<Width>::kStepSlots / 2;
  using Type = Floats<2 * kEach>;
};

// Place of group `parity` + 2 j of the warp's row 0; one row is 2 * attn::kTile floats after the one before.
template <int Width, int Warps>
__device__ __forceinline__ typename HeldPairs<Width>::Type* held_pairs(float* held, int32_t tile, int parity, int j) {
  using H = HeldPairs<Width>;
  float* at = held + (static_cast<int64_t>(tile) * Warps + warp_id()) * kWarpTile + parity * attn::kTile + j * (2 * kLanes) +
              lane_id() * (2 * H::kEach);
  return reinterpret_cast<typename H::Type*>(at);
}

// Half a tile: the 32-slot groups of one parity. Their part of the tree down to 32 slots is within a lane. `live` gets bit r when row r has
// an unmasked slot. P and dP go to `held` unless it is null.
template <int Width, int Warps, typename After>
__device__ __forceinline__ void half_products(const QuerySumArguments& arguments, const Work& work, const BlockRows<Warps>& block,
                                              const Memory& memory, int32_t begin, bool active, bool all_visible, float* held, int32_t tile,
                                              int parity, float (&products)[kWarpRows], uint32_t& live, After after) {
  using Copy = typename HalfKeys<Warps>::Copy;
  using H = HeldPairs<Width>;
  const Attention& problem = arguments.inputs.problem;
  const HalfKeys<Warps> keys{memory.stage, memory.raw};
  const Groups groups = block.warp().groups(begin, kHalfSlots, 2 * kLanes);
  const auto slot_of_key = [&](int i) { return begin + i / kLanes * (2 * kLanes) + i % kLanes; };
  const auto start_values = [&](int column) {
    Copy::start(problem.v, column, memory.raw, [&](int i) { return key_offset(problem.v, work.item, work.v_base, slot_of_key(i)); });
  };
  float x[kWarpRows][kHalfSlots], dp[kWarpRows][kHalfSlots];
  keys.multiply(
      memory.queries, problem.k, active, groups, x,
      [&](int column) {
        Copy::start(problem.k, column, memory.raw, [&](int i) { return key_offset(problem.k, work.item, work.k_base, slot_of_key(i)); });
      },
      [&] { start_values(0); });
  if (active) {
    finish_scores(problem, work.item, block, all_visible, x, [&](int j) { return begin + j * (2 * kLanes) + lane_id(); });
    probabilities_of(x, [&](int r, int) { return memory.rows[r].constants; });
  }
  keys.multiply(memory.upstream, problem.v, active, groups, dp, start_values, after);
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
    if (held == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kHalfSlots; j += H::kEach) {
      typename H::Type pairs;
#pragma unroll
      for (int i = 0; i < H::kEach; ++i) {
        pairs.values[2 * i] = x[r][j + i];
        pairs.values[2 * i + 1] = dp[r][j + i];
      }
      held_pairs<Width, Warps>(held, tile, parity, j)[r * attn::kTile / H::kEach] = pairs;
    }
  }
}

// P and dP of the tiles in slots [begin, end), kept in the workspace up to `held_end`; returns delta of the row of the lane.
template <int Width, int Warps>
__device__ __forceinline__ float gradient_tiles(const QuerySumArguments& arguments, const Work& work, const BlockRows<Warps>& block,
                                                const Memory& memory, int32_t begin, int32_t end, int32_t held_end, float* held) {
  const Attention& problem = arguments.inputs.problem;
  const auto start = [&](int32_t first) {
    HalfKeys<Warps>::Copy::start(problem.k, 0, memory.raw, [&](int i) {
      return key_offset(problem.k, work.item, work.k_base, first + i / kLanes * (2 * kLanes) + i % kLanes);
    });
  };
  float delta = 0.0f;
  bool begun = false;
  if (begin < end) start(begin);
#pragma unroll 1
  for (int32_t tile = begin; tile < end; tile += attn::kTile) {
    const bool active = block.warp().meets(tile, attn::kTile), all_visible = block.warp().covers(tile, attn::kTile);
    float sums[kWarpRows];
    uint32_t live = 0;
#pragma unroll 1
    for (int parity = 0; parity < 2; ++parity) {
      float products[kWarpRows];
      half_products<Width>(arguments, work, block, memory, tile + parity * kLanes, active, all_visible, tile < held_end ? held : nullptr,
                           (tile - begin) / attn::kTile, parity, products, live, [&] {
                             const int32_t next = parity == 0 ? tile + kLanes : tile + attn::kTile;
                             if (next < end) start(next);
                           });
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
  return delta;
}

// The chains of dq over the keys in slots [begin, end), whose P and dP are in the workspace.
template <int Width, int Warps>
__device__ __forceinline__ void sum_tiles(const Attention& problem, const Work& work, const BlockRows<Warps>& block, const Memory& memory,
                                          int32_t begin, int32_t end, float* held, bool select, Outputs<Width>& out) {
  using C = Columns<Width>;
  using H = HeldPairs<Width>;
  const ChainStage<Width, Warps> chains{memory.raw, memory.sum_stage, memory.weights};
  chains.multiply(
      problem.k, max(begin, block.any.begin / C::kKeys * C::kKeys), end, select, out,
      [&](int32_t slot) { return key_offset(problem.k, work.item, work.k_base, slot); },
      [&](int32_t slot) { return block.warp().meets(slot, C::kKeys); },
      [&](int32_t slot, float (&ds)[kWarpRows][C::kStepSlots]) {
        const int group = slot % attn::kTile / kLanes;
#pragma unroll
        for (int first = 0; first < C::kStepSlots && first < 2; ++first) {
          const auto* from = held_pairs<Width, Warps>(held, (slot - begin) / attn::kTile, (group + first) % 2, (group + first) / 2);
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) {
            const typename H::Type pairs = from[r * attn::kTile / H::kEach];
            const float delta = memory.rows[r].delta;
#pragma unroll
            for (int i = 0; i < H::kEach; ++i) {
              const float p = pairs.values[2 * i];
              ds[r][first + 2 * i] = is_masked(p) ? masked_value() : attn::score_gradient(p, pairs.values[2 * i + 1], delta);
            }
          }
        }
      },
      [](const auto&) {});
}

template <int Width, int Warps>
__device__ __forceinline__ void gradients_of_rows(const QuerySumArguments& arguments, const Work& work, const BlockRows<Warps>& block,
                                                  const Memory& memory, float* held) {
  const Attention& problem = arguments.inputs.problem;
  const Row own = block.row(row_of_lane());
  const int64_t index = own.head < 0 ? 0 : row_index(problem, work.item, own);
  const bool of_row = lane_id() == lane_of_row(row_of_lane());
  const attn::RowState state =
      own.head < 0 ? attn::RowState{0.0f, 1.0f} : attn::RowState{arguments.inputs.row_max[index], arguments.inputs.row_sum[index]};
  sum_in_waves<Width, Warps, kWarpTile>(
      block, held, arguments.held_tiles,
      [&](int32_t wave, int32_t wave_end, bool initial) {
        if (initial && of_row) memory.rows[row_of_lane()] = GradientRow{RowConstants{state.max, divisor(state.sum)}, 0.0f};
        load_query_rows<Warps>(problem.q, work.item, block.rows, memory.queries);
        load_query_rows<Warps>(arguments.inputs.dout, work.item, block.rows, memory.upstream);
        __syncthreads();
        float delta = gradient_tiles<Width>(arguments, work, block, memory, wave, initial ? block.any.end : wave_end,
                                            arguments.dq == nullptr ? wave : wave_end, held);
        if (initial && arguments.inputs.dlse != nullptr && own.head >= 0) delta = sub(delta, arguments.inputs.dlse[index]);
        if (initial && of_row) {
          memory.rows[row_of_lane()].delta = delta;
          if (own.head >= 0) {
            arguments.delta[index] = delta;
            if (arguments.dsink != nullptr) arguments.dsink[index] = sink_gradient(problem, own, state, delta);
          }
        }
        __syncthreads();
        return arguments.dq != nullptr;
      },
      [&](int32_t wave, int32_t wave_end, bool select, Outputs<Width>& out) {
        sum_tiles<Width>(problem, work, block, memory, wave, wave_end, held, select, out);
      },
      [&](Outputs<Width>& out) {
        out.multiply(problem.scale);
        store_rows(out, arguments.dq, problem.q.dtype, problem.head_dim, arguments.vectors, [&](int r) {
          const Row row = block.row(r);
          return row.head < 0 ? kNoRow : query_result(problem, work.item, row, problem.head_dim);
        });
      });
}

template <int Width, int Warps>
__global__ void __launch_bounds__(Warps* kLanes, Width <= 128 && Warps == kWarps ? 2 : 1)
    query_sums_kernel(const __grid_constant__ QuerySumArguments arguments) {
  const Attention& problem = arguments.inputs.problem;
  extern __shared__ float4 storage[];
  auto* rows = reinterpret_cast<GradientRow*>(storage);
  Memory memory{};
  memory.rows = rows + warp_id() * kWarpRows;
  memory.raw = reinterpret_cast<char*>(rows + Warps * kWarpRows);
  memory.stage = reinterpret_cast<float*>(memory.raw + HalfKeys<Warps>::raw_bytes(problem.k.dtype));
  memory.queries = memory.stage + HalfKeys<Warps>::kFloats;
  memory.upstream = memory.queries + Warps * kWarpRows * padded_columns(problem.q.columns);
  memory.sum_stage = reinterpret_cast<float*>(memory.raw + kStagedFloats * (problem.k.dtype == ATTN_CUDA_FLOAT32 ? 4 : 2));
  memory.weights = memory.sum_stage + kStagedFloats + warp_id() * kWarpRows * Columns<Width>::kPitch;
  float* held = arguments.held + static_cast<int64_t>(blockIdx.x) * (arguments.held_tiles + 1) * Warps * kWarpTile;
  each_row_block<Warps>(
      problem, arguments.blocks, arguments.per_item, arguments.plan,
      [&](const Work& work, const BlockRows<Warps>& block) { gradients_of_rows<Width>(arguments, work, block, memory, held); });
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

struct Sizes {
  int head_dim, value_dim;
  int32_t dtype;
};

template <int Width>
size_t query_sum_bytes(const Sizes& sizes, int warps) {
  const size_t rows = static_cast<size_t>(warps) * kWarpRows, element = sizes.dtype == ATTN_CUDA_FLOAT32 ? 4 : 2;
  const size_t columns = padded_columns(sizes.head_dim) + padded_columns(sizes.value_dim);
  const size_t first = HalfKeys<kWarps>::raw_bytes(sizes.dtype) + sizeof(float) * (HalfKeys<kWarps>::kFloats + rows * columns);
  const size_t second = kStagedFloats * element + sizeof(float) * (kStagedFloats + rows * Columns<Width>::kPitch);
  return rows * sizeof(GradientRow) + (first > second ? first : second);
}

size_t query_sum_bytes(const Sizes& sizes, int warps) {
  return with_width(width_of(sizes.head_dim, warps), [&](auto width) { return query_sum_bytes<width.value>(sizes, warps); });
}

Sizes sizes_of(const attn_cuda_attention& problem) {
  return Sizes{columns_in_eights(problem.head_dim), columns_in_eights(problem.value_dim), problem.k.dtype};
}

}  // namespace

RowsInWork query_sum_rows(const Limits& limits, const attn_cuda_attention& problem) {
  const Sizes sizes = sizes_of(problem);
  const int warps = choose_warps(limits, [&](int count) { return query_sum_bytes(sizes, count); });
  return rows_in_work(limits, problem, warps, query_sum_bytes(sizes, warps), sizes.head_dim <= 128 ? 2 : 1, kWarpTile);
}

int launch_query_sums(const attn_cuda_attention& problem, const BackwardInputs& inputs, const RowsInWork& rows, const Blocks& blocks,
                      float* held, float* delta, float* dsink, void* dq, void* stream) {
  if (blocks.count == 0) return 0;
  const QuerySumArguments arguments{inputs,       blocks.per_item,
                                    blocks.count, blocks.plan,
                                    delta,        dsink,
                                    dq,           stores_fours(dq, inputs.problem.q.dtype, inputs.problem.head_dim),
                                    held,         static_cast<int32_t>(rows.held_tiles)};
  return launch_in_work([](auto width, auto warps) { return query_sums_kernel<decltype(width)::value, decltype(warps)::value>; },
                        problem.head_dim, arguments, rows, query_sum_bytes(sizes_of(problem), rows.warps), stream);
}

int launch_sinks(const Attention& problem, const float* rows, float* items, float* dsinks, void* stream) {
  const SinkArguments arguments{problem, rows, items, dsinks};
  const int64_t blocks = (problem.batch * problem.heads + kWarps - 1) / kWarps;
  if (blocks > 0)
    if (const int error = launch(sink_rows_kernel, arguments, blocks, Block{kThreads, 1, true, false, 0}, stream)) return error;
  return launch(sink_items_kernel, arguments, (problem.heads + kThreads - 1) / kThreads, Block{kThreads, 1, true, false, 0}, stream);
}

}  // namespace attn_cuda
