// Forward pass of sm90-v1, all keys of a block of rows. Of the first warpgroup one warp copies tiles of keys and values, and one finds the
// blocks; the other warpgroups own 64 rows each. While one of them takes the exponentials of a tile, the tensor cores have the products of
// another one. Every multiprocessor goes from block to block, and the tiles of the next one come while the last one is finished.
#include "hopper/forward.cuh"
#include "hopper/row_state.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kStages = 2;
constexpr int kBlocks = 2;  // the one in work and the next one

template <int kColumns, int kOwners>
struct Whole {
  static constexpr int kRows = kOwners * kWarpgroupRows;
  static constexpr int kThreads = (kOwners + 1) * kWarpgroup;
  static constexpr int kOwnerThreads = kOwners * kWarpgroup;
  static constexpr int kTileBytes = kTileKeys * kColumns * 2;
  static constexpr int kQueryBytes = kWarpgroupRows * kColumns * 2;
  // Whether owners scale and merge O between a product of scores and the one with values, or after both; docs/performance.md has the times.
  static constexpr bool kLate = kOwners == 3;

  alignas(1024) uint8_t queries[kOwners][kQueryBytes];  // later the rows of out
  alignas(1024) uint8_t keys[kStages][kTileBytes];
  alignas(1024) uint8_t values[kStages][kTileBytes];
  float4 merged[kColumns / 8][kOwnerThreads];
  RowBlock<kRows> blocks[kBlocks];
  uint64_t keys_full[kStages], keys_free[kStages], values_full[kStages], values_free[kStages], values_loaded;
  uint64_t block_full[kBlocks], block_free[kBlocks];
};

// Registers of a thread. A block starts with 168 for each of 384 threads, or 128 for each of 512; setmaxnreg only moves them.
template <int kOwners>
struct Registers {
  static constexpr int kFeeder = kOwners == 2 ? 40 : 32;
  static constexpr int kOwner = kOwners == 2 ? 232 : 160;
  static constexpr int kLaunch = kOwners == 2 ? 168 : 128;
  static_assert(kFeeder + kOwners * kOwner <= (kOwners + 1) * kLaunch, "an owner would wait for registers for ever");
};

// Uses of a ring of two, of which every second one has the same slot.
struct Uses {
  uint32_t count = 0;

  __device__ __forceinline__ int slot() const { return static_cast<int>(count % 2); }
  __device__ __forceinline__ uint32_t parity() const { return count / 2 % 2; }
};

// What the copying warp counts over all blocks: tiles, and tiles of values that it cleared a part of.
struct Copied {
  Uses tiles;
  uint32_t cleared = 0;
};

// Tiles of keys and values of a block, by one warp.
template <int kColumns, int kOwners>
__device__ __forceinline__ void copy_tiles(const ForwardArguments& arguments, Whole<kColumns, kOwners>& shared,
                                           const RowBlock<Whole<kColumns, kOwners>::kRows>& block, Copied& copied) {
  using Shared = Whole<kColumns, kOwners>;
  constexpr int kPanelBytes = kTileKeys * kPanelRowBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Tiles seen = block.tiles();
  const TileWalk<kTileKeys> tiles(seen.begin, seen.end, block.hole);
  const int32_t used = block.item.used;
  for (int32_t tile = tiles.begin; tile < tiles.end; tile = tiles.after(tile), ++copied.tiles.count) {
    const int stage = copied.tiles.slot();
    const uint32_t parity = copied.tiles.parity() ^ 1;
    const int32_t first = tile * kTileKeys - block.phase;
    const MapPlace place = map_place(arguments.problem, block.item, first);
    barrier_wait(&shared.keys_free[stage], parity);
    if (lane == 0) {
      barrier_expect(&shared.keys_full[stage], Shared::kTileBytes);
      load_tile<kColumns>(shared.keys[stage], kPanelBytes, arguments.k, &shared.keys_full[stage], place.row, block.kv_head, place.batch);
    }
    barrier_wait(&shared.values_free[stage], parity);
    // Values past the end would meet a weight of +0, and may be NaN. Only the last tile of an item holds some.
    const bool clears = arguments.garbage && first + kTileKeys > used;
    uint64_t* arrival = clears ? &shared.values_loaded : &shared.values_full[stage];
    if (lane == 0) {
      barrier_expect(arrival, Shared::kTileBytes);
      load_tile<kColumns>(shared.values[stage], kPanelBytes, arguments.v, arrival, place.row, block.kv_head, place.batch);
    }
    if (clears) {
      barrier_wait(arrival, copied.cleared++ % 2);
      clear_rows<kColumns>(shared.values[stage], used - first, lane);
      async_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.values_full[stage]);
    }
  }
}

// By one warp: finds blocks, one ahead of the owners and while the tiles of the last one are copied.
template <int kColumns, int kOwners>
__device__ __forceinline__ void find_blocks(const ForwardArguments& arguments, Whole<kColumns, kOwners>& shared) {
  constexpr int kRows = Whole<kColumns, kOwners>::kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (Uses turn;; ++turn.count) {
    RowBlock<kRows>& block = shared.blocks[turn.slot()];
    barrier_wait(&shared.block_free[turn.slot()], turn.parity() ^ 1);
    if (lane == 0) {
      const int64_t id = turn.count == 0                ? blockIdx.x
                         : arguments.counter == nullptr ? arguments.blocks
                                                        : int64_t{gridDim.x} + atomicAdd(arguments.counter, 1u);
      block.block = -1;
      if (id < arguments.blocks) {
        find_block(arguments.problem, arguments.order, id, &block);
        block.hole = hole_of(arguments.holes, block.item);
      }
    }
    __syncwarp();
    const bool some = block.block >= 0;
    if (some)
      for (int row = lane; row < kRows; row += 32) block.fill(arguments.problem, row);
    __syncwarp();
    barrier_arrive(&shared.block_full[turn.slot()]);
    if (!some) return;
  }
}

// By another one: copies the tiles of the blocks found.
template <int kColumns, int kOwners>
__device__ __forceinline__ void copy_blocks(const ForwardArguments& arguments, Whole<kColumns, kOwners>& shared) {
  Copied copied;
  for (Uses turn;; ++turn.count) {
    barrier_wait(&shared.block_full[turn.slot()], turn.parity());
    const auto& block = shared.blocks[turn.slot()];
    if (block.block < 0) return;
    copy_tiles<kColumns, kOwners>(arguments, shared, block, copied);
    barrier_arrive(&shared.block_free[turn.slot()]);
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

// 64 rows of a block, by the warpgroup that owns them; `used` counts tiles over all blocks.
template <typename Half, int kColumns, int kOwners>
__device__ __forceinline__ void own_rows(const ForwardArguments& arguments, Whole<kColumns, kOwners>& shared,
                                         const RowBlock<Whole<kColumns, kOwners>::kRows>& block, int owner, Uses& used) {
  constexpr bool kLate = Whole<kColumns, kOwners>::kLate;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const bool speaks = thread % 32 == 0;
  const int own_name = 1 + kOwners + owner;
  const Row* rows = block.rows + owner * kWarpgroupRows;
  uint8_t* queries = shared.queries[owner];
  float4* pieces = &shared.merged[0][owner * kWarpgroup + thread];
  const float factor = arguments.factor;
  const Tiles seen = block.tiles();
  TileWalk<kTileKeys> tiles(seen.begin, seen.end, block.hole);

  load_queries<kColumns>(arguments.problem.q, block.item, rows, thread, queries);
  async_fence();
  named_sync(own_name, kWarpgroup);
  RowPair pair(arguments.problem, block.item, rows, thread);
  SegmentState state;
  MergedState run;
  state.clear();
  float o[kColumns / 2], s[kScores], top[2], alpha[2];
  uint32_t p[kSteps][4];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;

  const int count = tiles.count();
  int32_t first = tiles.begin * kTileKeys - block.phase;
  if (first < block.hole.end) pair.see_below(block.hole.begin);
  if (count > 0) {
    barrier_wait(&shared.keys_full[used.slot()], used.parity());
    pin(s);
    mma_fence();
    scores_product<Half, kColumns>(s, queries, shared.keys[used.slot()]);
    mma_commit();
    mma_wait<0>();
    pin(s);
    if (speaks) barrier_arrive(&shared.keys_free[used.slot()]);
    pair.mask(s, first);
    row_maxima(s, top);
    state.weigh(s, top, factor, alpha);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) operand_of<Half>(s, step, p[step]);
  }
  int accumulate = 0;
  bool ended = false;  // the tile weighed last began a segment, and O is still that of the one before
  // The segments so far into shared memory, where the tile weighed last began another one.
  const auto merge = [&] {
    run.merge(o, pieces, kOwners * kWarpgroup);
    MergedState::keep(o, pieces, kOwners * kWarpgroup);
  };
  // O as the product with that tile's values continues it.
  const auto carry = [&] {
    if (ended)
      merge();
    else
      rescale(o, alpha);
    accumulate = !ended;
  };
#pragma unroll 1
  for (int i = 1; i < count; ++i) {
    const Uses before = used;
    ++used.count;
    first += kTileKeys;
    // On to the other side of the hole, at whose begin the keys that the rows see seem to end. Without one no key lies there.
    if (first + kTileKeys > pair.outer && first >= block.hole.begin && first <= block.hole.end) {
      tiles.begin += (block.hole.end - first) / kTileKeys;
      first = block.hole.end;
      pair.see_below(block.item.used);
    }
    barrier_wait(&shared.keys_full[used.slot()], used.parity());
    await_turn<kOwners>(owner);
    pin(s);
    if constexpr (!kLate) pin(o);
    mma_fence();
    scores_product<Half, kColumns>(s, queries, shared.keys[used.slot()]);
    mma_commit();
    const bool merges = kLate && ended;  // the other owners need not wait for it
    if constexpr (kLate) {
      if (merges) pass_turn<kOwners>(owner);
      carry();
    }
    barrier_wait(&shared.values_full[before.slot()], before.parity());
    if constexpr (kLate) {
      pin(o);
      mma_fence();
    }
    values_product<Half>(o, p, shared.values[before.slot()], accumulate);
    mma_commit();
    if (!merges) pass_turn<kOwners>(owner);
    mma_wait<1>();
    pin(s);
    if (speaks) barrier_arrive(&shared.keys_free[used.slot()]);
    pair.mask(s, first);
    // ptxas moves the wait for O to the beginning of its basic block: only what comes before this branch overlaps with the product.
    if constexpr (!kLate) row_maxima(s, top);
    ended = (tiles.begin + i) % kSegmentTiles == 0;
    if (ended) {
      run.append(state);
      state.clear();
    }
    mma_wait<0>();
    pin(o);
    if (speaks) barrier_arrive(&shared.values_free[before.slot()]);
    if constexpr (kLate) {
      row_maxima(s, top);
      state.weigh(s, top, factor, alpha);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) operand_of<Half>(s, step, p[step]);
    } else {
      if (ended) merge();
      state.template weigh_and_scale<Half>(s, top, factor, p, o);
      accumulate = !ended;  // where a segment begins, the next product starts from +0, and the scaled O is of no use
    }
  }
  float factors[2];
  int again = thread;  // opaque: addresses made of it are not computed before the loop and held in registers, or spilled, through it
  asm volatile("" : "+r"(again));
  // While the last product runs: LSE, and the factors of O.
  const auto settle = [&] {
    run.append(state);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Row row = rows[row_of_thread(again, h)];
      const RowResult result = row_result(run.n[h], run.l[h], sink_of(arguments.problem, row));
      factors[h] = result.factor;
      if (again % 4 == 0 && row.head >= 0) arguments.lse[row_index(arguments.problem, block.item, row)] = result.lse;
    }
  };
  if (count > 0) {
    if constexpr (kLate) carry();
    barrier_wait(&shared.values_full[used.slot()], used.parity());
    pin(o);
    mma_fence();
    values_product<Half>(o, p, shared.values[used.slot()], accumulate);
    mma_commit();
    settle();
    mma_wait<0>();
    pin(o);
    if (speaks) barrier_arrive(&shared.values_free[used.slot()]);
    ++used.count;
  } else {
    settle();
  }
  run.merge(o, pieces, kOwners * kWarpgroup);
  stage_rows<Half>(o, factors, again, queries);
  named_sync(own_name, kWarpgroup);
  store_rows<kColumns>(arguments.problem, block.item, rows, again, queries, arguments.out);
  named_sync(own_name, kWarpgroup);
}

template <typename Half, int kColumns, int kOwners>
__global__ void __launch_bounds__(Whole<kColumns, kOwners>::kThreads, 1)
    attention_whole_kernel(const __grid_constant__ ForwardArguments arguments) {
  using Shared = Whole<kColumns, kOwners>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.keys_full[stage], 1);
      barrier_init(&shared.values_full[stage], 1);
      barrier_init(&shared.keys_free[stage], kOwners * 4);
      barrier_init(&shared.values_free[stage], kOwners * 4);
    }
    for (int slot = 0; slot < kBlocks; ++slot) {
      barrier_init(&shared.block_full[slot], 32);
      barrier_init(&shared.block_free[slot], Shared::kOwnerThreads + 32);
    }
    barrier_init(&shared.values_loaded, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    fewer_registers<Registers<kOwners>::kFeeder>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) copy_blocks<kColumns, kOwners>(arguments, shared);
    if (warp == 1) find_blocks<kColumns, kOwners>(arguments, shared);
  } else {
    more_registers<Registers<kOwners>::kOwner>();
    const int owner = role - 1;
    if (owner == kOwners - 1) pass_turn<kOwners>(owner);
    Uses used;
#pragma unroll 1
    for (Uses turn;; ++turn.count) {
      barrier_wait(&shared.block_full[turn.slot()], turn.parity());
      const auto& block = shared.blocks[turn.slot()];
      if (block.block < 0) break;
      own_rows<Half, kColumns, kOwners>(arguments, shared, block, owner, used);
      barrier_arrive(&shared.block_free[turn.slot()]);
    }
  }
}

template <typename Half, int kColumns>
cudaError_t launch_as(const ForwardArguments& arguments, int64_t resident, void* stream) {
  constexpr int kOwners = whole_rows(kColumns) / kWarpgroupRows;
  using Shared = Whole<kColumns, kOwners>;
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a block on compute capability 9.0");
  return launch(attention_whole_kernel<Half, kColumns, kOwners>, arguments, resident,
                Block{Shared::kThreads, 1, true, false, sizeof(Shared)}, stream);
}

}  // namespace

cudaError_t launch_whole(const ForwardArguments& arguments, int64_t resident, void* stream) {
  const bool narrow = arguments.problem.head_dim == 64;
  if (arguments.problem.q.dtype == ATTN_CUDA_BFLOAT16)
    return narrow ? launch_as<attn::bfloat16, 64>(arguments, resident, stream)
                  : launch_as<attn::bfloat16, 128>(arguments, resident, stream);
  return narrow ? launch_as<attn::float16, 64>(arguments, resident, stream) : launch_as<attn::float16, 128>(arguments, resident, stream);
}

}  // namespace attn_cuda::hopper
