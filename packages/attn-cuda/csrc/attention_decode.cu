// Attention forward for few rows and many keys. Tiles are spread over the device: states of all tiles, merged in order; then, a wave of
// tiles at a time, P of the tiles to the workspace and the chains of out over them, spread over rows and columns. The bits are those of the
// other way.
#include "attention_forward.cuh"

namespace attn_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockWarps = kThreads / kLanes;
constexpr int64_t kFewRows = 16;
constexpr int64_t kManyKeys = 512;
constexpr int64_t kLongestWave = 64;                 // tiles
constexpr int64_t kLargestWave = int64_t{64} << 20;  // bytes of P

struct SplitArguments {
  ForwardArguments forward;
  int64_t tiles;       // of a row
  int64_t first_tile;  // of this wave
  int64_t wave;        // tiles of a row that `probs` holds
  int64_t row_blocks;
  int64_t slices;          // of columns
  attn::RowState* states;  // [rows, tiles]
  float* probs;            // [rows, wave * 256]
  float* sums;             // [rows, V], chains so far
  bool begins, ends;
};

// Scores of one tile for the rows of a block: states, or P once the rows' states are known.
template <int Warps, bool Probabilities>
__global__ void __launch_bounds__(Warps* kLanes, Warps == 1 ? 1 : 2) tile_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  extern __shared__ float4 storage[];
  __shared__ Work work;
  __shared__ BlockRows<Warps> block;
  using Keys = KeyStage<Warps, kSlots>;
  const Keys keys{reinterpret_cast<float*>(storage), reinterpret_cast<char*>(storage) + Keys::kFloats * sizeof(float)};
  float* queries = reinterpret_cast<float*>(keys.raw + Keys::raw_bytes(problem.k.dtype));
  const int64_t in_wave = blockIdx.x / arguments.row_blocks, tile = arguments.first_tile + in_wave;
  share_work(problem, blockIdx.x - in_wave * arguments.row_blocks, arguments.forward.per_item, nullptr, &work);
  block.find(problem, work);
  const auto begin = static_cast<int32_t>(tile * attn::kTile);
  const Range any = block.any;
  const bool active = any.begin < begin + attn::kTile && any.end > begin;
  const Row own = block.row(row_of_lane());
  const int64_t index = own.head < 0 ? 0 : row_index(problem, work.item, own);
  const Groups groups = block.warp().groups(begin, kSlots, kLanes);
  float x[kWarpRows][kSlots];
  if (active) {
    load_query_rows<Warps>(problem.q, work.item, block.rows, queries);
    const auto start = [&](int column) {
      Keys::Copy::start(problem.k, column, keys.raw, [&](int i) { return key_offset(problem.k, work.item, work.k_base, begin + i); });
    };
    start(0);
    keys.multiply(queries, problem.k, true, groups, x, start, [] {});
    finish_scores(problem, work.item, block, block.warp().covers(begin, attn::kTile), x,
                  [&](int j) { return begin + j * kLanes + lane_id(); });
  }
  if constexpr (!Probabilities) {
    const attn::RowState state = active ? tile_states(x, groups) : attn::empty_row();
    if (own.head >= 0 && lane_id() == lane_of_row(row_of_lane())) arguments.states[index * arguments.tiles + tile] = state;
  } else {
    __shared__ RowConstants constants[Warps * kWarpRows];
    const float max = own.head < 0 ? 0.0f : arguments.forward.row_max[index];
    const Divisor sum = divisor(own.head < 0 ? 1.0f : arguments.forward.row_sum[index]);
    if (lane_id() == lane_of_row(row_of_lane())) constants[warp_id() * kWarpRows + row_of_lane()] = RowConstants{max, sum};
    __syncwarp();
    if (active) probabilities_of(x, [&](int r, int) { return constants[warp_id() * kWarpRows + r]; });
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const Row row = block.row(r);
      if (row.head < 0) continue;
      float* to = arguments.probs + (row_index(problem, work.item, row) * arguments.wave + in_wave) * attn::kTile + lane_id();
#pragma unroll
      for (int j = 0; j < kSlots; ++j) to[j * kLanes] = active ? x[r][j] : masked_value();
    }
  }
}

// States of the rows: tiles in order, then the sink. One warp a row.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kBlockWarps + warp_id();
  if (index >= problem.batch * problem.heads * problem.queries) return;
  attn::RowState state =
      merge_tiles(arguments.states + index * arguments.tiles, static_cast<int>(arguments.tiles), attn::empty_row(), lane_id());
  const int64_t batch_head = index / problem.queries;
  if (problem.sinks != nullptr) state = merged(state, attn::RowState{problem.sinks[batch_head % problem.heads], 1.0f});
  if (lane_id() != 0) return;
  Item item{};
  item.batch = batch_head / problem.heads;
  const Row row{static_cast<int32_t>(batch_head % problem.heads), static_cast<int32_t>(index - batch_head * problem.queries)};
  store_state(arguments.forward, item, row, state);
}

struct ValuesShared {
  float values[attn::kTile * kLanes];
  float probs[kBlockWarps][attn::kTile];
};

template <bool Select>
__device__ __forceinline__ float chain_values(const float* probs, const float* values, float sum) {
#pragma unroll 8
  for (int key = 0; key < attn::kTile; key += 4) {
    const float4 p = *reinterpret_cast<const float4*>(probs + key);
    const float weight[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!Select || !is_masked(weight[i])) sum = exact_fma(weight[i], values[(key + i) * kLanes + lane_id()], sum);
  }
  return sum;
}

// Chains of out over one wave: a warp owns a row, a lane a column.
__global__ void __launch_bounds__(kThreads) values_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  __shared__ Work work;
  __shared__ BlockRows<1> block;
  __shared__ float4 storage[sizeof(ValuesShared) / sizeof(float4)];
  auto* shared = reinterpret_cast<ValuesShared*>(storage);
  const int64_t id = blockIdx.x / arguments.slices;
  const auto first_column = static_cast<int32_t>((blockIdx.x - id * arguments.slices) * kLanes);
  share_work(problem, id, arguments.forward.per_item, nullptr, &work);
  block.find(problem, work);
  const Row row = block.rows[warp_id()];
  const int32_t column = first_column + lane_id();
  const bool stores = row.head >= 0 && column < problem.value_dim;
  const int64_t index = row.head < 0 ? 0 : row_index(problem, work.item, row);
  const Range any = block.any;
  const int64_t wave_begin = arguments.first_tile * attn::kTile, wave_end = wave_begin + arguments.wave * attn::kTile;
  const int64_t begin = any.begin < any.end ? max(wave_begin, static_cast<int64_t>(any.begin / attn::kTile * attn::kTile)) : wave_end;
  const int64_t end = min(wave_end, static_cast<int64_t>(any.end));
  const float* probs = arguments.probs + index * arguments.wave * attn::kTile;
  RowsInFlight<kThreads, attn::kTile, kLanes> values;
  float next[kSlots];
  const auto load = [&](int64_t slot) {
    values.load(problem.v, first_column,
                [&](int i) { return key_offset(problem.v, work.item, work.v_base, static_cast<int32_t>(slot) + i); });
#pragma unroll
    for (int j = 0; j < kSlots; ++j) next[j] = row.head < 0 ? masked_value() : probs[slot - wave_begin + j * kLanes + lane_id()];
  };
  const float before = arguments.begins || !stores ? 0.0f : arguments.sums[index * problem.value_dim + column];
  float sum = before;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    sum = before;
    if (begin < end) load(begin);
#pragma unroll 1
    for (int64_t slot = begin; slot < end; slot += attn::kTile) {
      values.store(problem.v.dtype, shared->values, kLanes);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) shared->probs[warp_id()][j * kLanes + lane_id()] = next[j];
      __syncthreads();
      if (slot + attn::kTile < end) load(slot + attn::kTile);
      sum = pass == 0 ? chain_values<false>(shared->probs[warp_id()], shared->values, sum)
                      : chain_values<true>(shared->probs[warp_id()], shared->values, sum);
      __syncthreads();
    }
    // As in the other way: a NaN may come from a masked pair, so sum again without those.
    if (!__syncthreads_or(attn::is_nan(sum))) break;
  }
  if (!stores) return;
  if (!arguments.ends) {
    arguments.sums[index * problem.value_dim + column] = sum;
    return;
  }
  const float one[4] = {sum, 0.0f, 0.0f, 0.0f};
  store_four(arguments.forward.out, arguments.forward.out_dtype, query_result(problem, work.item, row, problem.value_dim) + column, one, 1,
             false);
}

size_t tile_bytes(int columns, int32_t dtype, int warps) {
  using Keys = KeyStage<kMostWarps, kSlots>;
  return Keys::raw_bytes(dtype) + sizeof(float) * (Keys::kFloats + static_cast<size_t>(warps) * kWarpRows * padded_columns(columns));
}

template <int Warps>
int launch_tiles(SplitArguments arguments, int64_t tiles, bool probabilities, void* stream) {
  const Attention& problem = arguments.forward.problem;
  arguments.forward.per_item = (problem.queries * problem.group + Warps * kWarpRows - 1) / (Warps * kWarpRows);
  arguments.row_blocks = arguments.forward.per_item * problem.batch * problem.kv_heads;
  const size_t bytes = tile_bytes(problem.q.columns, problem.k.dtype, Warps);
  if (arguments.row_blocks * tiles >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  const auto kernel = probabilities ? tile_kernel<Warps, true> : tile_kernel<Warps, false>;
  return launch(kernel, arguments, arguments.row_blocks * tiles, Block{Warps * kLanes, 1, true, false, bytes}, stream);
}

int64_t total_rows(const attn_cuda_attention& problem) { return problem.batch * problem.heads * problem.queries; }

}  // namespace

Split choose_split(const Limits& limits, const attn_cuda_attention& problem) {
  if (problem.cu_seqlens_q != nullptr || problem.keys < kManyKeys || total_rows(problem) == 0) return Split{0, 0, 0};
  const int64_t rows = problem.queries * (problem.heads / problem.kv_heads);
  const int64_t blocks = (rows + kMostWarps * kWarpRows - 1) / (kMostWarps * kWarpRows) * problem.batch * problem.kv_heads;
  if (rows > kFewRows && blocks >= limits.processors) return Split{0, 0, 0};
  const int64_t tiles = (problem.keys + 2 * attn::kTile - 2) / attn::kTile;  // wherever the first key lies in its tile
  const int64_t room = kLargestWave / (total_rows(problem) * attn::kTile * 4);
  const bool many = rows > kFewRows && fits(limits, tile_bytes(static_cast<int>(problem.head_dim), problem.k.dtype, kMostWarps));
  return Split{tiles, clamped(room, 1, tiles < kLongestWave ? tiles : kLongestWave), many ? kMostWarps : 1};
}

int64_t split_bytes(const attn_cuda_attention& problem, const Split& split) {
  if (split.tiles == 0) return 0;
  const int64_t rows = total_rows(problem);
  return aligned(rows * split.tiles * 8) + aligned(rows * split.wave * attn::kTile * 4) + aligned(rows * problem.value_dim * 4);
}

int launch_split(const attn_cuda_attention& problem, const ForwardArguments& forward, const Split& split, Workspace& space, void* stream) {
  const int64_t rows = total_rows(problem);
  SplitArguments arguments{};
  arguments.forward = forward;
  arguments.tiles = split.tiles;
  arguments.wave = split.wave;
  arguments.slices = (problem.value_dim + kLanes - 1) / kLanes;
  arguments.states = space.take<attn::RowState>(rows * split.tiles);
  arguments.probs = space.take<float>(rows * split.wave * attn::kTile);
  arguments.sums = space.take<float>(rows * problem.value_dim);
  const auto tiles_of = [&](int64_t tiles, bool probabilities) {
    return split.warps == 1 ? launch_tiles<1>(arguments, tiles, probabilities, stream)
                            : launch_tiles<kMostWarps>(arguments, tiles, probabilities, stream);
  };
  if (const int error = tiles_of(split.tiles, false)) return error;
  if (const int error = launch(merge_kernel, arguments, (rows + kBlockWarps - 1) / kBlockWarps, Block{kThreads, 1, true, false, 0}, stream))
    return error;
  arguments.forward.per_item = (problem.queries * (problem.heads / problem.kv_heads) + kWarpRows - 1) / kWarpRows;
  const int64_t blocks = arguments.forward.per_item * problem.batch * problem.kv_heads * arguments.slices;
  for (int64_t first = 0; first < split.tiles; first += split.wave) {
    arguments.first_tile = first;
    arguments.begins = first == 0;
    arguments.ends = first + split.wave >= split.tiles;
    if (const int error = tiles_of(arguments.ends ? split.tiles - first : split.wave, true)) return error;
    if (const int error = launch(values_kernel, arguments, blocks, Block{kThreads, 1, true, false, 0}, stream)) return error;
  }
  return 0;
}

}  // namespace attn_cuda
