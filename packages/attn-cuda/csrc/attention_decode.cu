// Attention forward for few rows and many keys. Tiles are spread over the device: scores and states of all tiles, the states merged in
// order, scores to P, and the chains of out, spread over rows and columns. The workspace holds the scores of a wave of tiles; where the
// keys are more, a wave follows the other. The bits are those of the other way.
#include "attention_forward.cuh"

namespace attn_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockWarps = kThreads / kLanes;
constexpr int64_t kFewRows = 16;
constexpr int64_t kManyKeys = 512;
constexpr int64_t kLargestWave = int64_t{512} << 20;  // bytes of scores

using KeyTile = KeyStage<kBlockWarps, kSlots>;

struct SplitArguments {
  ForwardArguments forward;
  int64_t tiles;       // of a row
  int64_t first_tile;  // of this wave
  int64_t wave;        // tiles of a row that `scores` holds
  int64_t row_blocks;
  int64_t slices;          // of columns
  attn::RowState* states;  // [rows, tiles], null once the rows' states are known
  float* scores;           // [rows, wave * 256], null while only states are wanted
  float* sums;             // [rows, V], chains so far
  bool begins, ends;
};

__device__ __forceinline__ float* scores_of(const SplitArguments& arguments, int64_t row, int64_t in_wave) {
  return arguments.scores + (row * arguments.wave + in_wave) * attn::kTile;
}

// The tile of a block, and its rows.
template <int Rows>
struct TileOfRows {
  int64_t in_wave, tile;
  int32_t begin;

  __device__ __forceinline__ TileOfRows(const SplitArguments& arguments, Work* work, BlockRows<Rows>* block) {
    in_wave = blockIdx.x / arguments.row_blocks;
    tile = arguments.first_tile + in_wave;
    begin = static_cast<int32_t>(tile * attn::kTile);
    share_work(arguments.forward.problem, blockIdx.x - in_wave * arguments.row_blocks, arguments.forward.per_item, nullptr, work);
    block->find(arguments.forward.problem, *work);
  }
};

// Scores and states of one tile for 64 rows, a warp owning eight.
__global__ void __launch_bounds__(kThreads, 2) wide_tile_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  extern __shared__ float4 storage[];
  __shared__ Work work;
  __shared__ BlockRows<kBlockWarps> block;
  const KeyTile keys{reinterpret_cast<float*>(storage), reinterpret_cast<char*>(storage) + KeyTile::kFloats * sizeof(float)};
  float* queries = reinterpret_cast<float*>(keys.raw + KeyTile::raw_bytes(problem.k.dtype));
  const TileOfRows<kBlockWarps> at(arguments, &work, &block);
  const bool active = block.warp().meets(at.begin, attn::kTile);
  const Groups groups = block.warp().groups(at.begin, kSlots, kLanes);
  attn::RowState state = attn::empty_row();
  float x[kWarpRows][kSlots];
  if (block.any.begin < at.begin + attn::kTile && block.any.end > at.begin) {
    load_query_rows<kBlockWarps>(problem.q, work.item, block.rows, queries);
    const auto start = [&](int column) {
      KeyTile::Copy::start(problem.k, column, keys.raw, [&](int i) { return key_offset(problem.k, work.item, work.k_base, at.begin + i); });
    };
    start(0);
    keys.multiply(queries, problem.k, active, groups, x, start, [] {});
  }
  if (active) {
    finish_scores(problem, work.item, block, block.warp().covers(at.begin, attn::kTile), x,
                  [&](int j) { return at.begin + j * kLanes + lane_id(); });
    if (arguments.scores != nullptr) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const Row row = block.row(r);
        if (row.head < 0) continue;
        float* to = scores_of(arguments, row_index(problem, work.item, row), at.in_wave) + lane_id();
#pragma unroll
        for (int j = 0; j < kSlots; ++j) to[j * kLanes] = x[r][j];
      }
    }
    state = tile_states(x, groups);
  }
  const Row own = block.row(row_of_lane());
  if (arguments.states != nullptr && own.head >= 0 && lane_id() == lane_of_row(row_of_lane()))
    arguments.states[row_index(problem, work.item, own) * arguments.tiles + at.tile] = state;
}

constexpr int kNarrowStages = 3;  // chunks of keys on their way

using NarrowCopy = RowCopy<kThreads, attn::kTile, kChunkColumns, 4>;

// The same for eight rows: a lane has one key of every row for the chains, then a warp has one row.
__global__ void __launch_bounds__(kThreads, 2) narrow_tile_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  extern __shared__ float4 storage[];
  __shared__ Work work;
  __shared__ BlockRows<1> block;
  __shared__ float scores[kWarpRows][attn::kTile];
  const KeyTile keys{reinterpret_cast<float*>(storage), reinterpret_cast<char*>(storage) + KeyTile::kFloats * sizeof(float)};
  float* queries = reinterpret_cast<float*>(keys.raw + kNarrowStages * KeyTile::raw_bytes(problem.k.dtype));
  const TileOfRows<1> at(arguments, &work, &block);
  const Row row = block.rows[warp_id()];
  attn::RowState state = attn::empty_row();
  if (block.any.begin < at.begin + attn::kTile && block.any.end > at.begin) {
    const size_t raw_bytes = KeyTile::raw_bytes(problem.k.dtype);
    const int chunks = padded_columns(problem.k.columns) / kChunkColumns;
    const auto start = [&](int chunk) {
      if (chunk < chunks)
        NarrowCopy::start(problem.k, chunk * kChunkColumns, keys.raw + chunk % kNarrowStages * raw_bytes,
                          [&](int i) { return key_offset(problem.k, work.item, work.k_base, at.begin + i); });
      end_copy_group();
    };
    for (int chunk = 0; chunk < kNarrowStages; ++chunk) start(chunk);
    // At most 256 columns: a thread has one piece of a row.
    const int pieces = chunks * (kChunkColumns / 8), r = static_cast<int>(threadIdx.x) / pieces;
    if (r < kWarpRows) {
      const int column = static_cast<int>(threadIdx.x) % pieces * 8;
      const Row from = block.rows[r];
      const Widened eight =
          widened(load_eight(problem.q, from.head < 0 ? kNoRow : query_offset(problem.q, work.item, from), column), problem.q.dtype);
      auto* to = reinterpret_cast<float4*>(queries + (column / kChunkColumns * kWarpRows + r) * kChunkColumns + column % kChunkColumns);
      to[0] = eight.low;
      to[1] = eight.high;
    }
    float acc[kWarpRows][1] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      wait_for_copy_group<kNarrowStages - 1>();
      __syncthreads();
      NarrowCopy::finish(problem.k.dtype, keys.raw + chunk % kNarrowStages * raw_bytes, keys.stage, kChunkPitch);
      start(chunk + kNarrowStages);
      __syncthreads();
      multiply_chunk<true>(queries + chunk * (kChunkColumns * kWarpRows), keys.stage + warp_id() * (kLanes * kChunkPitch),
                           Groups{0, 1, true}, acc);
    }
    const int own = warp_id() * kLanes + lane_id();
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const Row of = block.rows[r];
      float score = mul(acc[r][0], problem.scale);
      const bool sees = block.ranges[r].has(at.begin + own);
      if (sees && problem.bias != nullptr)
        score = add(score, bias_of_row(problem, work.item, of)[stored_key(work.item, at.begin + own) * problem.bias_key]);
      scores[r][own] = sees ? score : attn::negative_infinity();
    }
    __syncthreads();
    float x[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) x[j] = scores[warp_id()][j * kLanes + lane_id()];
    if (arguments.scores != nullptr && row.head >= 0) {
      float* to = scores_of(arguments, row_index(problem, work.item, row), at.in_wave) + lane_id();
#pragma unroll
      for (int j = 0; j < kSlots; ++j) to[j * kLanes] = x[j];
    }
    state = tile_state(x);
  }
  if (arguments.states != nullptr && row.head >= 0 && lane_id() == 0)
    arguments.states[row_index(problem, work.item, row) * arguments.tiles + at.tile] = state;
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

// Scores of one tile to P, in place, where any of the block's eight rows sees a key. A warp has one row.
__global__ void __launch_bounds__(kThreads) probabilities_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  __shared__ Work work;
  __shared__ BlockRows<1> block;
  const TileOfRows<1> at(arguments, &work, &block);
  const Row row = block.rows[warp_id()];
  if (row.head < 0 || block.any.begin >= at.begin + attn::kTile || block.any.end <= at.begin) return;
  const int64_t index = row_index(problem, work.item, row);
  const RowConstants constants{arguments.forward.row_max[index], divisor(arguments.forward.row_sum[index])};
  float* scores = scores_of(arguments, index, at.in_wave) + lane_id();
  float x[1][kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) x[0][j] = scores[j * kLanes];
  probabilities_of(x, [&](int, int) { return constants; });
#pragma unroll
  for (int j = 0; j < kSlots; ++j) scores[j * kLanes] = x[0][j];
}

constexpr int kChainWarps = 4;
constexpr int kChainRows = kWarpRows / kChainWarps;  // of a warp: each value that it reads takes part in as many chains
constexpr int kSummers = kChainWarps * kLanes;       // threads that sum
constexpr int kLoaders = 8 * kLanes;                 // threads that load for them
constexpr int kStepKeys = 128;
constexpr int kRawStages = 4;   // of V, three of them on their way
constexpr int kProbStages = 5;  // and besides them the step that the chains read

using ValueCopy = RowCopy<kLoaders, kStepKeys, kLanes, 2>;

struct ValuesShared {
  float values[2][kStepKeys * kLanes];
  float probs[kProbStages][kWarpRows][kStepKeys];
};

size_t values_bytes(int32_t dtype) {
  return sizeof(ValuesShared) + static_cast<size_t>(kRawStages * kStepKeys * kLanes) * (dtype == ATTN_CUDA_FLOAT32 ? 4 : 2);
}

// One step of the chains of a lane. What the next FMAs need is read while the chains wait for the ones before.
template <bool Select>
__device__ __forceinline__ void chain_values(const float (*probs)[kStepKeys], const float* values, float (&sums)[kChainRows]) {
  constexpr int kAhead = 8;
  float p[2][kChainRows][kAhead], v[2][kAhead];
  const auto read = [&](int key, float (&to_p)[kChainRows][kAhead], float (&to_v)[kAhead]) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) to_v[i] = values[(key + i) * kLanes + lane_id()];
#pragma unroll
    for (int i = 0; i < kAhead; i += 4)
#pragma unroll
      for (int r = 0; r < kChainRows; ++r) {
        const float4 four = *reinterpret_cast<const float4*>(probs[r] + key + i);
        to_p[r][i] = four.x, to_p[r][i + 1] = four.y, to_p[r][i + 2] = four.z, to_p[r][i + 3] = four.w;
      }
  };
  read(0, p[0], v[0]);
#pragma unroll
  for (int key = 0; key < kStepKeys; key += kAhead) {
    const int now = key / kAhead % 2;
    if (key + kAhead < kStepKeys) read(key + kAhead, p[now ^ 1], v[now ^ 1]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int r = 0; r < kChainRows; ++r)
        if (!Select || !is_masked(p[now][r][i])) sums[r] = exact_fma(p[now][r][i], v[now][i], sums[r]);
  }
}

// Chains of out over one wave: four warps own two rows each, a lane a column, and eight more load for them, several steps ahead.
__global__ void __launch_bounds__(kSummers + kLoaders, 2) values_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  extern __shared__ float4 storage[];
  auto* shared = reinterpret_cast<ValuesShared*>(storage);
  char* raw = reinterpret_cast<char*>(shared + 1);
  const size_t raw_bytes = static_cast<size_t>(kStepKeys * kLanes) * (problem.v.dtype == ATTN_CUDA_FLOAT32 ? 4 : 2);
  __shared__ Work work;
  __shared__ BlockRows<1> block;
  const int64_t id = blockIdx.x / arguments.slices;
  const auto first_column = static_cast<int32_t>((blockIdx.x - id * arguments.slices) * kLanes);
  share_work(problem, id, arguments.forward.per_item, nullptr, &work);
  block.find(problem, work);
  const bool loads = threadIdx.x >= kSummers;
  const int first_row = warp_id() * kChainRows;
  const bool sums_rows = !loads && block.rows[first_row].head >= 0;
  const int32_t column = first_column + lane_id();
  const int64_t wave_begin = arguments.first_tile * attn::kTile, wave_end = wave_begin + arguments.wave * attn::kTile;
  const int64_t first = max(wave_begin, static_cast<int64_t>(block.any.begin / kStepKeys * kStepKeys));
  const int64_t last = min(wave_end, static_cast<int64_t>(block.any.end));
  const int steps = block.any.begin < block.any.end && first < last ? static_cast<int>((last - first + kStepKeys - 1) / kStepKeys) : 0;

  const int loader = static_cast<int>(threadIdx.x) - kSummers;
  static_assert(kLoaders == kWarpRows * kStepKeys / 4, "a loader has four neighbours of P in each step");
  const int prob_row = loader / kLanes, prob_key = loader % kLanes * 4;
  const Row prob_of = loads ? block.rows[prob_row] : Row{-1, 0};
  const float* probs_from =
      prob_of.head < 0 ? nullptr : scores_of(arguments, row_index(problem, work.item, prob_of), 0) + (first - wave_begin) + prob_key;
  // In registers, since shared memory would be read again after each copy that is started.
  const Item item = work.item;
  const int64_t v_base = work.v_base;
  const auto start = [&](int step) {
    if (step < steps) {
      const auto slot = static_cast<int32_t>(first + static_cast<int64_t>(step) * kStepKeys);
      ValueCopy::start(loader, problem.v, first_column, raw + step % kRawStages * raw_bytes,
                       [&](int i) { return key_offset(problem.v, item, v_base, slot + i); });
      if (probs_from != nullptr)
        copy_async(&shared->probs[step % kProbStages][prob_row][prob_key], probs_from + static_cast<int64_t>(step) * kStepKeys, true);
    }
    end_copy_group();
  };
  // A step to where the chains read it, and a later one on its way.
  const auto advance = [&](int step) {
    wait_for_copy_group<kRawStages - 2>();
    if (step < steps) ValueCopy::finish(loader, problem.v.dtype, raw + step % kRawStages * raw_bytes, shared->values[step % 2], kLanes);
    start(step + kRawStages - 1);
  };
  // use(row, r) for the rows of which the lane has a column.
  const auto each_row = [&](auto use) {
    if (!sums_rows || column >= problem.value_dim) return;
#pragma unroll
    for (int r = 0; r < kChainRows; ++r)
      if (const Row row = block.rows[first_row + r]; row.head >= 0) use(row, r);
  };
  const auto sum_so_far = [&](Row row) { return arguments.sums + row_index(problem, work.item, row) * problem.value_dim + column; };
  float sums[kChainRows];
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    if (!arguments.begins) each_row([&](Row row, int r) { sums[r] = *sum_so_far(row); });
    if (loads) {
      for (int step = 0; step < kRawStages - 1; ++step) start(step);
      advance(0);
    }
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (loads) {
        advance(step + 1);
      } else if (sums_rows) {
        const auto* probs = shared->probs[step % kProbStages] + first_row;
        if (pass == 0) {
          chain_values<false>(probs, shared->values[step % 2], sums);
        } else {
          chain_values<true>(probs, shared->values[step % 2], sums);
        }
      }
      __syncthreads();
    }
    // As in the other way: a NaN may come from a masked pair, so sum again without those.
    bool spoilt = false;
    each_row([&](Row, int r) { spoilt = spoilt || attn::is_nan(sums[r]); });
    if (!__syncthreads_or(spoilt)) break;
  }
  each_row([&](Row row, int r) {
    if (!arguments.ends) {
      *sum_so_far(row) = sums[r];
      return;
    }
    const float one[4] = {sums[r], 0.0f, 0.0f, 0.0f};
    store_four(arguments.forward.out, arguments.forward.out_dtype, query_result(problem, work.item, row, problem.value_dim) + column, one,
               1, false);
  });
}

size_t tile_bytes(int columns, int32_t dtype, int64_t rows) {
  return (rows == kWarpRows ? kNarrowStages : 1) * KeyTile::raw_bytes(dtype) +
         sizeof(float) * (KeyTile::kFloats + static_cast<size_t>(rows) * padded_columns(columns));
}

int64_t total_rows(const attn_cuda_attention& problem) { return problem.batch * problem.heads * problem.queries; }

// Blocks of `rows` rows for each of `tiles` tiles.
int64_t spread(SplitArguments* arguments, int64_t rows, int64_t tiles) {
  const Attention& problem = arguments->forward.problem;
  arguments->forward.per_item = (problem.queries * problem.group + rows - 1) / rows;
  arguments->row_blocks = arguments->forward.per_item * problem.batch * problem.kv_heads;
  return arguments->row_blocks * tiles;
}

int launch_tiles(SplitArguments arguments, int64_t block_rows, int64_t tiles, void* stream) {
  const int64_t blocks = spread(&arguments, block_rows, tiles);
  if (blocks >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  const Attention& problem = arguments.forward.problem;
  return launch(block_rows == kWarpRows ? narrow_tile_kernel : wide_tile_kernel, arguments, blocks,
                Block{kThreads, 1, true, false, tile_bytes(problem.q.columns, problem.k.dtype, block_rows)}, stream);
}

}  // namespace

Split choose_split(const Limits& limits, const attn_cuda_attention& problem) {
  constexpr int64_t kWideRows = kBlockWarps * kWarpRows;
  if (problem.cu_seqlens_q != nullptr || problem.keys < kManyKeys || total_rows(problem) == 0) return Split{0, 0, 0};
  if (!fits(limits, values_bytes(problem.v.dtype)) ||
      !fits(limits, tile_bytes(static_cast<int>(problem.head_dim), problem.k.dtype, kWarpRows)))
    return Split{0, 0, 0};
  const int64_t rows = problem.queries * (problem.heads / problem.kv_heads);
  const int64_t blocks = (rows + kWideRows - 1) / kWideRows * problem.batch * problem.kv_heads;
  if (rows > kFewRows && blocks >= limits.processors) return Split{0, 0, 0};
  const int64_t tiles = (problem.keys + 2 * attn::kTile - 2) / attn::kTile;  // wherever the first key lies in its tile
  const int64_t room = kLargestWave / (total_rows(problem) * attn::kTile * 4);
  const bool wide = rows > kFewRows && fits(limits, tile_bytes(static_cast<int>(problem.head_dim), problem.k.dtype, kWideRows));
  return Split{tiles, clamped(room, 1, tiles), wide ? kWideRows : kWarpRows};
}

int64_t split_bytes(const attn_cuda_attention& problem, const Split& split) {
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
  auto* states = space.take<attn::RowState>(rows * split.tiles);
  auto* scores = space.take<float>(rows * split.wave * attn::kTile);
  arguments.sums = space.take<float>(rows * problem.value_dim);
  const bool one_wave = split.wave >= split.tiles;
  arguments.states = states;
  arguments.scores = one_wave ? scores : nullptr;
  if (const int error = launch_tiles(arguments, split.block_rows, split.tiles, stream)) return error;
  if (const int error = launch(merge_kernel, arguments, (rows + kBlockWarps - 1) / kBlockWarps, Block{kThreads, 1, true, false, 0}, stream))
    return error;
  arguments.states = nullptr;
  arguments.scores = scores;
  for (int64_t first = 0; first < split.tiles; first += split.wave) {
    arguments.first_tile = first;
    arguments.begins = first == 0;
    arguments.ends = first + split.wave >= split.tiles;
    const int64_t tiles = arguments.ends ? split.tiles - first : split.wave;
    if (!one_wave)
      if (const int error = launch_tiles(arguments, split.block_rows, tiles, stream)) return error;
    const int64_t blocks = spread(&arguments, kWarpRows, tiles);
    if (blocks >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
    if (const int error = launch(probabilities_kernel, arguments, blocks, Block{kThreads, 1, true, false, 0}, stream)) return error;
    if (const int error = launch(values_kernel, arguments, arguments.row_blocks * arguments.slices,
                                 Block{kSummers + kLoaders, 1, true, false, values_bytes(problem.v.dtype)}, stream))
      return error;
  }
  return 0;
}

}  // namespace attn_cuda
