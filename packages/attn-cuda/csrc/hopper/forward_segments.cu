// Forward pass of sm90-v1 with a block of threads for every segment of keys (decode), and the merge of the segments' states.
#include "hopper/forward.cuh"
#include "hopper/row_state.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kThreads = kWarpgroup + 32;  // a warpgroup owns the rows, a warp copies tiles
constexpr int kResident = 2;               // blocks of a multiprocessor: one loads while the other computes

// Keys and values of a tile lie in the next two slots of a ring.
template <int kColumns>
struct Segment {
  static constexpr int kTileBytes = kTileKeys * kColumns * 2;
  static constexpr int kSlots = 3 * 128 / kColumns;

  alignas(1024) uint8_t queries[kSegmentRows * kColumns * 2];
  alignas(1024) uint8_t slots[kSlots][kTileBytes];
  RowBlock<kSegmentRows> block;
  uint64_t full[kSlots], free[kSlots], loaded;
};

// A slot of the ring and the parity of its use.
template <int kSlots>
struct Turn {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

template <int kColumns>
__device__ __forceinline__ void copy_tiles(const ForwardArguments& arguments, Segment<kColumns>& shared, Tiles tiles) {
  using Shared = Segment<kColumns>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Item& item = shared.block.item;
  Turn<Shared::kSlots> turn;
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
    const int32_t first = tile * kTileKeys - shared.block.phase;
    const MapPlace place = map_place(arguments.problem, item, first);
    const bool scrub = arguments.garbage && first + kTileKeys > item.used;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const bool cleared = part == 1 && scrub;
      uint64_t* arrival = cleared ? &shared.loaded : &shared.full[turn.slot];
      barrier_wait(&shared.free[turn.slot], turn.parity ^ 1);
      if (lane == 0) {
        barrier_expect(arrival, Shared::kTileBytes);
        load_tile<kColumns>(shared.slots[turn.slot], kTileKeys * kPanelRowBytes, part == 0 ? arguments.k : arguments.v, arrival, place.row,
                            shared.block.kv_head, place.batch);
      }
      if (cleared) {
        barrier_wait(arrival, 0);
        clear_rows<kColumns>(shared.slots[turn.slot], item.used - first, lane);
        async_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.full[turn.slot]);
      }
      turn.next();
    }
  }
}

template <typename Half, int kColumns>
__device__ __forceinline__ void own_rows(const ForwardArguments& arguments, Segment<kColumns>& shared, Tiles tiles, int64_t segment) {
  using Shared = Segment<kColumns>;
  const int thread = static_cast<int>(threadIdx.x);
  const bool speaks = thread % 32 == 0;
  const Attention& problem = arguments.problem;
  const Item& item = shared.block.item;
  load_queries<kColumns>(problem.q, item, shared.block.rows, thread, shared.queries);
  async_fence();
  named_sync(1, kWarpgroup);
  const RowPair pair(problem, item, shared.block.rows, thread);
  SegmentState state;
  state.clear();
  float o[kColumns / 2], s[kScores], top[2], alpha[2];
  uint32_t p[kSteps][4];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;
  Turn<Shared::kSlots> turn;
#pragma unroll 1
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
    barrier_wait(&shared.full[turn.slot], turn.parity);
    pin(s);
    mma_fence();
    scores_product<Half, kColumns>(s, shared.queries, shared.slots[turn.slot]);
    mma_commit();
    mma_wait<0>();
    pin(s);
    if (speaks) barrier_arrive(&shared.free[turn.slot]);
    turn.next();
    pair.mask(s, tile * kTileKeys - shared.block.phase);
    row_maxima(s, top);
    state.weigh(s, top, arguments.factor, alpha);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) operand_of<Half>(s, step, p[step]);
    rescale(o, alpha);
    barrier_wait(&shared.full[turn.slot], turn.parity);
    pin(o);
    mma_fence();
    values_product<Half>(o, p, shared.slots[turn.slot], tile != tiles.begin);
    mma_commit();
    mma_wait<0>();
    pin(o);
    if (speaks) barrier_arrive(&shared.free[turn.slot]);
    turn.next();
  }
  const int64_t every = problem.batch * problem.heads * problem.queries;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = state.sum(h);
    const Row row = shared.block.rows[row_of_thread(thread, h)];
    if (row.head < 0) continue;
    const int64_t at = segment * every + row_index(problem, item, row);
    if (thread % 4 == 0) {
      arguments.part_n[at] = state.n[h];
      arguments.part_sum[at] = sum;
    }
    float* to = arguments.part_o + at * kColumns + thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
  }
}

template <typename Half, int kColumns>
__global__ void __launch_bounds__(kThreads, kResident) attention_segments_kernel(const __grid_constant__ ForwardArguments arguments) {
  using Shared = Segment<kColumns>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t id = blockIdx.x / arguments.segments, segment = blockIdx.x - id * arguments.segments;
  if (thread == 0) {
    find_block(arguments.problem, arguments.order, id, &shared.block);
    for (int slot = 0; slot < Shared::kSlots; ++slot) {
      barrier_init(&shared.full[slot], 1);
      barrier_init(&shared.free[slot], kWarpgroup / 32);
    }
    barrier_init(&shared.loaded, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (thread < kSegmentRows) shared.block.fill(arguments.problem, thread);
  __syncthreads();
  Tiles tiles = shared.block.tiles();
  const auto low = static_cast<int32_t>(segment * kSegmentTiles);
  tiles = Tiles{max(tiles.begin, low), min(tiles.end, low + kSegmentTiles)};
  if (tiles.begin >= tiles.end) return;
  if (thread >= kWarpgroup)
    copy_tiles<kColumns>(arguments, shared, tiles);
  else
    own_rows<Half, kColumns>(arguments, shared, tiles, segment);
}

constexpr int kMergeThreads = 128;

// Four or two neighbouring floats.
template <int kCount>
struct alignas(4 * kCount) Floats {
  float lanes[kCount];
};

// A row by a warp: the segments that the row sees, ascending.
template <typename Half, int kColumns>
__global__ void __launch_bounds__(kMergeThreads) attention_merge_kernel(const __grid_constant__ ForwardArguments arguments) {
  constexpr int kEach = kColumns / 32, kAtOnce = 8;
  const Attention& problem = arguments.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t every = problem.batch * problem.heads * problem.queries;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kMergeThreads / 32) + threadIdx.x / 32;
  if (at >= every) return;
  const int64_t head = at / problem.queries, batch = head / problem.heads;
  const Item item = item_of(problem, batch);
  const Row row{static_cast<int32_t>(head - batch * problem.heads), static_cast<int32_t>(at - head * problem.queries)};
  const Visible keys = visible_keys(problem, item, row.query);
  const int32_t phase = key_phase(problem, item);
  const int32_t begin = (keys.lower + phase) / attn::sm90::kSegment;
  const int32_t end = keys.lower < keys.upper ? (keys.upper + phase + attn::sm90::kSegment - 1) / attn::sm90::kSegment : begin;
  float n = dead(), sum = 0.0f;
  Floats<kEach> o{};
  const auto* parts = reinterpret_cast<const Floats<kEach>*>(arguments.part_o) + lane;
#pragma unroll 1
  for (int32_t base = begin; base < end; base += kAtOnce) {
    Floats<kEach> part_o[kAtOnce];
    float part_n = dead(), part_sum = 0.0f;
    if (lane < kAtOnce && base + lane < end) {
      part_n = arguments.part_n[(base + lane) * every + at];
      part_sum = arguments.part_sum[(base + lane) * every + at];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) part_o[i] = base + i < end ? parts[((base + i) * every + at) * 32] : Floats<kEach>{};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float n_s = __shfl_sync(~0u, part_n, i), sum_s = __shfl_sync(~0u, part_sum, i);
      if (base + i >= end) continue;
      const Factors factors = merge_factors(n, sum, n_s, sum_s);
      n = factors.n;
      sum = merged(sum, sum_s, factors);
#pragma unroll
      for (int e = 0; e < kEach; ++e) o.lanes[e] = merged(o.lanes[e], part_o[i].lanes[e], factors);
    }
  }
  const RowResult result = row_result(n, sum, sink_of(problem, row));
  if (lane == 0) arguments.lse[at] = result.lse;
  uint32_t pairs[kEach / 2];
#pragma unroll
  for (int e = 0; e < kEach; e += 2) pairs[e / 2] = pair_of<Half>(mul(o.lanes[e], result.factor), mul(o.lanes[e + 1], result.factor));
  auto* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(arguments.out) + at * kColumns) + lane * (kEach / 2);
#pragma unroll
  for (int e = 0; e < kEach / 2; ++e) to[e] = pairs[e];
}

template <typename Half, int kColumns>
cudaError_t launch_as(const ForwardArguments& arguments, int64_t blocks, int64_t rows, void* stream) {
  using Shared = Segment<kColumns>;
  static_assert(kResident * (sizeof(Shared) + 1024) <= 228 * 1024, "shared memory of a multiprocessor of compute capability 9.0");
  const cudaError_t error = launch(attention_segments_kernel<Half, kColumns>, arguments, blocks * arguments.segments,
                                   Block{kThreads, 1, true, false, sizeof(Shared)}, stream);
  if (error != cudaSuccess) return error;
  return launch(attention_merge_kernel<Half, kColumns>, arguments, rows, Block{kMergeThreads, kMergeThreads / 32, false, false, 0}, stream);
}

}  // namespace

cudaError_t launch_segments(const ForwardArguments& arguments, int64_t blocks, int64_t rows, void* stream) {
  const bool narrow = arguments.problem.head_dim == 64;
  if (arguments.problem.q.dtype == ATTN_CUDA_BFLOAT16)
    return narrow ? launch_as<attn::bfloat16, 64>(arguments, blocks, rows, stream)
                  : launch_as<attn::bfloat16, 128>(arguments, blocks, rows, stream);
  return narrow ? launch_as<attn::float16, 64>(arguments, blocks, rows, stream)
                : launch_as<attn::float16, 128>(arguments, blocks, rows, stream);
}

}  // namespace attn_cuda::hopper
