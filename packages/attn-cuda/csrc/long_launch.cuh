// Blocks of the softmax of ordered-v2.
#pragma once

#include "long_tile.cuh"
#include "softmax_launch.cuh"

namespace attn_cuda {

// Most warps of a block that is a team, each with a tile in its registers; two of them on an SM leave 64 registers a thread forward for
// halves and 80 for binary32.
template <typename In>
constexpr int kLongWarps = sizeof(In) == sizeof(float) ? 12 : 16;
constexpr int kLongWideBlocks = 2;
constexpr int kLongBackwardWarps = 8;  // with P and dP: 128 registers
constexpr int kLongBackwardWideBlocks = 2;
constexpr int kLongBackwardNarrowBlocks = 3;
constexpr int kLongNarrowBlocks = 3;
constexpr int kLongChunk = 512;  // tiles whose states a block holds at a time

// A warp for every tile of a row, up to `most`; `staged`: the row stays in their registers. The choice moves no bit.
inline Block long_block(int64_t keys, int most) {
  const int64_t tiles = (keys + kLongTile - 1) / kLongTile;
  if (tiles <= 1) return Block{kNarrowThreads, kNarrowThreads / kLanes, false, true, 0};
  const bool resident = tiles <= most;
  return Block{static_cast<int>(resident ? tiles : most) * kLanes, 1, true, resident, 0};
}

}  // namespace attn_cuda
