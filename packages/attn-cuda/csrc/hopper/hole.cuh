// A hole in the keys of joint attention: masked keys between the text and the image, side by side, up to a multiple of a segment.
// Source: docs/contracts/sm90-v1.md, section 5.
#pragma once

#include "attention_plan.cuh"
#include "hopper/arithmetic.cuh"

namespace attn_cuda::hopper {

// Stored keys [begin, end) that no row sees; `end` is a multiple of a segment, or the number of keys.
struct Hole {
  int32_t begin, end;
};

constexpr int32_t kNoKey = INT32_MIN;

__device__ __forceinline__ Hole hole_of(const Hole* holes, const Item& item) {
  return holes == nullptr ? Hole{kNoKey, kNoKey} : holes[item.batch];
}

// Tiles [begin, end) of `kTile` keys without those wholly in the hole. Where it lies between others, `jump` is the last one before it, and
// `skipped` tiles follow that are left out.
template <int kTile>
struct TileWalk {
  int32_t begin, end, jump, skipped;

  __device__ __forceinline__ TileWalk(int32_t first, int32_t last, Hole hole) : begin(first), end(last), jump(kNoKey), skipped(0) {
    if (hole.begin == kNoKey) return;
    const int32_t from = (hole.begin + kTile - 1) / kTile, to = (hole.end + kTile - 1) / kTile;
    if (from <= begin) begin = max(begin, to);
    if (to >= end) end = min(end, from);
    if (begin >= end) begin = end = 0;
    if (from > begin && to < end) jump = from - 1, skipped = to - from;
  }

  __device__ __forceinline__ int32_t count() const { return end - begin - skipped; }
  __device__ __forceinline__ int32_t after(int32_t tile) const { return tile + 1 + (tile == jump ? skipped : 0); }
};

// Whether the keys may be masked by a hole: of dense calls whose rows all see the same keys, from position 0.
inline bool may_have_hole(const attn_cuda_attention& problem) {
  return problem.causal == 0 && problem.window_left < 0 && problem.window_right < 0 && problem.kv_lengths == nullptr &&
         problem.q_start == nullptr && problem.k_start == nullptr && problem.cu_seqlens_q == nullptr;
}

inline int64_t hole_bytes(const attn_cuda_attention& problem) {
  return problem.key_mask == nullptr ? 0 : aligned(problem.batch * static_cast<int64_t>(sizeof(Hole)));
}

// The hole of each batch item in the workspace, or null without a mask: from the first masked key to the end of the segment of the last
// one.
int find_holes(const attn_cuda_attention& problem, Workspace& space, void* stream, const Hole** holes);

// The problem without its mask, whose keys stay where they are.
inline attn_cuda_attention with_all_keys(attn_cuda_attention problem) {
  problem.key_mask = nullptr;
  return problem;
}

}  // namespace attn_cuda::hopper
