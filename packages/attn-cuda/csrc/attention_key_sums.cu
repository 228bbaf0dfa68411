// dk and dv: a block owns 64, 32 or 16 keys, and the query rows that may see them stream by in ascending order, a wave at a time: P and dS
// of the wave to the workspace, with the keys in the place that query rows have in the forward, then the chains of dv and of dk over the
// wave.
#include "attention_backward.cuh"
#include "attention_columns.cuh"

namespace attn_cuda {
namespace {

constexpr int kMostWarps = 8;
constexpr int kChunkSlots = 4;
constexpr int kChunkRows = kChunkSlots * kLanes;
constexpr int kWaveChunks = 4;
constexpr int kWaveRows = kWaveChunks * kChunkRows;
constexpr int kPlane = kWarpRows * kWaveRows;  // P or dS of a warp in a wave

template <int Warps>
using RowStage = KeyStage<Warps, kChunkSlots>;

struct KeySumArguments {
  BackwardInputs inputs;
  const float* delta;
  int64_t per_item, blocks;
  const int64_t* plan;
  void* dk;  // null when not wanted, and so dv
  void* dv;
  bool k_vectors, v_vectors;
  float* held;
};

// A query row as it streams by.
struct StreamRow {
  RowConstants constants;
  Range range;
  Row row;
  float delta;
};

// The rows of one kv head that may see the block's keys: queries [first, first + count) of each head of the group.
struct Stream {
  int32_t first, count, head;
  int64_t rows;

  // Row `ahead` rows after query `query` of head `in_group`.
  __device__ __forceinline__ Row row(int32_t in_group, int64_t query, int32_t group) const {
    while (query >= count && in_group < group) {
      query -= count;
      ++in_group;
    }
    return in_group < group ? Row{head + in_group, first + static_cast<int32_t>(query)} : Row{-1, 0};
  }
};

// Shared memory of a block; the sums lay it out anew.
template <int Width, int Warps>
struct Memory {
  StreamRow* stream;  // of this chunk and of the next
  char* raw;
  float* stage;
  float* keys;
  float* values;
  float* sum_stage;
  float* weights;  // of the warp

  __device__ __forceinline__ Memory(const BackwardInputs& inputs, float4* storage) {
    const bool wide = inputs.problem.k.dtype == ATTN_CUDA_FLOAT32 || inputs.dout.dtype == ATTN_CUDA_FLOAT32;
    stream = reinterpret_cast<StreamRow*>(storage);
    raw = reinterpret_cast<char*>(stream + 2 * kChunkRows);
    stage = reinterpret_cast<float*>(raw + RowStage<Warps>::raw_bytes(wide ? ATTN_CUDA_FLOAT32 : ATTN_CUDA_BFLOAT16));
    keys = stage + RowStage<Warps>::kFloats;
    values = keys + Warps * kWarpRows * padded_columns(inputs.problem.k.columns);
    sum_stage = reinterpret_cast<float*>(raw + kStagedFloats * (wide ? 4 : 2));
    weights = sum_stage + kStagedFloats + warp_id() * kWarpRows * Columns<Width>::kPitch;
  }
};

// Place of P (plane 0) or dS (plane 1) of the warp's key 0 at one step of the sums; one key is kChunkRows after the one before.
template <int Width>
__device__ __forceinline__ Floats<Columns<Width>::kStepSlots>* held_weights(float* held, int plane, int step) {
  using C = Columns<Width>;
  constexpr int kSteps = kChunkRows / C::kKeys;
  float* at = held + plane * kPlane + step / kSteps * (kWarpRows * kChunkRows) + step % kSteps * C::kKeys + lane_id() * C::kStepSlots;
  return reinterpret_cast<Floats<C::kStepSlots>*>(at);
}

// Queries of one head that may see stored keys [first, last] by position: [begin, end).
__device__ __forceinline__ Range queries_of_keys(const Attention& problem, const Item& item, int64_t first, int64_t last) {
  int64_t begin = 0, end = item.queries;
  if (first >= item.used) return Range{0, 0};
  if (problem.causal) begin = max(begin, first - item.offset);
  if (problem.window_right >= 0) begin = max(begin, first - problem.window_right - item.offset);
  if (problem.window_left >= 0) end = min(end, last + problem.window_left - item.offset + 1);
  return begin < end ? Range{static_cast<int32_t>(begin), static_cast<int32_t>(end)} : Range{0, 0};
}

// The first threads find the rows of a chunk.
__device__ __forceinline__ void find_rows(const KeySumArguments& arguments, const Item& item, const Stream& stream, int64_t first,
                                          StreamRow* to) {
  const int i = static_cast<int>(threadIdx.x);
  for (int at = i; at < kChunkRows; at += static_cast<int>(blockDim.x)) {
    StreamRow found{RowConstants{0.0f, Divisor{1.0f, 1.0f, 0.0f}}, no_range(), Row{-1, 0}, 0.0f};
    if (first + at < stream.rows) {
      const BackwardInputs& inputs = arguments.inputs;
      const auto in_group = static_cast<int32_t>((first + at) / stream.count);
      found.row =
          Row{stream.head + in_group, stream.first + static_cast<int32_t>(first + at - static_cast<int64_t>(in_group) * stream.count)};
      found.range = range_of(inputs.problem, item, found.row.query);
      if (found.range.begin < found.range.end) {
        const int64_t index = row_index(inputs.problem, item, found.row);
        found.constants = RowConstants{inputs.row_max[index], divisor(inputs.row_sum[index])};
        if (arguments.delta != nullptr) found.delta = arguments.delta[index];
      }
    }
    to[at] = found;
  }
}

// Which of a chunk's groups of 32 rows see keys of the warp, and whether every row sees every key.
__device__ __forceinline__ Groups seen_groups(const StreamRow* rows, int32_t slot, bool* all_visible) {
  Groups groups{kChunkSlots, 0, false};
  bool covers = true;
#pragma unroll
  for (int j = 0; j < kChunkSlots; ++j) {
    const Range range = rows[j * kLanes + lane_id()].range;
    covers = covers && range.begin <= slot && range.end >= slot + kWarpRows;
    if (!__any_sync(kAllLanes, range.begin < slot + kWarpRows && range.end > slot)) continue;
    groups.begin = min(groups.begin, j);
    groups.end = j + 1;
  }
  *all_visible = __all_sync(kAllLanes, covers);
  groups.all = groups.begin == 0 && groups.end == kChunkSlots;
  return groups;
}

// Chains to final scores, -inf where masked; `slot` is that of the warp's key 0.
__device__ __forceinline__ void finish_key_scores(const Attention& problem, const Item& item, const StreamRow* rows, int32_t slot,
                                                  bool all_visible, float (&x)[kWarpRows][kChunkSlots]) {
#pragma unroll
  for (int j = 0; j < kChunkSlots; ++j) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) x[r][j] = mul(x[r][j], problem.scale);
    if (all_visible && problem.bias == nullptr) continue;
    const StreamRow& row = rows[j * kLanes + lane_id()];
    const Range range = row.range;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (!range.has(slot + r)) {
        x[r][j] = attn::negative_infinity();
      } else if (problem.bias != nullptr) {
        x[r][j] = add(x[r][j], bias_of_row(problem, item, row.row)[stored_key(item, slot + r) * problem.bias_key]);
      }
    }
  }
}

// P and, for dk, dS of the warp's keys at the rows of a wave, to the workspace. Bit i of the result: the warp has pairs at step i of the
// sums.
template <int Width, int Warps>
__device__ __forceinline__ uint32_t find_wave(const KeySumArguments& arguments, const Work& work, const Stream& stream, int64_t wave,
                                              int32_t slot, const Memory<Width, Warps>& memory, float* held) {
  using C = Columns<Width>;
  using Copy = typename RowStage<Warps>::Copy;
  const BackwardInputs& inputs = arguments.inputs;
  const Attention& problem = inputs.problem;
  const RowStage<Warps> staged{memory.stage, memory.raw};
  // Pieces of different sizes overlap those of other threads.
  const bool mixed = (problem.q.dtype == ATTN_CUDA_FLOAT32) != (inputs.dout.dtype == ATTN_CUDA_FLOAT32);
  const auto offset_of = [&](const Array& array, int chunk, int i) {
    const Row row = memory.stream[chunk % 2 * kChunkRows + i].row;
    return row.head < 0 ? kNoRow : query_offset(array, work.item, row);
  };
  const auto start = [&](const Array& array, int chunk, int column) {
    Copy::start(array, column, memory.raw, [&](int i) { return offset_of(array, chunk, i); });
  };
  const int chunks = static_cast<int>(min(static_cast<int64_t>(kWaveChunks), (stream.rows - wave + kChunkRows - 1) / kChunkRows));
  uint32_t steps = 0;
  find_rows(arguments, work.item, stream, wave, memory.stream);
  __syncthreads();
  start(problem.q, 0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const StreamRow* rows = memory.stream + chunk % 2 * kChunkRows;
    bool all_visible;
    const Groups groups = seen_groups(rows, slot, &all_visible);
    const bool active = groups.begin < groups.end;
    const auto prepare_next = [&] {
      if (chunk + 1 < chunks)
        find_rows(arguments, work.item, stream, wave + (chunk + 1) * kChunkRows, memory.stream + (chunk + 1) % 2 * kChunkRows);
    };
    const auto start_next = [&] {
      if (mixed) __syncthreads();
      if (chunk + 1 < chunks) start(problem.q, chunk + 1, 0);
    };
    float x[kWarpRows][kChunkSlots], ds[kWarpRows][kChunkSlots];
    staged.multiply(
        memory.keys, problem.q, active, groups, x, [&](int column) { start(problem.q, chunk, column); },
        [&] {
          if (mixed) __syncthreads();
          start(inputs.dout, chunk, 0);
          prepare_next();
        });
    if (active) {
      finish_key_scores(problem, work.item, rows, slot, all_visible, x);
      RowConstants constants[kChunkSlots];
#pragma unroll
      for (int j = 0; j < kChunkSlots; ++j) constants[j] = rows[j * kLanes + lane_id()].constants;
      probabilities_of(x, [&](int, int j) { return constants[j]; });
    }
    staged.multiply(memory.values, inputs.dout, active, groups, ds, [&](int column) { start(inputs.dout, chunk, column); }, start_next);
    if (!active) continue;
    steps |= ((1u << (groups.end + C::kStepSlots - 1) / C::kStepSlots) - (1u << groups.begin / C::kStepSlots))
             << chunk * (kChunkRows / C::kKeys);
#pragma unroll
    for (int j = 0; j < kChunkSlots; ++j) {
      const float delta = rows[j * kLanes + lane_id()].delta;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) ds[r][j] = is_masked(x[r][j]) ? masked_value() : attn::score_gradient(x[r][j], ds[r][j], delta);
    }
#pragma unroll
    for (int j = 0; j < kChunkSlots; j += C::kStepSlots) {
      auto* probs = held_weights<Width>(held, 0, (chunk * kChunkSlots + j) / C::kStepSlots);
      auto* gradients = held_weights<Width>(held, 1, (chunk * kChunkSlots + j) / C::kStepSlots);
      hold<kChunkRows>(probs, x, j);
      hold<kChunkRows>(gradients, ds, j);
    }
  }
  return steps;
}

// Chains over the rows of a wave: dv of P and dout, or dk of dS and q.
template <int Width, int Warps>
__device__ __forceinline__ void sum_wave(const Array& array, const Work& work, int32_t group, const Stream& stream, int64_t wave,
                                         uint32_t steps, const Memory<Width, Warps>& memory, float* held, int plane, bool select,
                                         Outputs<Width>& out) {
  using C = Columns<Width>;
  const auto head = static_cast<int32_t>(wave / max(stream.count, 1));
  const int64_t query = wave - static_cast<int64_t>(head) * stream.count;
  const auto count = static_cast<int32_t>(min(static_cast<int64_t>(kWaveRows), stream.rows - wave));
  const ChainStage<Width, Warps> chains{memory.raw, memory.sum_stage, memory.weights};
  __syncthreads();
  chains.multiply(
      array, 0, count, select, out,
      [&](int32_t i) {
        const Row row = stream.row(head, query + i, group);
        return row.head < 0 ? kNoRow : query_offset(array, work.item, row);
      },
      [&](int32_t first) { return (steps >> first / C::kKeys & 1u) != 0; },
      [&](int32_t first, auto& x) { recall<kChunkRows>(held_weights<Width>(held, plane, first / C::kKeys), x); }, [](const auto&) {});
}

// Workspace of a warp: both planes, and sums between two waves.
template <int Width>
constexpr int64_t kWarpFloats = 2 * (kPlane + kWarpRows * Width);

template <int Width, int Warps>
__device__ __forceinline__ void gradients_of_keys(const KeySumArguments& arguments, const Work& work, const Memory<Width, Warps>& memory,
                                                  float* held) {
  const BackwardInputs& inputs = arguments.inputs;
  const Attention& problem = inputs.problem;
  const Item& item = work.item;
  const auto first = static_cast<int32_t>(work.block * (Warps * kWarpRows));
  const int32_t last = min(first + Warps * kWarpRows, item.count) - 1;
  const int32_t slot = first + item.shift + warp_id() * kWarpRows;
  const Range queries = queries_of_keys(problem, item, stored_key(item, first + item.shift), stored_key(item, last + item.shift));
  const int32_t count = queries.end - queries.begin;
  const Stream stream{queries.begin, count, work.kv_head * problem.group, static_cast<int64_t>(problem.group) * count};
  float* parked = held + 2 * kPlane;
  bool select = false;
#pragma unroll 1
  while (true) {
    bool nan = false;
    int64_t wave = 0;
#pragma unroll 1
    do {
      const bool ends = wave + kWaveRows >= stream.rows;
      uint32_t steps = 0;
      if (stream.rows > 0) {
        __syncthreads();
        const auto key_at = [&](const Array& array, int64_t base, int i) { return key_offset(array, item, base, first + item.shift + i); };
        load_own_rows<Warps>(problem.k, memory.keys, [&](int i) { return key_at(problem.k, work.k_base, i); });
        load_own_rows<Warps>(problem.v, memory.values, [&](int i) { return key_at(problem.v, work.v_base, i); });
        steps = find_wave<Width, Warps>(arguments, work, stream, wave, slot, memory, held);
      }
#pragma unroll 1
      for (int plane = 0; plane < 2; ++plane) {
        void* to = plane == 0 ? arguments.dv : arguments.dk;
        if (to == nullptr) continue;
        const Array& array = plane == 0 ? inputs.dout : problem.q;
        float* kept = parked + plane * (kWarpRows * Width);
        Outputs<Width> out;
        if (wave == 0) {
          out.clear();
        } else {
          out.unpark(kept);
        }
        sum_wave<Width, Warps>(array, work, problem.group, stream, wave, steps, memory, held, plane, select, out);
        if (!ends) {
          out.park(kept);
          continue;
        }
        nan = nan || out.has_nan();
        out.multiply(plane == 0 ? 1.0f : problem.scale);
        const int32_t width = plane == 0 ? problem.value_dim : problem.head_dim;
        store_rows(out, to, problem.k.dtype, width, plane == 0 ? arguments.v_vectors : arguments.k_vectors, [&](int r) {
          const int32_t key = first + warp_id() * kWarpRows + r;
          return key > last ? kNoRow : key_result(problem, item, work.kv_head, key, width);
        });
      }
      wave += kWaveRows;
    } while (wave < stream.rows);
    // As in the forward: a NaN may come from a masked pair, so sum again without those.
    if (!__syncthreads_or(nan) || select) return;
    select = true;
  }
}

template <int Width, int Warps>
__global__ void __launch_bounds__(Warps* kLanes, Width <= 128 && Warps == kMostWarps ? 2 : 1)
    key_sums_kernel(const __grid_constant__ KeySumArguments arguments) {
  const Attention& problem = arguments.inputs.problem;
  extern __shared__ float4 storage[];
  __shared__ Work work;
  const Memory<Width, Warps> memory(arguments.inputs, storage);
  float* held = arguments.held + (static_cast<int64_t>(blockIdx.x) * Warps + warp_id()) * kWarpFloats<Width>;
  each_turn(arguments.blocks, [&](int64_t id) {
    // Backwards, since under causality most queries see the first keys.
    if (!share_work(problem, arguments.blocks - 1 - id, arguments.per_item, arguments.plan, &work)) return;
    if (work.block * (Warps * kWarpRows) < work.item.count) gradients_of_keys<Width, Warps>(arguments, work, memory, held);
  });
}

template <int Width>
size_t key_sum_bytes(const BackwardInputs& inputs, int warps) {
  const bool wide = inputs.problem.k.dtype == ATTN_CUDA_FLOAT32 || inputs.dout.dtype == ATTN_CUDA_FLOAT32;
  const int32_t dtype = wide ? ATTN_CUDA_FLOAT32 : ATTN_CUDA_BFLOAT16;
  const size_t keys = static_cast<size_t>(warps) * kWarpRows;
  const size_t columns = padded_columns(inputs.problem.k.columns) + padded_columns(inputs.problem.v.columns);
  const size_t first = RowStage<kMostWarps>::raw_bytes(dtype) + sizeof(float) * (RowStage<kMostWarps>::kFloats + keys * columns);
  const size_t second = kStagedFloats * (wide ? 4 : 2) + sizeof(float) * (kStagedFloats + keys * Columns<Width>::kPitch);
  return 2 * kChunkRows * sizeof(StreamRow) + (first > second ? first : second);
}

int columns_of(const BackwardInputs& inputs) { return max(inputs.problem.head_dim, inputs.problem.value_dim); }

size_t key_sum_bytes(const BackwardInputs& inputs, int warps) {
  return with_width(width_of(columns_of(inputs), warps), [&](auto width) { return key_sum_bytes<width.value>(inputs, warps); });
}

}  // namespace

RowsInWork key_sum_keys(const Limits& limits, const attn_cuda_attention& problem, int32_t upstream_dtype) {
  const int columns = static_cast<int>(problem.head_dim > problem.value_dim ? problem.head_dim : problem.value_dim);
  BackwardInputs inputs{};
  inputs.problem.k = Array{nullptr, 0, 0, 0, 0, problem.k.dtype, columns_in_eights(problem.head_dim), true};
  inputs.problem.v.columns = columns_in_eights(problem.value_dim);
  inputs.problem.head_dim = inputs.problem.value_dim = columns;
  inputs.dout.dtype = upstream_dtype;
  const int warps = choose_warps(limits, [&](int count) { return key_sum_bytes(inputs, count); });
  const int64_t floats = with_width(width_of(columns, warps), [](auto width) { return kWarpFloats<width.value>; });
  const int64_t resident = limits.processors * blocks_that_fit(limits, key_sum_bytes(inputs, warps), columns <= 128 ? 2 : 1);
  const int64_t blocks = count_blocks(problem, warps * kWarpRows, true), count = resident < blocks ? resident : blocks;
  return RowsInWork{warps, count, 0, aligned(count * warps * floats * static_cast<int64_t>(sizeof(float)))};
}

int launch_key_sums(const BackwardInputs& inputs, const RowsInWork& keys, const Blocks& blocks, float* held, const float* delta, void* dk,
                    void* dv, void* stream) {
  if (blocks.count == 0) return 0;
  const Attention& problem = inputs.problem;
  const KeySumArguments arguments{inputs,
                                  delta,
                                  blocks.per_item,
                                  blocks.count,
                                  blocks.plan,
                                  dk,
                                  dv,
                                  stores_fours(dk, problem.k.dtype, problem.head_dim),
                                  stores_fours(dv, problem.k.dtype, problem.value_dim),
                                  held};
  return launch_in_work([](auto width, auto warps) { return key_sums_kernel<decltype(width)::value, decltype(warps)::value>; },
                        columns_of(inputs), arguments, keys, key_sum_bytes(inputs, keys.warps), stream);
}

}  // namespace attn_cuda
