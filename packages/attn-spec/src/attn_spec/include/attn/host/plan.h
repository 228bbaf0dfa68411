// What the dispatcher hands to the kernels of one variant: a call, cut into blocks of rows, and scratch. Plain data, the same for every
// variant.
#pragma once

#include "attn/host/attention.h"
#include "attn/host/joint.h"
#include "attn/host/sm90.h"
#include "attn/ordered_v2.h"
#include "attn/philox.h"

namespace attn::host {

// Keys that a mask keeps: stored[batch * keys + l] is the stored index of logical key l. Null pointers: every key.
struct KeptKeys {
  const int32_t* stored;
  const int64_t* counts;
};

// Rows [begin, end) of one kv head. A row is (head in its group, query), flattened, which is the order of the chains of dk and dv.
struct RowBlock {
  int64_t batch, kv_head, begin, end;
};

// Floats for one thread, handed out in cache lines. With a null base it only counts.
struct Arena {
  float* base;
  int64_t used = 0;

  ATTN_HD float* take(int64_t floats) {
    float* taken = base == nullptr ? nullptr : base + used;
    used += (floats + 15) / 16 * 16;
    return taken;
  }
};

constexpr int64_t kWidestLanes = 16;

ATTN_HD int64_t padded(int64_t count) { return (count + kWidestLanes - 1) / kWidestLanes * kWidestLanes; }

// Floats between the rows of a buffer of scores. The extra cache line keeps equal slots of many rows out of the same cache sets.
ATTN_HD int64_t score_row(int64_t tiles) { return tiles * kTile + kWidestLanes; }

// Scratch of one block of rows: `rows` x `tiles` tiles of scores, and the operands of one tile.
struct BlockScratch {
  float *q, *dout;                // rows [rows][padded width]
  float *q_panels, *dout_panels;  // the same as right operands
  float *scores, *products;       // [rows][score_row(tiles)]: P, and dP then dS
  float* tile;                    // [kTile][padded width]: rows of k or v
  float *k_panels, *v_panels;
  float* sums;     // [rows][padded width]: out or dq
  float *dk, *dv;  // [tiles * kTile][padded width]
  bool* kept;      // [tiles * kTile]: dropout of one row

  ATTN_HD BlockScratch(Arena& arena, int64_t rows, int64_t tiles, int64_t head_dim, int64_t value_dim, bool backward, bool keys) {
    const int64_t d = padded(head_dim), v = padded(value_dim), widest = d > v ? d : v;
    q = arena.take(rows * d);
    scores = arena.take(rows * score_row(tiles));
    tile = arena.take(kTile * widest);
    k_panels = arena.take(kTile * d);
    v_panels = arena.take(kTile * v);
    sums = arena.take(rows * widest);
    dout = backward ? arena.take(rows * v) : nullptr;
    products = backward ? arena.take(rows * score_row(tiles)) : nullptr;
    kept = backward ? reinterpret_cast<bool*>(arena.take(tiles * kTile / static_cast<int64_t>(sizeof(float)))) : nullptr;
    q_panels = keys ? arena.take(rows * d) : nullptr;
    dout_panels = keys ? arena.take(rows * v) : nullptr;
    dk = keys ? arena.take(tiles * kTile * d) : nullptr;
    dv = keys ? arena.take(tiles * kTile * v) : nullptr;
  }
};

// One attention call. `row_limit` and `tile_limit` bound every block; delta and dsink hold a float for each row of LSE.
struct AttentionCall {
  AttentionProblem problem;
  KeptKeys kept;
  Dropout dropout;
  const RowBlock* blocks;
  int64_t row_limit, tile_limit;
  AttentionForward forward;
  AttentionBackward backward;
  float* delta;
  float* dsink;
};

// One part of the backward of one kv head. Row blocks [first_block, last_block) are swept in order over key tiles [first_tile, last_tile).
struct BackwardPart {
  int64_t first_block, last_block;
  int64_t first_tile, last_tile;
  bool rows;  // compute delta, dsink and dq (needs every tile); otherwise delta is read
  bool keys;  // compute dk and dv (needs every block of the kv head)
};

// How dbias is cut into items (bias_gradient).
struct BiasBlocks {
  static constexpr int64_t kKeys = 512;
  int64_t items, queries, keys;

  ATTN_HD explicit BiasBlocks(const AttentionCall& call) {
    const int64_t* shape = call.backward.dbias_shape;
    queries = shape[2] == 1 ? 1 : (shape[2] + call.row_limit - 1) / call.row_limit;
    keys = shape[3] == 1 ? 1 : (shape[3] + kKeys - 1) / kKeys;
    items = shape[0] * shape[1] * queries * keys;
  }
};

struct SoftmaxCall {
  SoftmaxProblem problem;
  KeptKeys kept;
  SoftmaxForward forward;
  SoftmaxBackward backward;
  int64_t tile_limit;
};

// `row_limit` bounds the rows that are read at once.
struct ProductCall {
  Product product;
  int64_t row_limit;
};

struct ProductScratch {
  float* wide;    // [rows][padded width]: rows of width W
  float* tile;    // [rows][score_row(1)]: rows of one tile of keys
  float* right;   // [kTile][padded width]: keys
  float* panels;  // the right operand
  float* sums;    // [kTile][padded width]

  ATTN_HD ProductScratch(Arena& arena, int64_t rows, int64_t width) {
    wide = arena.take(rows * padded(width));
    tile = arena.take(rows * score_row(1));
    right = arena.take(kTile * padded(width));
    panels = arena.take((rows > kTile ? rows : kTile) * padded(width));
    sums = arena.take(kTile * padded(width));
  }
};

// One call of sm90-v1. `row_limit` bounds every block; origin, delta and dsink hold a float for each row of LSE.
struct Sm90Call {
  AttentionCall call;
  Sm90Options options;
  Sm90Forward forward;
  Sm90Backward backward;
  float* origin;
  float* delta;
  float* dsink;
};

// One tile of keys of one kv head.
struct Sm90KeyTile {
  int64_t batch, kv_head, tile;
};

// Rows of half operands in binary32 and their exponents.
struct Sm90Operands {
  float* values;
  int32_t* exponents;

  ATTN_HD Sm90Operands(Arena& arena, int64_t count) : values(arena.take(count)), exponents(reinterpret_cast<int32_t*>(arena.take(count))) {}
};

// Sizes of Sm90Chain in whole steps and groups of lanes, and its scratch.
struct Sm90ChainScratch {
  int64_t terms, columns;
  Sm90Operands a, b;  // [terms], [terms][columns]
  float* c;           // [columns]

  ATTN_HD Sm90ChainScratch(Arena& arena, const Sm90Chain& chain)
      : terms((chain.terms + 15) / 16 * 16), columns((chain.columns + 63) / 64 * 64), a(arena, terms), b(arena, terms * columns) {
    c = arena.take(columns);
  }
};

// Scratch of one block of rows over tiles of `tile` keys.
struct Sm90Scratch {
  Sm90Operands q, dout;                // [rows][D]
  Sm90Operands keys, values;           // [D][tile]: columns of k and v
  Sm90Operands rows_of_keys, weights;  // [tile][D]: rows of v or k; [16][tile] and its transpose
  Sm90Operands columns;                // [tile][16]
  float *scores, *products;            // [16][tile]
  float *state, *run;                  // [rows][D + 16]: O, classes and n of the segment; O, l and n of the row
  float *dk, *dv;                      // [tile][D]

  ATTN_HD Sm90Scratch(Arena& arena, int64_t rows, int64_t tile, int64_t d)
      : q(arena, rows * d),
        dout(arena, rows * d),
        keys(arena, tile * d),
        values(arena, tile * d),
        rows_of_keys(arena, tile * d),
        weights(arena, 16 * tile),
        columns(arena, 16 * tile) {
    scores = arena.take(16 * tile);
    products = arena.take(16 * tile);
    state = arena.take(rows * (d + 16));
    run = arena.take(rows * (d + 16));
    dk = arena.take(tile * d);
    dv = arena.take(tile * d);
  }
};

// Entry points of one variant. Every one computes one independent item; scratch is sized by the structs above.
struct Kernels {
  void (*attention_forward)(const AttentionCall& call, const RowBlock& block, float* scratch);
  void (*attention_backward)(const AttentionCall& call, const BackwardPart& part, float* scratch);
  void (*bias_gradient)(const AttentionCall& call, int64_t item, float* scratch);
  void (*softmax_forward)(const SoftmaxCall& call, int64_t row, float* scratch);
  void (*softmax_backward)(const SoftmaxCall& call, int64_t row, float* scratch);
  void (*softmax_v2_forward)(const SoftmaxCall& call, int64_t row, float* scratch);
  void (*softmax_v2_backward)(const SoftmaxCall& call, int64_t row, float* scratch);
  void (*sm90_chain)(const Sm90Chain& chain, int64_t row, float* scratch);
  void (*sm90_forward)(const Sm90Call& call, const RowBlock& block, float* scratch);
  void (*sm90_row_sums)(const Sm90Call& call, const RowBlock& block, float* scratch);
  void (*sm90_query_gradient)(const Sm90Call& call, const RowBlock& block, float* scratch);
  void (*sm90_key_gradients)(const Sm90Call& call, const Sm90KeyTile& part, float* scratch);
  void (*product_over_width)(const ProductCall& call, const RowBlock& block, float* scratch);
  void (*product_over_keys)(const ProductCall& call, const RowBlock& block, float* scratch);
  void (*product_over_queries)(const ProductCall& call, int64_t item, float* scratch);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace neon {
extern const Kernels kernels;
}

}  // namespace attn::host
