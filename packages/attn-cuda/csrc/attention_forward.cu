// Attention forward in two passes over the keys: row states, then P and the chains of out. A block owns 64 or 32 rows of one kv head's
// group at a time. The scores of the first pass wait for the second in the workspace, which holds those of a bounded number of tiles of the
// rows that are in work; where the keys are more, the second pass computes scores again, as many tiles at a time.
#include "attention_columns.cuh"
#include "attention_forward.cuh"

namespace attn_cuda {
namespace {

constexpr int kStageFloats = KeyStage<kMostWarps, kSlots>::kFloats;
constexpr int kWarpTile = kWarpRows * attn::kTile;  // scores of a warp in one tile
static_assert(kStagedFloats <= kStageFloats, "keys and values share the stage");

// Shared memory of a block. P takes the place of the query rows in the second pass.
struct Memory {
  float* stage;
  RowConstants* constants;  // of the warp's rows
  char* raw;
  float* queries;
  float* probs;  // of the warp
};

// Place of the warp's scores of a tile and a step in the block's part of the workspace; one row is attn::kTile after the one before.
template <int Width, int Warps>
__device__ __forceinline__ Floats<Columns<Width>::kStepSlots>* held_scores(float* held, int32_t tile, int step) {
  using C = Columns<Width>;
  float* at = held + (static_cast<int64_t>(tile) * Warps + warp_id()) * kWarpTile + step * C::kKeys + lane_id() * C::kStepSlots;
  return reinterpret_cast<Floats<C::kStepSlots>*>(at);
}

// Scores of the tiles in slots [begin, end), kept in the workspace up to `held_end`; returns the states of the rows, each in its lanes.
template <int Width, int Warps>
__device__ __forceinline__ attn::RowState score_tiles(const Attention& problem, const Work& work, const BlockRows<Warps>& block,
                                                      const Memory& memory, int32_t begin, int32_t end, int32_t held_end, float* held) {
  using C = Columns<Width>;
  using Keys = KeyStage<Warps, kSlots>;
  const Keys keys{memory.stage, memory.raw};
  const auto start = [&](int32_t tile, int column) {
    Keys::Copy::start(problem.k, column, memory.raw, [&](int i) { return key_offset(problem.k, work.item, work.k_base, tile + i); });
  };
  attn::RowState state = attn::empty_row();
  if (begin < end) start(begin, 0);
#pragma unroll 1
  for (int32_t tile = begin; tile < end; tile += attn::kTile) {
    const bool active = block.warp().meets(tile, attn::kTile);
    const Groups groups = block.warp().groups(tile, kSlots, kLanes);
    float x[kWarpRows][kSlots];
    keys.multiply(
        memory.queries, problem.k, active, groups, x, [&](int column) { start(tile, column); },
        [&] {
          if (tile + attn::kTile < end) start(tile + attn::kTile, 0);
        });
    if (!active) continue;
    finish_scores(problem, work.item, block, block.warp().covers(tile, attn::kTile), x,
                  [&](int j) { return tile + j * kLanes + lane_id(); });
    if (tile < held_end) {
      auto* to = held_scores<Width, Warps>(held, (tile - begin) / attn::kTile, 0);
#pragma unroll
      for (int step = 0; step < kSlots / C::kStepSlots; ++step)
        hold<attn::kTile>(to + step * C::kKeys / C::kStepSlots, x, step * C::kStepSlots);
    }
    state = merged(state, tile_states(x, groups));
  }
  return state;
}

// The chains of out over the keys in slots [begin, end), whose scores are in the workspace.
template <int Width, int Warps>
__device__ __forceinline__ void sum_tiles(const Attention& problem, const Work& work, const BlockRows<Warps>& block, const Memory& memory,
                                          int32_t begin, int32_t end, float* held, bool select, Outputs<Width>& out) {
  using C = Columns<Width>;
  const ChainStage<Width, Warps> chains{memory.raw, memory.stage, memory.probs};
  chains.multiply(
      problem.v, max(begin, block.any.begin / C::kKeys * C::kKeys), end, select, out,
      [&](int32_t slot) { return key_offset(problem.v, work.item, work.v_base, slot); },
      [&](int32_t slot) { return block.warp().meets(slot, C::kKeys); },
      [&](int32_t slot, auto& x) {
        recall<attn::kTile>(held_scores<Width, Warps>(held, (slot - begin) / attn::kTile, slot % attn::kTile / C::kKeys), x);
      },
      [&](auto& x) { probabilities_of(x, [&](int r, int) { return memory.constants[r]; }); });
}

// The sink, the stored state, and what P needs of it.
template <int Warps>
__device__ __forceinline__ void finish_states(const ForwardArguments& arguments, const Item& item, const BlockRows<Warps>& block,
                                              attn::RowState state, RowConstants* constants) {
  const Row own = block.row(row_of_lane());
  if (arguments.problem.sinks != nullptr && own.head >= 0) state = merged(state, attn::RowState{arguments.problem.sinks[own.head], 1.0f});
  if (lane_id() != lane_of_row(row_of_lane())) return;
  if (own.head >= 0) store_state(arguments, item, own, state);
  constants[row_of_lane()] = RowConstants{state.max, divisor(state.sum)};
}

template <int Width, int Warps>
__device__ __forceinline__ void attend_rows(const ForwardArguments& arguments, const Work& work, const BlockRows<Warps>& block,
                                            const Memory& memory, float* held) {
  const Attention& problem = arguments.problem;
  sum_in_waves<Width, Warps, kWarpTile>(
      block, held, arguments.held_tiles,
      [&](int32_t wave, int32_t wave_end, bool initial) {
        load_query_rows<Warps>(problem.q, work.item, block.rows, memory.queries);
        const int32_t end = initial ? block.any.end : wave_end;
        const attn::RowState state = score_tiles<Width>(problem, work, block, memory, wave, end, wave_end, held);
        if (initial) finish_states(arguments, work.item, block, state, memory.constants);
        return true;
      },
      [&](int32_t wave, int32_t wave_end, bool select, Outputs<Width>& out) {
        sum_tiles<Width>(problem, work, block, memory, wave, wave_end, held, select, out);
      },
      [&](Outputs<Width>& out) {
        store_rows(out, arguments.out, arguments.out_dtype, problem.value_dim, arguments.vectors, [&](int r) {
          const Row row = block.row(r);
          return row.head < 0 ? kNoRow : query_result(problem, work.item, row, problem.value_dim);
        });
      });
}

template <int Width, int Warps>
__global__ void __launch_bounds__(Warps* kLanes, Width <= 128 && Warps == kMostWarps ? 2 : 1)
    attention_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ float4 storage[];
  auto* constants = reinterpret_cast<RowConstants*>(storage);
  float* stage = reinterpret_cast<float*>(constants + Warps * kWarpRows);
  char* raw = reinterpret_cast<char*>(stage + kStageFloats);
  float* queries = reinterpret_cast<float*>(raw + KeyStage<Warps, kSlots>::raw_bytes(arguments.problem.k.dtype));
  const Memory memory{stage, constants + warp_id() * kWarpRows, raw, queries, queries + warp_id() * kWarpRows * Columns<Width>::kPitch};
  float* held = arguments.held + static_cast<int64_t>(blockIdx.x) * (arguments.held_tiles + 1) * Warps * kWarpTile;
  each_row_block<Warps>(arguments.problem, arguments.blocks, arguments.per_item, arguments.plan,
                        [&](const Work& work, const BlockRows<Warps>& block) { attend_rows<Width>(arguments, work, block, memory, held); });
}

template <int Width>
size_t forward_bytes(const Attention& problem, int warps) {
  const int row_floats = max(padded_columns(problem.q.columns), Columns<Width>::kPitch);
  const size_t rows = static_cast<size_t>(warps) * kWarpRows;
  return rows * sizeof(RowConstants) + kStageFloats * sizeof(float) + KeyStage<kMostWarps, kSlots>::raw_bytes(problem.k.dtype) +
         rows * row_floats * sizeof(float);
}

size_t forward_bytes(const Attention& problem, int warps) {
  return with_width(width_of(problem.value_dim, warps), [&](auto width) { return forward_bytes<width.value>(problem, warps); });
}

RowsInWork forward_rows(const Limits& limits, const attn_cuda_attention& problem) {
  Attention attention{};
  attention.q.columns = columns_in_eights(problem.head_dim);
  attention.k.dtype = problem.k.dtype;
  attention.value_dim = static_cast<int32_t>(problem.value_dim);
  const int warps = choose_warps(limits, [&](int count) { return forward_bytes(attention, count); });
  return rows_in_work(limits, problem, warps, forward_bytes(attention, warps), problem.value_dim <= 128 ? 2 : 1, kWarpTile);
}

int launch_forward(const ForwardArguments& arguments, const RowsInWork& rows, void* stream) {
  return launch_in_work([](auto width, auto warps) { return attention_forward_kernel<decltype(width)::value, decltype(warps)::value>; },
                        arguments.problem.value_dim, arguments, rows, forward_bytes(arguments.problem, rows.warps), stream);
}

int64_t rows_of(const attn_cuda_attention& problem) {
  return problem.heads * problem.queries * (problem.cu_seqlens_q == nullptr ? problem.batch : 1);
}

int64_t row_results_bytes(const attn_cuda_attention& problem) {
  return 3 * aligned(rows_of(problem) * static_cast<int64_t>(sizeof(float)));
}

float* row_result(const attn_cuda_attention& problem, float* wanted, Workspace& space) {
  return wanted != nullptr ? wanted : space.take<float>(rows_of(problem));
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
  *bytes = row_results_bytes(*problem) + input_bytes(*problem) + plan_bytes(*problem, 1) +
           (split.tiles > 0 ? split_bytes(*problem, split) : forward_rows(limits, *problem).bytes);
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
  if (results->out == nullptr) return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  Workspace space(workspace);
  ForwardArguments arguments{};
  arguments.lse = row_result(*problem, results->lse, space);
  arguments.row_max = row_result(*problem, results->row_max, space);
  arguments.row_sum = row_result(*problem, results->row_sum, space);
  if (const int error = prepare(device, stream, *problem, space, &arguments.problem)) return error;
  if (problem->cu_seqlens_q != nullptr) {
    const int64_t rows = problem->queries * problem->heads, bytes = rows * problem->value_dim * size_of(results->out_dtype);
    if (const int error = fill_bytes(results->out, bytes, stream)) return error;
    if (const int error = fill_empty_rows(arguments.lse, arguments.row_max, arguments.row_sum, rows, stream)) return error;
  }
  arguments.out = results->out;
  arguments.out_dtype = results->out_dtype;
  arguments.vectors = stores_fours(results->out, results->out_dtype, problem->value_dim);
  Limits limits;
  if (const int error = find_limits(device, &limits)) return error;
  const Split split = choose_split(limits, *problem);
  if (split.tiles > 0) return launch_split(*problem, arguments, split, space, stream);
  const RowsInWork in_work = forward_rows(limits, *problem);
  Blocks blocks;
  if (const int error = plan_rows(*problem, arguments.problem, in_work.warps * kWarpRows, space, stream, &blocks)) return error;
  arguments.per_item = blocks.per_item;
  arguments.plan = blocks.plan;
  arguments.blocks = blocks.count;
  arguments.held = reinterpret_cast<float*>(space.take<char>(in_work.bytes));
  arguments.held_tiles = static_cast<int32_t>(in_work.held_tiles);
  if (blocks.count == 0) return 0;
  return launch_forward(arguments, in_work, stream);
}
