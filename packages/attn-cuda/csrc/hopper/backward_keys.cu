// dK and dV of sm90-v1. A block owns 128 keys, 64 for each of its two consumers, and goes over the query heads of the group and, within a
// head, over the queries 64 at a time. Scores are computed transposed, so that P and dS are operands in registers.
#include "hopper/backward.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kTile = 64;  // queries
constexpr int kSteps = kTile / kStepColumns;

constexpr int64_t kFar = int64_t{1} << 30;

// What the block does: its keys, and the queries that see some of them, [begin, end), or all of them, [full_begin, full_end); `begin` is
// cut to a tile. A pair is visible iff above <= key - query <= below, counted from the block's first key and the head's first query.
struct Work {
  HeadBlock block;
  int32_t begin, end, full_begin, full_end, below, above;

  __device__ __forceinline__ bool masks(int first) const { return first < full_begin || first + kTile > full_end; }
};

__device__ __forceinline__ Work work_of(const BackwardCall& call, int64_t id) {
  const Attention& problem = call.problem;
  Work work;
  work.block = find_block(problem, problem.kv_heads, call.key_blocks, problem.cu_seqlens_k, call.section, true, false, id);
  Item& item = work.block.item;
  const Hole hole = hole_of(call.holes, item);
  if (work.block.first < hole.end) item.used = min(item.used, hole.begin);  // the other side of it is of other blocks
  const int64_t first = work.block.first, last = min(first + kBlock, static_cast<int64_t>(item.used)) - 1, queries = item.queries;
  work.below = static_cast<int32_t>(clamped(item.offset + call.right - first, -kFar, kFar));
  work.above = static_cast<int32_t>(clamped(item.offset - call.left - first, -kFar, kFar));
  const auto begin = clamped(first - call.right - item.offset, 0, queries), end = clamped(last + call.left - item.offset + 1, 0, queries);
  const bool some = last >= first && begin < end;
  work.begin = some ? static_cast<int32_t>(begin) / kTile * kTile : 0;
  work.end = some ? static_cast<int32_t>(end) : 0;
  work.full_begin = static_cast<int32_t>(clamped(last - call.right - item.offset, 0, queries));
  work.full_end = static_cast<int32_t>(clamped(first + call.left - item.offset + 1, 0, queries));
  return work;
}

template <int kColumns>
struct Shared {
  static constexpr int kStages = 4;
  static constexpr int kOwnPanel = kBlock * kPanelRowBytes, kPanelBytes = kTile * kPanelRowBytes;
  static constexpr int kPanels = kColumns / kPanel;

  struct Stage {
    uint8_t q[kPanels * kPanelBytes], dout[kPanels * kPanelBytes];
  };

  alignas(1024) uint8_t k[kPanels * kOwnPanel];
  uint8_t v[kPanels * kOwnPanel];
  Stage stages[kStages];
  alignas(128) float origin[kStages][kTile];
  float delta[kStages][kTile];
  uint64_t full[kStages], empty[kStages], own;
  Work work;

  __device__ __forceinline__ void begin(const BackwardCall& call, int64_t id) {
    work = work_of(call, id);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&full[stage], 1);
      barrier_init(&empty[stage], kConsumers / 32);
    }
    barrier_init(&own, 1);
  }
};

template <int kColumns>
__device__ __forceinline__ void load(const BackwardCall& call, const GradientMaps& maps, const Work& work, Shared<kColumns>& shared) {
  using S = Shared<kColumns>;
  const Item& item = work.block.item;
  const bool packed = call.problem.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : static_cast<int>(item.batch), kv_head = work.block.head;
  const int key = static_cast<int>(item.first_key) + work.block.first, query = static_cast<int>(item.first_query);
  barrier_expect(&shared.own, sizeof(shared.k) + sizeof(shared.v));
  load_tile<kColumns>(shared.k, S::kOwnPanel, maps.k, &shared.own, key, kv_head, batch);
  load_tile<kColumns>(shared.v, S::kOwnPanel, maps.v, &shared.own, key, kv_head, batch);
  Ring<S::kStages> ring;
  for (int member = 0; member < call.problem.group; ++member) {
    const int head = kv_head * call.problem.group + member;
    const int64_t line = line_of(call, item, head);
    for (int first = work.begin; first < work.end; first += kTile) {
      uint64_t* full = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_expect(full, sizeof(typename S::Stage) + 2 * kTile * sizeof(float));
      load_tile<kColumns>(shared.stages[ring.stage].q, S::kPanelBytes, maps.q, full, query + first, head, batch);
      load_bytes(shared.origin[ring.stage], call.origin + line + first, kTile * sizeof(float), full);
      load_tile<kColumns>(shared.stages[ring.stage].dout, S::kPanelBytes, maps.dout, full, query + first, head, batch);
      load_bytes(shared.delta[ring.stage], call.delta + line + first, kTile * sizeof(float), full);
      ring.advance();
    }
  }
}

// Sets p to +0 where the pair is masked: value d[4 j + 2 h + e] is of key `key` + 8 h and query `query` + 8 j + e.
__device__ __forceinline__ void mask(float (&p)[kTile / 2], const Work& work, int key, int query) {
  const int low = key - query - work.below, high = key - query - work.above;
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) {
    const int apart = 8 * (i / 4) + i % 2 - 8 * (i / 2 % 2);
    if (apart < low || apart > high) p[i] = 0.0f;
  }
}

// Rows past the end of a packed segment are the next one's.
template <int kColumns>
__device__ __forceinline__ void clear_neighbours(typename Shared<kColumns>::Stage& stage, const BackwardCall& call, const Item& item,
                                                 int first, int thread) {
  if (call.problem.cu_seqlens_q == nullptr || first + kTile <= item.queries) return;
  clear_rows<kColumns>(stage.q, Shared<kColumns>::kPanelBytes, item.queries - first, kTile, thread);
  clear_rows<kColumns>(stage.dout, Shared<kColumns>::kPanelBytes, item.queries - first, kTile, thread);
  async_fence();
  named_sync(1, kConsumers);
}

// P from s, +0 where masked.
__device__ __forceinline__ void weigh(float (&s)[kTile / 2], const float* origins, float factor, const Work& work, Place place, int first) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    const float2 origin = *reinterpret_cast<const float2*>(&origins[8 * j + place.column]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s[4 * j + 2 * h] = ex2(fma(s[4 * j + 2 * h], factor, -origin.x));
      s[4 * j + 2 * h + 1] = ex2(fma(s[4 * j + 2 * h + 1], factor, -origin.y));
    }
  }
  if (work.masks(first)) mask(s, work, place.row, first + place.column);
}

// dS from P and dP, +0 where masked.
__device__ __forceinline__ void differentiate(const float (&p)[kTile / 2], float (&dp)[kTile / 2], const float* deltas, const Work& work,
                                              Place place, int first) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    const float2 delta = *reinterpret_cast<const float2*>(&deltas[8 * j + place.column]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      dp[4 * j + 2 * h] = mul(p[4 * j + 2 * h], sub(dp[4 * j + 2 * h], delta.x));
      dp[4 * j + 2 * h + 1] = mul(p[4 * j + 2 * h + 1], sub(dp[4 * j + 2 * h + 1], delta.y));
    }
  }
  if (work.masks(first)) mask(dp, work, place.row, first + place.column);
}

// The tensor cores take the scores of a step, then the sums of the step before, which exponentials overlap with, then dP. Operands in
// registers are written while no product is in flight: ptxas would otherwise wait for each product by itself.
template <typename Half, int kColumns>
__device__ __forceinline__ void consume(const BackwardCall& call, const Work& work, Shared<kColumns>& shared) {
  using S = Shared<kColumns>;
  const Place at = place();
  const Item& item = work.block.item;
  const float factor = call.factor;
  const uint8_t *k = shared.k + at.own * kPanelRowBytes, *v = shared.v + at.own * kPanelRowBytes;
  float dk[kColumns / 2], dv[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0.0f;
  if (work.begin < work.end) {
    const unsigned steps = call.problem.group * ((work.end - work.begin + kTile - 1) / kTile);
    float s[kTile / 2], dp[kTile / 2];
    uint32_t p_halves[kSteps][4], ds_halves[kSteps][4];
    int first = work.begin;
    barrier_wait(&shared.own, 0);
    barrier_wait(&shared.full[0], 0);
    clear_neighbours<kColumns>(shared.stages[0], call, item, first, at.thread);
    mma_fence();
    multiply_columns<Half, kColumns, S::kOwnPanel, S::kPanelBytes>(s, k, shared.stages[0].q);
    multiply_columns<Half, kColumns, S::kOwnPanel, S::kPanelBytes>(dp, v, shared.stages[0].dout);
    mma_wait<0>();
    pin(s);
    pin(dp);
    weigh(s, shared.origin[0], factor, work, at, first);
    differentiate(s, dp, shared.delta[0], work, at, first);
#pragma unroll 1
    for (unsigned step = 1; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) operand_of<Half>(s, i, p_halves[i]);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) operand_of<Half>(dp, i, ds_halves[i]);
      const unsigned now = step % S::kStages, before = (step - 1) % S::kStages;
      first = first + kTile < work.end ? first + kTile : work.begin;
      typename S::Stage& stage = shared.stages[now];
      barrier_wait(&shared.full[now], step / S::kStages % 2);
      clear_neighbours<kColumns>(stage, call, item, first, at.thread);
      mma_fence();
      multiply_columns<Half, kColumns, S::kOwnPanel, S::kPanelBytes>(s, k, stage.q);
      multiply_rows<Half, false, S::kPanelBytes>(dv, p_halves, shared.stages[before].dout);
      multiply_rows<Half, false, S::kPanelBytes>(dk, ds_halves, shared.stages[before].q);
      mma_wait<2>();
      pin(s);
      weigh(s, shared.origin[now], factor, work, at, first);
      mma_wait<0>();
      pin(dk);
      pin(dv);
      __syncwarp();  // its threads have read the row values
      if (at.thread % 32 == 0) barrier_arrive(&shared.empty[before]);
      mma_fence();
      multiply_columns<Half, kColumns, S::kOwnPanel, S::kPanelBytes>(dp, v, stage.dout);
      mma_wait<0>();
      pin(dp);
      differentiate(s, dp, shared.delta[now], work, at, first);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) operand_of<Half>(s, i, p_halves[i]);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) operand_of<Half>(dp, i, ds_halves[i]);
    typename S::Stage& last = shared.stages[(steps - 1) % S::kStages];
    mma_fence();
    multiply_rows<Half, false, S::kPanelBytes>(dv, p_halves, last.dout);
    multiply_rows<Half, false, S::kPanelBytes>(dk, ds_halves, last.q);
    mma_wait<0>();
    pin(dk);
    pin(dv);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = work.block.first + at.row + 8 * h;
    if (key >= item.keys) continue;
    if (key >= item.used) {  // and so is the one after it
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0.0f;
    }
    const int64_t element = key_result(call.problem, item, work.block.head, key, kColumns);
    if (call.dk != nullptr) store_row<Half>(call.dk, element, dk, h, call.problem.scale);
    if (call.dv != nullptr) store_row<Half>(call.dv, element, dv, h, 1.0f);
  }
}

template <typename Half, int kColumns>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    key_gradients_kernel(const __grid_constant__ BackwardCall call, const __grid_constant__ GradientMaps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kColumns>*>(memory);
  run_block(
      shared, call, [&] { load<kColumns>(call, maps, shared.work, shared); }, [&] { consume<Half, kColumns>(call, shared.work, shared); });
}

}  // namespace

int launch_key_gradients(const BackwardCall& call, void* stream) {
  return with_traits(call, [&](auto half, auto columns) {
    return launch_gradients(key_gradients_kernel<decltype(half), decltype(columns)::value>, call, call.problem.kv_heads, call.key_blocks,
                            kTile, kBlock, sizeof(Shared<decltype(columns)::value>), stream);
  });
}

}  // namespace attn_cuda::hopper
