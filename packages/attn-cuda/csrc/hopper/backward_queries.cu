// dQ of sm90-v1. A block owns 128 queries of one head, 64 for each of its two consumers, and goes over the key tiles that some of them see.
#include "hopper/backward.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kTile = 128;  // keys
constexpr int kHalf = kTile / 2;
constexpr int kSteps = kHalf / kStepColumns;

// What the block does. Tiles count from the tile boundary at or before stored key 0; all queries see all of [full_begin, full_end) but for
// the tile `cut`, of which they see the keys below `below`, up to a hole.
struct Work {
  HeadBlock block;
  int32_t phase, begin, end, jump, skipped, full_begin, full_end, cut, below;

  __device__ __forceinline__ int32_t after(int32_t tile) const { return tile + 1 + (tile == jump ? skipped : 0); }
};

// Stored keys [lower, upper) that a query sees.
struct Visible {
  int32_t lower, upper;
};

__device__ __forceinline__ Visible visible(const BackwardCall& call, const Item& item, int64_t query) {
  const int64_t diagonal = query + item.offset;
  return Visible{static_cast<int32_t>(clamped(diagonal - call.left, 0, item.used)),
                 static_cast<int32_t>(clamped(diagonal + call.right + 1, 0, item.used))};
}

__device__ __forceinline__ Work work_of(const BackwardCall& call, int64_t id) {
  const Attention& problem = call.problem;
  Work work;
  work.block = find_block(problem, problem.heads, call.query_blocks, problem.cu_seqlens_q, call.section, false, true, id);
  const Item& item = work.block.item;
  const int32_t first = work.block.first, last = min(first + kBlock, item.queries) - 1;
  const Visible of_first = visible(call, item, first), of_last = visible(call, item, last);
  work.phase = item.shift % kTile;
  const bool some = of_first.lower < of_last.upper;
  const Hole hole = hole_of(call.holes, item);
  const TileWalk<kTile> tiles(some ? (work.phase + of_first.lower) / kTile : 0, some ? (work.phase + of_last.upper + kTile - 1) / kTile : 0,
                              hole);
  work.begin = tiles.begin, work.end = tiles.end, work.jump = tiles.jump, work.skipped = tiles.skipped;
  work.cut = hole.begin % kTile > 0 ? hole.begin / kTile : kNoKey;
  work.below = hole.begin;
  work.full_begin = (work.phase + of_last.lower + kTile - 1) / kTile;
  work.full_end = (work.phase + of_first.upper) / kTile;
  return work;
}

template <int kColumns>
struct Shared {
  static constexpr int kStages = 2;
  static constexpr int kPanels = kColumns / kPanel, kPanelBytes = kBlock * kPanelRowBytes, kTileBytes = kPanels * kPanelBytes;

  alignas(1024) uint8_t q[kTileBytes];
  uint8_t dout[kTileBytes];
  uint8_t k[kStages][kTileBytes], v[kStages][kTileBytes];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], own;
  Work work;

  __device__ __forceinline__ void begin(const BackwardCall& call, int64_t id) {
    work = work_of(call, id);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&k_full[stage], 1);
      barrier_init(&v_full[stage], 1);
      barrier_init(&k_empty[stage], kConsumers / 32);
      barrier_init(&v_empty[stage], kConsumers / 32);
    }
    barrier_init(&own, 1);
  }
};

template <int kColumns>
__device__ __forceinline__ void load(const BackwardCall& call, const GradientMaps& maps, const Work& work, Shared<kColumns>& shared) {
  using S = Shared<kColumns>;
  const Item& item = work.block.item;
  const int batch = call.problem.cu_seqlens_q != nullptr ? 0 : static_cast<int>(item.batch), head = work.block.head;
  const int query = static_cast<int>(item.first_query) + work.block.first, kv_head = head / call.problem.group;
  const int key = static_cast<int>(item.first_key) - work.phase;
  barrier_expect(&shared.own, 2 * S::kTileBytes);
  load_tile<kColumns>(shared.q, S::kPanelBytes, maps.q, &shared.own, query, head, batch);
  load_tile<kColumns>(shared.dout, S::kPanelBytes, maps.dout, &shared.own, query, head, batch);
  Ring<S::kStages> ring;
  for (int tile = work.begin; tile < work.end; tile = work.after(tile)) {
    barrier_wait(&shared.k_empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&shared.k_full[ring.stage], S::kTileBytes);
    load_tile<kColumns>(shared.k[ring.stage], S::kPanelBytes, maps.k, &shared.k_full[ring.stage], key + tile * kTile, kv_head, batch);
    barrier_wait(&shared.v_empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&shared.v_full[ring.stage], S::kTileBytes);
    load_tile<kColumns>(shared.v[ring.stage], S::kPanelBytes, maps.v, &shared.v_full[ring.stage], key + tile * kTile, kv_head, batch);
    ring.advance();
  }
}

// Sets ds to +0 where the pair is masked: value d[4 j + 2 h + e] is of the key `first` + 8 j + e.
__device__ __forceinline__ void mask(float (&ds)[kHalf / 2], const Visible (&seen)[2], int first) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int low = seen[h].lower - first, high = seen[h].upper - first;
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e < low || 8 * j + e >= high) ds[4 * j + 2 * h + e] = 0.0f;
    }
  }
}

// Rows of another item, or past the length, in the last tile.
template <int kColumns>
__device__ __forceinline__ void clear_neighbours(uint8_t* k, const Item& item, int first, int thread) {
  if (first + kTile <= item.used) return;
  clear_rows<kColumns>(k, Shared<kColumns>::kPanelBytes, max(item.used - first, 0), kTile, thread);
  async_fence();
  named_sync(1, kConsumers);
}

struct RowValues {
  float origin[2], delta[2];
};

__device__ __forceinline__ void weigh(float (&s)[kHalf / 2], const RowValues& rows, float factor) {
#pragma unroll
  for (int i = 0; i < kHalf / 2; ++i) s[i] = ex2(fma(s[i], factor, -rows.origin[i / 2 % 2]));
}

// The operand dS from P and dP, +0 where masked.
template <typename Half>
__device__ __forceinline__ void differentiate(float (&s)[kHalf / 2], const float (&dp)[kHalf / 2], const RowValues& rows,
                                              const BackwardCall& call, const Work& work, Place at, int tile, int half,
                                              uint32_t (&ds)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kHalf / 2; ++i) s[i] = mul(s[i], sub(dp[i], rows.delta[i / 2 % 2]));
  if (tile < work.full_begin || tile >= work.full_end || tile == work.cut) {
    const int64_t query = work.block.first + at.row;
    Item item = work.block.item;
    if (tile == work.cut) item.used = work.below;
    mask(s, {visible(call, item, query), visible(call, item, query + 8)}, tile * kTile - work.phase + half * kHalf + at.column);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) operand_of<Half>(s, i, ds[i]);
}

// Tiles are taken in halves of 64 keys. The tensor cores take the scores of a half, then the product of the half before and dP, which
// exponentials overlap with. Operands in registers are written while no product is in flight: ptxas would otherwise wait for each product
// by itself.
template <typename Half, int kColumns>
__device__ __forceinline__ void consume(const BackwardCall& call, const Work& work, Shared<kColumns>& shared) {
  using S = Shared<kColumns>;
  constexpr int kPanelBytes = S::kPanelBytes, kHalfBytes = kHalf * kPanelRowBytes;
  const Place at = place();
  const Item& item = work.block.item;
  float sum[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.0f;
  if (work.begin < work.end) {
    const int64_t line = line_of(call, item, work.block.head) + work.block.first + at.row;
    const RowValues rows{{call.origin[line], call.origin[line + 8]}, {call.delta[line], call.delta[line + 8]}};
    const uint8_t *q = shared.q + at.own * kPanelRowBytes, *dout = shared.dout + at.own * kPanelRowBytes;
    float s[kHalf / 2], dp[kHalf / 2], part[kColumns / 2];
    uint32_t ds[kSteps][4];
    barrier_wait(&shared.own, 0);
    barrier_wait(&shared.k_full[0], 0);
    clear_neighbours<kColumns>(shared.k[0], item, work.begin * kTile - work.phase, at.thread);
    barrier_wait(&shared.v_full[0], 0);
    mma_fence();
    multiply_columns<Half, kColumns, kPanelBytes, kPanelBytes>(s, q, shared.k[0]);
    multiply_columns<Half, kColumns, kPanelBytes, kPanelBytes>(dp, dout, shared.v[0]);
    mma_wait<0>();
    pin(s);
    pin(dp);
    weigh(s, rows, call.factor);
    differentiate<Half>(s, dp, rows, call, work, at, work.begin, 0, ds);
    unsigned step = 0;
    int tile = work.begin;
    // The second half of a tile; the product of its first one.
    const auto second_half = [&] {
      const uint8_t *k = shared.k[step % S::kStages], *v = shared.v[step % S::kStages];
      mma_fence();
      multiply_columns<Half, kColumns, kPanelBytes, kPanelBytes>(s, q, k + kHalfBytes);
      multiply_rows<Half, true, kPanelBytes>(part, ds, k);
      multiply_columns<Half, kColumns, kPanelBytes, kPanelBytes>(dp, dout, v + kHalfBytes);
      mma_wait<2>();
      pin(s);
      weigh(s, rows, call.factor);
      mma_wait<0>();
      pin(dp);
      pin(part);
      if (at.thread % 32 == 0) barrier_arrive(&shared.v_empty[step % S::kStages]);
      differentiate<Half>(s, dp, rows, call, work, at, tile, 1, ds);
    };
#pragma unroll 1
    while (tile + 1 < work.end) {
      second_half();
      const unsigned before = step % S::kStages;
      ++step;
      tile = work.after(tile);
      const unsigned now = step % S::kStages, parity = step / S::kStages % 2;
      barrier_wait(&shared.k_full[now], parity);
      clear_neighbours<kColumns>(shared.k[now], item, tile * kTile - work.phase, at.thread);
      barrier_wait(&shared.v_full[now], parity);
      mma_fence();
      multiply_columns<Half, kColumns, kPanelBytes, kPanelBytes>(s, q, shared.k[now]);
      multiply_rows<Half, false, kPanelBytes>(part, ds, shared.k[before] + kHalfBytes);
      multiply_columns<Half, kColumns, kPanelBytes, kPanelBytes>(dp, dout, shared.v[now]);
      mma_wait<2>();
      pin(s);
      weigh(s, rows, call.factor);
      mma_wait<0>();
      pin(dp);
      pin(part);
      if (at.thread % 32 == 0) barrier_arrive(&shared.k_empty[before]);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sum[i] = add(sum[i], part[i]);
      differentiate<Half>(s, dp, rows, call, work, at, tile, 0, ds);
    }
    second_half();
    mma_fence();
    multiply_rows<Half, false, kPanelBytes>(part, ds, shared.k[step % S::kStages] + kHalfBytes);
    mma_wait<0>();
    pin(part);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] = add(sum[i], part[i]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = work.block.first + at.row + 8 * h;
    if (query < item.queries)
      store_row<Half>(call.dq, query_result(call.problem, item, Row{work.block.head, query}, kColumns), sum, h, call.problem.scale);
  }
}

template <typename Half, int kColumns>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    query_gradients_kernel(const __grid_constant__ BackwardCall call, const __grid_constant__ GradientMaps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kColumns>*>(memory);
  run_block(
      shared, call, [&] { load<kColumns>(call, maps, shared.work, shared); }, [&] { consume<Half, kColumns>(call, shared.work, shared); });
}

}  // namespace

int launch_query_gradients(const BackwardCall& call, void* stream) {
  return with_traits(call, [&](auto half, auto columns) {
    return launch_gradients(query_gradients_kernel<decltype(half), decltype(columns)::value>, call, call.problem.heads, call.query_blocks,
                            kBlock, kTile, sizeof(Shared<decltype(columns)::value>), stream);
  });
}

}  // namespace attn_cuda::hopper
