// Forward pass of sm90-v1, all keys of a block of rows. One warpgroup copies tiles of keys and values; the others own 64 rows each. While
// one of them takes the exponentials of a tile, the tensor cores have the products of another one, and the next scores of the same one.
#include "hopper/forward.cuh"
#include "hopper/row_state.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kStages = 2;

template <int kColumns, int kOwners>
struct Whole {
  static constexpr int kRows = kOwners * kWarpgroupRows;
  static constexpr int kThreads = (kOwners + 1) * kWarpgroup;
  static constexpr int kOwnerThreads = kOwners * kWarpgroup;
  static constexpr int kTileBytes = kTileKeys * kColumns * 2;
  static constexpr int kQueryBytes = kWarpgroupRows * kColumns * 2;

  alignas(1024) uint8_t queries[kOwners][kQueryBytes];  // later the rows of out
  alignas(1024) uint8_t keys[kStages][kTileBytes];
  alignas(1024) uint8_t values[kStages][kTileBytes];
  float4 merged[kColumns / 8][kOwnerThreads];
  RowBlock<kRows> block;
  uint64_t keys_full[kStages], keys_free[kStages], values_full[kStages], values_free[kStages], values_loaded;
};

// Registers of a thread: 64 Ki for all of them.
template <int kOwners>
struct Registers {
  static constexpr int kCopier = kOwners == 2 ? 24 : 32;
  static constexpr int kOwner = kOwners == 2 ? 240 : 160;
};

// Stage and parity of the i-th tile.
__device__ __forceinline__ int stage_of(int i) { return i % kStages; }
__device__ __forceinline__ uint32_t parity_of(int i) { return i / kStages % 2; }

// By one warp.
template <int kColumns, int kOwners>
__device__ __forceinline__ void copy_tiles(const ForwardArguments& arguments, Whole<kColumns, kOwners>& shared, Tiles tiles) {
  using Shared = Whole<kColumns, kOwners>;
  constexpr int kPanelBytes = kTileKeys * kPanelRowBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Item& item = shared.block.item;
  const int32_t kv_head = shared.block.kv_head, used = item.used;
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
    const int i = tile - tiles.begin, stage = stage_of(i);
    const int32_t first = tile * kTileKeys - shared.block.phase;
    const MapPlace place = map_place(arguments.problem, item, first);
    barrier_wait(&shared.keys_free[stage], parity_of(i) ^ 1);
    if (lane == 0) {
      barrier_expect(&shared.keys_full[stage], Shared::kTileBytes);
      load_tile<kColumns>(shared.keys[stage], kPanelBytes, arguments.k, &shared.keys_full[stage], place.row, kv_head, place.batch);
    }
    barrier_wait(&shared.values_free[stage], parity_of(i) ^ 1);
    // Values past the end would meet a weight of +0, and may be NaN. Only the last tile of an item holds some.
    const bool scrub = arguments.garbage && first + kTileKeys > used;
    uint64_t* arrival = scrub ? &shared.values_loaded : &shared.values_full[stage];
    if (lane == 0) {
      barrier_expect(arrival, Shared::kTileBytes);
      load_tile<kColumns>(shared.values[stage], kPanelBytes, arguments.v, arrival, place.row, kv_head, place.batch);
    }
    if (scrub) {
      barrier_wait(arrival, 0);
      clear_rows<kColumns>(shared.values[stage], used - first, lane);
      async_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.values_full[stage]);
    }
  }
}

// Whose turn it is to give products to the tensor cores goes round the owners.
template <int kOwners>
__device__ __forceinline__ void await_turn(int owner) {
  named_sync(1 + owner, 2 * kWarpgroup);
}
template <int kOwners>
__device__ __forceinline__ void pass_turn(int owner) {
  named_arrive(1 + (owner + 1) % kOwners, 2 * kWarpgroup);
}

// By one warpgroup, which owns 64 rows.
template <typename Half, int kColumns, int kOwners>
__device__ __forceinline__ void own_rows(const ForwardArguments& arguments, Whole<kColumns, kOwners>& shared, Tiles tiles, int owner) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const bool speaks = thread % 32 == 0;
  const int own_name = 1 + kOwners + owner;
  const Row* rows = shared.block.rows + owner * kWarpgroupRows;
  uint8_t* queries = shared.queries[owner];
  float4* pieces = &shared.merged[0][owner * kWarpgroup + thread];
  const float factor = arguments.factor;

  if (owner == kOwners - 1) pass_turn<kOwners>(owner);
  load_queries<kColumns>(arguments.problem.q, shared.block.item, rows, thread, queries);
  async_fence();
  named_sync(own_name, kWarpgroup);
  const RowPair pair(arguments.problem, shared.block.item, rows, thread);
  SegmentState state;
  MergedState run;
  state.clear();
  float o[kColumns / 2], s[kScores], alpha[2];
  uint32_t p[kTileKeys / kStepColumns][4];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;

  const int count = tiles.end - tiles.begin;
  int32_t first = tiles.begin * kTileKeys - shared.block.phase;
  if (count > 0) {
    barrier_wait(&shared.keys_full[0], 0);
    mma_fence();
    scores_product<Half, kColumns>(s, queries, shared.keys[0]);
    mma_commit();
    mma_wait<0>();
    pin(s);
    if (speaks) barrier_arrive(&shared.keys_free[0]);
    pair.mask(s, first);
    state.weigh(s, factor, alpha);
#pragma unroll
    for (int step = 0; step < kTileKeys / kStepColumns; ++step) operand_of<Half>(s, step, p[step]);
  }
  int accumulate = 0;
#pragma unroll 1
  for (int i = 1; i < count; ++i) {
    const int stage = stage_of(i), before = stage_of(i - 1);
    first += kTileKeys;
    barrier_wait(&shared.keys_full[stage], parity_of(i));
    await_turn<kOwners>(owner);
    pin(s);
    pin(o);
    mma_fence();
    scores_product<Half, kColumns>(s, queries, shared.keys[stage]);
    mma_commit();
    barrier_wait(&shared.values_full[before], parity_of(i - 1));
    values_product<Half>(o, p, shared.values[before], accumulate);
    mma_commit();
    pass_turn<kOwners>(owner);
    accumulate = 1;
    mma_wait<1>();
    pin(s);
    if (speaks) barrier_arrive(&shared.keys_free[stage]);
    if ((tiles.begin + i) % kSegmentTiles == 0) {
      mma_wait<0>();
      pin(o);
      run.append(state, o, pieces, kOwners * kWarpgroup, true);
      state.clear();
      accumulate = 0;
    }
    pair.mask(s, first);
    state.weigh(s, factor, alpha);
    mma_wait<0>();
    pin(o);
    if (speaks) barrier_arrive(&shared.values_free[before]);
#pragma unroll
    for (int step = 0; step < kTileKeys / kStepColumns; ++step) operand_of<Half>(s, step, p[step]);
    rescale(o, alpha);
  }
  if (count > 0) {
    const int stage = stage_of(count - 1);
    barrier_wait(&shared.values_full[stage], parity_of(count - 1));
    pin(o);
    mma_fence();
    values_product<Half>(o, p, shared.values[stage], accumulate);
    mma_commit();
    mma_wait<0>();
    pin(o);
  }
  run.append(state, o, pieces, kOwners * kWarpgroup, false);

  float factors[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Row row = rows[row_of_thread(thread, h)];
    const RowResult result = row_result(run.n[h], run.l[h], sink_of(arguments.problem, row));
    factors[h] = result.factor;
    if (thread % 4 == 0 && row.head >= 0) arguments.lse[row_index(arguments.problem, shared.block.item, row)] = result.lse;
  }
  stage_rows<Half>(o, factors, thread, queries);
  named_sync(own_name, kWarpgroup);
  store_rows<kColumns>(arguments.problem, shared.block.item, rows, thread, queries, arguments.out);
}

template <typename Half, int kColumns, int kOwners>
__global__ void __launch_bounds__(Whole<kColumns, kOwners>::kThreads, 1)
    attention_whole_kernel(const __grid_constant__ ForwardArguments arguments) {
  using Shared = Whole<kColumns, kOwners>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int role = __shfl_sync(~0u, thread / kWarpgroup, 0);
  if (thread == 0) {
    find_block(arguments.problem, arguments.order, blockIdx.x, &shared.block);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.keys_full[stage], 1);
      barrier_init(&shared.values_full[stage], 1);
      barrier_init(&shared.keys_free[stage], kOwners * 4);
      barrier_init(&shared.values_free[stage], kOwners * 4);
    }
    barrier_init(&shared.values_loaded, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (shared.block.block < 0) return;
  if (thread < Shared::kRows) shared.block.fill(arguments.problem, thread);
  __syncthreads();
  const Tiles tiles = shared.block.tiles();
  if (role == 0) {
    fewer_registers<Registers<kOwners>::kCopier>();
    if (thread < 32) copy_tiles<kColumns, kOwners>(arguments, shared, tiles);
  } else {
    more_registers<Registers<kOwners>::kOwner>();
    own_rows<Half, kColumns, kOwners>(arguments, shared, tiles, role - 1);
  }
}

template <typename Half, int kColumns>
cudaError_t launch_as(const ForwardArguments& arguments, int64_t blocks, void* stream) {
  constexpr int kOwners = whole_rows(kColumns) / kWarpgroupRows;
  using Shared = Whole<kColumns, kOwners>;
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a block on compute capability 9.0");
  return launch(attention_whole_kernel<Half, kColumns, kOwners>, arguments, blocks, Block{Shared::kThreads, 1, true, false, sizeof(Shared)},
                stream);
}

}  // namespace

cudaError_t launch_whole(const ForwardArguments& arguments, int64_t blocks, void* stream) {
  const bool narrow = arguments.problem.head_dim == 64;
  if (arguments.problem.q.dtype == ATTN_CUDA_BFLOAT16)
    return narrow ? launch_as<attn::bfloat16, 64>(arguments, blocks, stream) : launch_as<attn::bfloat16, 128>(arguments, blocks, stream);
  return narrow ? launch_as<attn::float16, 64>(arguments, blocks, stream) : launch_as<attn::float16, 128>(arguments, blocks, stream);
}

}  // namespace attn_cuda::hopper
