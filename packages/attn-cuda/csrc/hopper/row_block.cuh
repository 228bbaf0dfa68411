// The rows that a block of threads owns: which they are, the keys that they see, their queries in shared memory, and where results go.
#pragma once

#include "attention_problem.cuh"
#include "hopper/arithmetic.cuh"
#include "hopper/hole.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"

namespace attn_cuda::hopper {

constexpr int kTileKeys = 128;
constexpr int kSegmentTiles = attn::sm90::kSegment / kTileKeys;

// Stored keys [lower, upper) that a row sees; neither when it sees none.
struct Visible {
  int32_t lower, upper;
};

__device__ __forceinline__ Visible visible_keys(const Attention& problem, const Item& item, int32_t query) {
  const int64_t diagonal = query + item.offset;
  int64_t lower = 0, upper = item.used;
  if (problem.causal && diagonal + 1 < upper) upper = diagonal + 1;
  if (problem.window_right >= 0 && diagonal + problem.window_right + 1 < upper) upper = diagonal + problem.window_right + 1;
  if (problem.window_left >= 0 && diagonal - problem.window_left > lower) lower = diagonal - problem.window_left;
  if (lower >= upper) return Visible{0, 0};
  return Visible{static_cast<int32_t>(lower), static_cast<int32_t>(upper)};
}

// Slot of stored key 0, counted from the segment boundary at or before it. Slot / kTileKeys is a key's tile.
__device__ __forceinline__ int32_t key_phase(const Attention& problem, const Item& item) {
  return problem.k_start == nullptr ? 0 : static_cast<int32_t>(problem.k_start[item.batch] & (attn::sm90::kSegment - 1));
}

struct Tiles {
  int32_t begin, end;
};

// Work of a block of threads, in its shared memory.
template <int kRows>
struct RowBlock {
  static constexpr int kWarps = kRows / 32;

  Item item;
  int32_t kv_head;
  int32_t phase;
  Hole hole;        // of the whole kernel
  int64_t block;    // -1: nothing to do
  Row rows[kRows];  // head < 0: absent
  Tiles seen[kWarps];

  // By the threads below kRows of the block after one of them has set item, kv_head and block; a barrier follows.
  __device__ __forceinline__ void fill(const Attention& problem, int thread) {
    const Row row = row_of(problem, item, kv_head, block * kRows + thread);
    const int32_t slot = key_phase(problem, item);
    int32_t first = INT32_MAX, last = 0;
    if (row.head >= 0) {
      const Visible keys = visible_keys(problem, item, row.query);
      if (keys.lower < keys.upper) first = keys.lower + slot, last = keys.upper + slot;
    }
    rows[thread] = row;
    first = __reduce_min_sync(~0u, first);
    last = __reduce_max_sync(~0u, last);
    if (thread % 32 == 0) seen[thread / 32] = Tiles{first, last};
    if (thread == 0) phase = slot;
  }

  // Tiles that some row sees.
  __device__ __forceinline__ Tiles tiles() const {
    int32_t first = INT32_MAX, last = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      first = min(first, seen[warp].begin);
      last = max(last, seen[warp].end);
    }
    if (first >= last) return Tiles{0, 0};
    return Tiles{first / kTileKeys, (last + kTileKeys - 1) / kTileKeys};
  }
};

// Dense work in sections of (batch, kv head) pairs whose keys fit in the cache together; in a section, blocks that see most keys under
// causality first.
struct WorkOrder {
  int64_t per_item;     // blocks of a kv head
  const int64_t* plan;  // packed: blocks before each segment
  int64_t section;      // pairs
};

// Item, kv head and block number `id`, by one thread.
template <int kRows>
__device__ __forceinline__ void find_block(const Attention& problem, const WorkOrder& order, int64_t id, RowBlock<kRows>* to) {
  if (order.plan != nullptr) {
    Work work;
    to->block = -1;
    if (!find_work(problem, id, order.per_item, order.plan, &work)) return;
    to->item = work.item, to->kv_head = work.kv_head, to->block = work.block;
    return;
  }
  const int64_t pairs = problem.batch * problem.kv_heads;
  const int64_t first = id / (order.per_item * order.section) * order.section;
  const int64_t width = pairs - first < order.section ? pairs - first : order.section;
  const int64_t inside = id - first * order.per_item, turn = inside / width, pair = first + inside % width;
  to->block = order.per_item - 1 - turn;
  to->kv_head = static_cast<int32_t>(pair % problem.kv_heads);
  to->item = item_of(problem, pair / problem.kv_heads);
}

// Row h, 0 or 1, of a thread's accumulators.
__device__ __forceinline__ int row_of_thread(int thread, int h) { return thread / 32 * 16 + thread % 32 / 4 + 8 * h; }

// Panels of 64 rows of q for a warpgroup, by its threads; absent rows are +0. The array has `vectors`.
template <int kColumns>
__device__ __forceinline__ void load_queries(const Array& q, const Item& item, const Row* rows, int thread, uint8_t* panels) {
  constexpr int kPieces = kColumns / 8, kEach = kWarpgroupRows * kPieces / kWarpgroup, kApart = kWarpgroup / kPieces;
  const int first = thread / kPieces, column = thread % kPieces * 8;
  const auto* from = static_cast<const uint16_t*>(q.data) + query_offset(q, item, Row{0, 0}) + column;
  uint4 pieces[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const Row row = rows[first + i * kApart];
    const auto* piece = reinterpret_cast<const uint4*>(from + row.head * q.head + row.query * q.row);
    pieces[i] = make_uint4(0, 0, 0, 0);
    if (row.head >= 0) pieces[i] = *piece;
  }
  uint8_t* panel = panels + column / kPanel * (kWarpgroupRows * kPanelRowBytes);
#pragma unroll
  for (int i = 0; i < kEach; ++i) *reinterpret_cast<uint4*>(panel + swizzled(first + i * kApart, column % kPanel)) = pieces[i];
}

// An accumulator times a factor for each of the thread's two rows, as halves into panels of 64 rows.
template <typename Half, int kCount>
__device__ __forceinline__ void stage_rows(const float (&o)[kCount], const float (&factor)[2], int thread, uint8_t* panels) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    uint8_t* panel = panels + j / 8 * (kWarpgroupRows * kPanelRowBytes);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<uint32_t*>(panel + swizzled(row_of_thread(thread, h), j % 8 * 8 + thread % 4 * 2)) =
          pair_of<Half>(mul(o[4 * j + 2 * h], factor[h]), mul(o[4 * j + 2 * h + 1], factor[h]));
  }
}

// 64 rows of halves from panels to `out`, contiguous, by the threads of a warpgroup. All of a thread's reads come before its writes.
template <int kColumns>
__device__ __forceinline__ void store_rows(const Attention& problem, const Item& item, const Row* rows, int thread, const uint8_t* panels,
                                           void* out) {
  constexpr int kPieces = kColumns / 8, kEach = kWarpgroupRows * kPieces / kWarpgroup, kApart = kWarpgroup / kPieces;
  const int first = thread / kPieces, column = thread % kPieces * 8;
  const uint8_t* panel = panels + column / kPanel * (kWarpgroupRows * kPanelRowBytes);
  Row row[kEach];
  uint4 values[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    row[i] = rows[first + i * kApart];
    values[i] = *reinterpret_cast<const uint4*>(panel + swizzled(first + i * kApart, column % kPanel));
  }
  const int64_t base = query_result(problem, item, Row{0, 0}, kColumns);
  const int64_t head = query_result(problem, item, Row{1, 0}, kColumns) - base;
  const int64_t query = query_result(problem, item, Row{0, 1}, kColumns) - base;
  auto* to = static_cast<uint16_t*>(out) + base + column;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (row[i].head >= 0) *reinterpret_cast<uint4*>(to + row[i].head * head + row[i].query * query) = values[i];
}

// Zeros the rows [first, kTileKeys) of a tile in shared memory, by one warp.
template <int kColumns>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int first, int lane) {
  for (int panel = 0; panel < kColumns / kPanel; ++panel)
    for (int piece = first * 8 + lane; piece < kTileKeys * 8; piece += 32)
      *reinterpret_cast<uint4*>(tile + panel * (kTileKeys * kPanelRowBytes) + piece * 16) = make_uint4(0, 0, 0, 0);
}

}  // namespace attn_cuda::hopper
