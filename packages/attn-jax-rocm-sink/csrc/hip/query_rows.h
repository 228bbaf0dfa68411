// What the blocks share that own eight rows of a kv head and stream its keys in tiles of slots.
#pragma once

#include "tile.h"

namespace attn::hip {

// Work of one block: eight rows of a kv head of an item. With packed input, blocks beyond those of the last segment have none.
struct Work {
  Item item;
  int64_t kv_head, first;
  bool exists;
};

__host__ __device__ inline int64_t owned_blocks(int64_t rows) { return (rows + kOwned - 1) / kOwned; }

// Work `id` of blocks over `rows_of(batch)` rows of each kv head. The last rows, which see most keys under causality, start first.
template <typename RowsOf>
__device__ inline Work find_work(const Attention& attention, int64_t id, RowsOf rows_of) {
  const Config& config = attention.config;
  Work work{};
  work.kv_head = id % config.kv_heads;
  int64_t block = id / config.kv_heads, blocks = 0, batch = 0;
  if (config.packed == 0) {
    blocks = owned_blocks(rows_of(0));
    batch = block / blocks;
    block -= batch * blocks;
  } else {
    for (; batch < config.batch; ++batch) {
      blocks = owned_blocks(rows_of(batch));
      if (block < blocks) break;
      block -= blocks;
    }
  }
  work.exists = batch < config.batch;
  if (!work.exists) return work;
  work.item = item_of(attention, batch);
  work.first = (blocks - 1 - block) * kOwned;
  return work;
}

// The owned rows, in shared memory; `seen` counts slots.
struct OwnedQueries {
  Query rows[kOwned];

  // Called by all threads, which may read after a barrier.
  __device__ void find(const Attention& attention, const Work& work) {
    const int r = static_cast<int>(threadIdx.x);
    if (r >= kOwned) return;
    Query query{};
    query.row = row_of(attention, work.item, work.kv_head, work.first + r);
    query.seen = query.row.index == kNoRow ? Range{0, 0} : slot_range(attention.config, work.item, query.row.query);
    if (query.row.index != kNoRow && attention.tensors.dout != nullptr)
      query.state = RowState{attention.tensors.row_max[query.row.index], attention.tensors.row_sum[query.row.index]};
    rows[r] = query;
  }

  // Slots that any of the rows sees, and those between.
  __device__ Range seen() const {
    Range all{0, 0};
    for (const Query& query : rows) {
      if (query.seen.empty()) continue;
      const bool first = all.empty();
      if (first || query.seen.begin < all.begin) all.begin = query.seen.begin;
      if (first || query.seen.end > all.end) all.end = query.seen.end;
    }
    return all;
  }

  __device__ bool see(int32_t slot) const {
    bool any = false;
    for (const Query& query : rows) any |= query.seen.has(slot);
    return any;
  }

  // Rows of q or dout as binary32.
  __device__ void load(const Array& array, const Item& item, OwnedRows& to) const {
#pragma unroll 1
    for (int r = 0; r < kOwned; ++r) {
      const Row row = rows[r].row;
      load_owned(array, row.index == kNoRow ? kNoRow : query_offset(array, item, row), to[r]);
    }
  }

  // The thread's column of the sums of each row, times `scale`.
  __device__ void store(const Array& array, const Item& item, const float (&sums)[kOwned], float scale) const {
    const int column = static_cast<int>(threadIdx.x);
    if (column >= array.columns) return;
#pragma unroll
    for (int r = 0; r < kOwned; ++r)
      if (rows[r].row.index != kNoRow) array.store(query_offset(array, item, rows[r].row) + column, mul(sums[r], scale));
  }
};

// Final scores of one tile of slots, -inf where masked, to the thread's column of `scores`. Returns the thread's stored key, kNoRow where
// no row sees one.
__device__ inline int64_t score_tile(const Attention& attention, const Work& work, int32_t tile, const OwnedQueries& queries,
                                     const OwnedRows& q, Pairs& scores) {
  const int32_t slot = tile + static_cast<int32_t>(threadIdx.x);
  const int64_t key = queries.see(slot) ? stored_key(work.item, slot) : kNoRow;
  const Array k = as_k(attention, attention.tensors.k);
  chain_pairs(k, key == kNoRow ? kNoRow : key_offset(k, work.item, work.kv_head, key), q, scores);
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    const Query& query = queries.rows[r];
    float& score = scores[r][threadIdx.x];
    score = query.seen.has(slot) ? final_score(attention, work.item, query.row, key, score) : negative_infinity();
  }
  return key;
}

// Columns of the tile at slot `tile` that lie in a range of slots.
__device__ inline int first_column(Range seen, int32_t tile) { return seen.begin > tile ? seen.begin - tile : 0; }
__device__ inline int last_column(Range seen, int32_t tile) { return seen.end - tile < kTile ? seen.end - tile : kTile; }

}  // namespace attn::hip
