// Attention forward for few rows and many keys. Tiles are spread over the device: scores and states of all tiles, the states merged in
// order, scores to P, and the chains of out, spread over rows and columns. The workspace holds the scores of a wave of tiles; where the
// keys are more, a wave follows the other. The bits are those of the other way.
#include "attention_forward.cuh"
#include "named_barrier.cuh"

namespace attn_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockWarps = kThreads / kLanes;
constexpr int64_t kFewRows = 16;
constexpr int64_t kManyKeys = 512;
constexpr int64_t kLargestWave = int64_t{512} << 20;  // bytes of scores

constexpr int kMostValueRows = 2 * kWarpRows;  // of a block that sums P times the values

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

// Scores of one tile to P, in place, where any of the sixteen rows sees a key. A warp has one row.
__global__ void __launch_bounds__(kMostValueRows* kLanes) probabilities_kernel(const __grid_constant__ SplitArguments arguments) {
  const Attention& problem = arguments.forward.problem;
  __shared__ Work work;
  __shared__ BlockRows<kMostValueRows / kWarpRows> block;
  const TileOfRows<kMostValueRows / kWarpRows> at(arguments, &work, &block);
  const Row row = block.rows[warp_id()];
  if (row.head < 0 || block.any.begin >= at.begin + attn::kTile || block.any.end <= at.begin) return;
  const int64_t index = row_index(problem, work.item, row);
  const RowConstants constants{arguments.forward.row_max[index], divisor(arguments.forward.row_sum[index])};
  float* scores = scores_of(arguments, index, at.in_wave) + lane_id();
  // There are scores where any of the row's eight sees a key.
  const bool written = block.warps[warp_id() / kWarpRows].meets(at.begin, attn::kTile);
  float x[1][kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) x[0][j] = written ? scores[j * kLanes] : attn::negative_infinity();
  probabilities_of(x, [&](int, int) { return constants; });
#pragma unroll
  for (int j = 0; j < kSlots; ++j) scores[j * kLanes] = x[0][j];
}

constexpr int kChainWarps = 4;
constexpr int kLaneColumns = 2;
constexpr int kSummers = kChainWarps * kLanes;  // threads that sum
constexpr int kLoaders = 4 * kLanes;            // threads that load for them
constexpr int kStepKeys = 128;
constexpr int kAhead = 4;     // keys that are read while those before are summed
constexpr int kArriving = 1;  // steps whose copies are on their way while another begins
constexpr int kStages = 4;    // besides those, the step that is summed and the next, whose first keys are read then

// Keys of one step: 32 columns of the values as they are stored, and P of the rows, which begin in different banks.
template <typename T, int Rows>
struct Step {
  T values[kStepKeys][kLanes];
  float probs[Rows][kStepKeys + 4];
};

// What a lane reads for kAhead keys.
template <typename T, int LaneRows>
struct ChainKeys {
  struct alignas(sizeof(T) * kLaneColumns) Columns {
    T lanes[kLaneColumns];
  };
  Columns v[kAhead];
  float p[LaneRows][kAhead];

  template <int Rows>
  __device__ __forceinline__ void read(const Step<T, Rows>& step, int key, int row, int column) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) v[i] = *reinterpret_cast<const Columns*>(&step.values[key + i][column]);
#pragma unroll
    for (int i = 0; i < kAhead; i += 4)
#pragma unroll
      for (int r = 0; r < LaneRows; ++r) {
        const float4 four = *reinterpret_cast<const float4*>(&step.probs[row + r][key + i]);
        p[r][i] = four.x, p[r][i + 1] = four.y, p[r][i + 2] = four.z, p[r][i + 3] = four.w;
      }
  }

  __device__ __forceinline__ float2 values(int i) const {
    if constexpr (sizeof(T) == 4) {
      return make_float2(v[i].lanes[0], v[i].lanes[1]);
    } else {
      return widened_pair<T>(*reinterpret_cast<const uint32_t*>(&v[i]));
    }
  }
};

// One step of the chains of a lane. `keys` holds its first keys, then those of the next step.
template <bool Select, typename T, int Rows, int LaneRows>
__device__ __forceinline__ void chain_values(const Step<T, Rows>& step, const Step<T, Rows>& next, int row, int column,
                                             ChainKeys<T, LaneRows> (&keys)[2], float (&sums)[LaneRows][kLaneColumns]) {
  static_assert(kStepKeys % (2 * kAhead) == 0, "a step ends where it began in `keys`");
#pragma unroll
  for (int key = 0; key < kStepKeys; key += kAhead) {
    const auto& now = keys[key / kAhead % 2];
    auto& later = keys[key / kAhead % 2 ^ 1];
    if (key + kAhead < kStepKeys) {
      later.read(step, key + kAhead, row, column);
    } else {
      later.read(next, 0, row, column);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float2 values = now.values(i);
#pragma unroll
      for (int r = 0; r < LaneRows; ++r) {
        if (Select && is_masked(now.p[r][i])) continue;
        sums[r][0] = exact_fma(now.p[r][i], values.x, sums[r][0]);
        sums[r][1] = exact_fma(now.p[r][i], values.y, sums[r][1]);
      }
    }
  }
}

// Chains of out over one wave. Four warps sum, each lane LaneRows rows and two columns, so that what it reads takes part in several chains;
// four more load for them, steps ahead.
template <typename T, int LaneRows>
__global__ void __launch_bounds__(kSummers + kLoaders, 2) values_kernel(const __grid_constant__ SplitArguments arguments) {
  constexpr int kChainRows = LaneRows * kLaneColumns;  // of a warp, whose lanes have 16 pairs of columns
  constexpr int kRows = kChainWarps * kChainRows;
  using Keys = Step<T, kRows>;
  const Attention& problem = arguments.forward.problem;
  extern __shared__ float4 storage[];
  auto* const steps = reinterpret_cast<Keys*>(storage);
  __shared__ Work work;
  __shared__ BlockRows<kRows / kWarpRows> block;
  const int64_t id = blockIdx.x / arguments.slices;
  const auto first_column = static_cast<int32_t>((blockIdx.x - id * arguments.slices) * kLanes);
  share_work(problem, id, arguments.forward.per_item, nullptr, &work);
  block.find(problem, work);
  const Item item = work.item;
  const int64_t wave_begin = arguments.first_tile * attn::kTile, wave_end = wave_begin + arguments.wave * attn::kTile;
  const int64_t first = max(wave_begin, static_cast<int64_t>(block.any.begin / kStepKeys * kStepKeys));
  const int64_t last = min(wave_end, static_cast<int64_t>(block.any.end));
  const int count = block.any.begin < block.any.end && first < last ? static_cast<int>((last - first + kStepKeys - 1) / kStepKeys) : 0;
  const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
  // Barriers between those who load and those who sum; 0 is that of all threads.
  const auto filled = [](int stage) { return 1 + stage; };
  const auto emptied = [](int stage) { return 1 + kStages + stage; };
  const auto wait_until = [](int barrier) { named_sync(barrier, kSummers + kLoaders); };
  const auto tell = [](int barrier) { named_arrive(barrier, kSummers + kLoaders); };

  const bool loads = threadIdx.x < kLoaders;
  const int loader = static_cast<int>(threadIdx.x), summer = warp_id() - kLoaders / kLanes;
  // A loader has eight columns of every kValueKeys-th key, and P of four keys of every kProbRows-th row.
  constexpr int kPieces = kLanes / 8, kValueKeys = kLoaders / kPieces, kProbRows = kLoaders / (kStepKeys / 4);
  const int value_key = loader / kPieces, value_column = loader % kPieces * 8;
  const int prob_row = loader / (kStepKeys / 4), prob_key = loader % (kStepKeys / 4) * 4;
  const auto* const values = static_cast<const T*>(problem.v.data) + work.v_base + first_column + value_column;
  const int32_t keys_seen = first_column + value_column < problem.v.columns ? item.count : 0;
  const float* probs[kRows / kProbRows];  // of the first step; null: no such row
#pragma unroll
  for (int r = 0; r < kRows / kProbRows; ++r) {
    const Row row = loads ? block.rows[prob_row + r * kProbRows] : Row{-1, 0};
    probs[r] = row.head < 0 ? nullptr : scores_of(arguments, row_index(problem, item, row), 0) + (first - wave_begin) + prob_key;
  }
  // Stored keys of the step whose first slot is `slot`, negative where there is none: found a step before they are needed.
  int32_t stored[kStepKeys / kValueKeys];
  const auto find_stored = [&](int32_t slot) {
#pragma unroll
    for (int i = 0; i < kStepKeys / kValueKeys; ++i) {
      const int32_t of = slot + i * kValueKeys, logical = of - item.shift;
      stored[i] = logical < 0 || logical >= keys_seen ? -1 : static_cast<int32_t>(stored_key(item, of));
    }
  };
  const auto start = [&](Keys& step, int64_t key) {
#pragma unroll
    for (int i = 0; i < kStepKeys / kValueKeys; ++i) {
      const bool present = stored[i] >= 0;
      const T* from = present ? values + stored[i] * problem.v.row : static_cast<const T*>(problem.v.data);
      T* const at = &step.values[value_key + i * kValueKeys][value_column];
      copy_async(at, from, present);
      if constexpr (sizeof(T) == 4) copy_async(at + 4, from + 4, present);
    }
#pragma unroll
    for (int r = 0; r < kRows / kProbRows; ++r)
      if (probs[r] != nullptr) copy_async(&step.probs[prob_row + r * kProbRows][prob_key], probs[r] + key, true);
  };

  // Neighbouring lanes have the same columns of different rows.
  const int first_row = summer * kChainRows + lane_id() % kLaneColumns * LaneRows;
  const int lane_column = lane_id() / kLaneColumns * kLaneColumns;
  const bool sums_rows = !loads && block.rows[summer * kChainRows].head >= 0;
  float sums[LaneRows][kLaneColumns];
  // use(row, column, sum) for the outputs of the lane.
  const auto each_sum = [&](auto use) {
    if (!sums_rows) return;
#pragma unroll
    for (int r = 0; r < LaneRows; ++r) {
      const Row row = block.rows[first_row + r];
      if (row.head < 0) continue;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c)
        if (const int32_t column = first_column + lane_column + c; column < problem.value_dim) use(row, column, sums[r][c]);
    }
  };
  const auto sum_so_far = [&](Row row, int32_t column) {
    return arguments.sums + row_index(problem, item, row) * problem.value_dim + column;
  };
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
    for (auto& of_row : sums)
#pragma unroll
      for (float& sum : of_row) sum = 0.0f;
    if (!arguments.begins) each_sum([&](Row row, int32_t column, float& sum) { sum = *sum_so_far(row, column); });
    if (loads) {
      int to = 0;
      int32_t slot = static_cast<int32_t>(first) + value_key;
      find_stored(slot);
      // A step arrives kArriving steps after its copies began.
#pragma unroll 1
      for (int i = 0, stage = 0; i < count + kArriving; ++i, stage = after(stage)) {
        if (i < count) {
          if (i >= kStages) wait_until(emptied(stage));
          start(steps[stage], static_cast<int64_t>(i) * kStepKeys);
          slot += kStepKeys;
          find_stored(slot);
        }
        end_copy_group();
        if (i < kArriving) continue;
        wait_for_copy_group<kArriving>();
        tell(filled(to));
        to = after(to);
      }
    } else if (count > 0) {
      ChainKeys<T, LaneRows> keys[2];
      wait_until(filled(0));
      if (sums_rows) keys[0].read(steps[0], 0, first_row, lane_column);
#pragma unroll 1
      for (int i = 0, stage = 0; i < count; ++i) {
        const int next = after(stage);
        if (i + 1 < count) wait_until(filled(next));
        if (sums_rows) {
          if (pass == 0) {
            chain_values<false>(steps[stage], steps[next], first_row, lane_column, keys, sums);
          } else {
            chain_values<true>(steps[stage], steps[next], first_row, lane_column, keys, sums);
          }
        }
        if (i + kStages < count) tell(emptied(stage));
        stage = next;
      }
    }
    // As in the other way: a NaN may come from a masked pair, so sum again without those.
    bool spoilt = false;
    each_sum([&](Row, int32_t, float sum) { spoilt = spoilt || attn::is_nan(sum); });
    if (!__syncthreads_or(spoilt)) break;
  }
  each_sum([&](Row row, int32_t column, float sum) {
    if (!arguments.ends) {
      *sum_so_far(row, column) = sum;
      return;
    }
    const float one[4] = {sum, 0.0f, 0.0f, 0.0f};
    store_four(arguments.forward.out, arguments.forward.out_dtype, query_result(problem, item, row, problem.value_dim) + column, one, 1,
               false);
  });
}

size_t values_bytes(int32_t dtype, int64_t rows) {
  const size_t value = dtype == ATTN_CUDA_FLOAT32 ? 4 : 2;
  return kStages * (value * kStepKeys * kLanes + sizeof(float) * static_cast<size_t>(rows) * (kStepKeys + 4));
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

template <typename T>
int launch_values_of(const SplitArguments& arguments, int64_t rows, void* stream) {
  const Block block{kSummers + kLoaders, 1, true, false, values_bytes(arguments.forward.problem.v.dtype, rows)};
  return launch(rows == kMostValueRows ? values_kernel<T, 2> : values_kernel<T, 1>, arguments, arguments.row_blocks * arguments.slices,
                block, stream);
}

int launch_values(SplitArguments arguments, int64_t rows, void* stream) {
  const int64_t blocks = spread(&arguments, rows, arguments.slices);
  if (blocks >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  switch (arguments.forward.problem.v.dtype) {
    case ATTN_CUDA_FLOAT32:
      return launch_values_of<float>(arguments, rows, stream);
    case ATTN_CUDA_BFLOAT16:
      return launch_values_of<attn::bfloat16>(arguments, rows, stream);
    default:
      return launch_values_of<attn::float16>(arguments, rows, stream);
  }
}

}  // namespace

Split choose_split(const Limits& limits, const attn_cuda_attention& problem) {
  constexpr int64_t kWideRows = kBlockWarps * kWarpRows;
  if (problem.cu_seqlens_q != nullptr || problem.keys < kManyKeys || total_rows(problem) == 0) return Split{};
  if (!fits(limits, values_bytes(problem.v.dtype, kMostValueRows)) ||
      !fits(limits, tile_bytes(static_cast<int>(problem.head_dim), problem.k.dtype, kWarpRows)))
    return Split{};
  const int64_t rows = problem.queries * (problem.heads / problem.kv_heads);
  if (rows > kFewRows && count_blocks(problem, kWideRows, false) >= limits.processors) return Split{};
  const int64_t tiles = (problem.keys + 2 * attn::kTile - 2) / attn::kTile;  // wherever the first key lies in its tile
  const int64_t room = kLargestWave / (total_rows(problem) * attn::kTile * 4);
  const bool wide = rows > kFewRows && fits(limits, tile_bytes(static_cast<int>(problem.head_dim), problem.k.dtype, kWideRows));
  // P times the values: blocks of eight rows while each has a multiprocessor, else of sixteen, if there are more than eight.
  const int64_t slices = (problem.value_dim + kLanes - 1) / kLanes;
  const bool few = rows <= kWarpRows || count_blocks(problem, kWarpRows, false) * slices <= limits.processors;
  return Split{tiles, clamped(room, 1, tiles), wide ? kWideRows : kWarpRows, few ? kWarpRows : kMostValueRows};
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
    const int64_t blocks = spread(&arguments, kMostValueRows, tiles);
    if (blocks >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
    if (const int error = launch(probabilities_kernel, arguments, blocks, Block{kMostValueRows * kLanes, 1, true, false, 0}, stream))
      return error;
    if (const int error = launch_values(arguments, split.value_rows, stream)) return error;
  }
  return 0;
}

}  // namespace attn_cuda
