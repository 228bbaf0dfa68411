// Checks of the values that only the kernels read: offsets, lengths and positions.
#pragma once

#include <limits>

#include "attn/host/attention.h"

namespace attn::host {

inline const char* check_segments(const int64_t* offsets, const int64_t* used, int64_t segments, int64_t total) {
  if (offsets[0] < 0 || offsets[segments] > total) return "packed offsets must lie within the packed array";
  for (int64_t b = 0; b < segments; ++b) {
    if (offsets[b + 1] < offsets[b]) return "packed offsets must not decrease";
    if (used != nullptr && (used[b] < 0 || used[b] > offsets[b + 1] - offsets[b]))
      return "used lengths must lie between 0 and the segment sizes";
  }
  return nullptr;
}

const char* check_attention(const AttentionProblem& problem) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  // Positions first .. first + count - 1 fit 32 bits.
  const auto in_range = [](int64_t first, int64_t count) { return count == 0 || (first >= -limit - 1 && first + count - 1 <= limit); };
  if (problem.queries > limit || problem.keys > limit) return "queries and keys must stay below 2^31";
  if (problem.kv_heads <= 0 || problem.heads % problem.kv_heads != 0) return "heads must be a multiple of kv_heads";
  if (problem.cu_seqlens_q != nullptr || problem.cu_seqlens_k != nullptr) {
    if (problem.cu_seqlens_q == nullptr || problem.cu_seqlens_k == nullptr) return "packed input needs cu_seqlens_q and cu_seqlens_k";
    if (problem.query_mask || problem.key_mask || problem.kv_lengths || problem.q_start || problem.k_start || problem.bias)
      return "packed input takes no masks, kv_lengths, q_start, k_start or bias";
    if (const char* reason = check_segments(problem.cu_seqlens_q, problem.seqlens_q, problem.batch, problem.queries)) return reason;
    return check_segments(problem.cu_seqlens_k, problem.seqlens_k, problem.batch, problem.keys);
  }
  for (int64_t b = 0; b < problem.batch; ++b) {
    const int64_t keys = problem.kv_lengths ? problem.kv_lengths[b] : problem.keys, k_start = problem.k_start ? problem.k_start[b] : 0;
    if (keys < 0 || keys > problem.keys) return "kv_lengths must lie between 0 and the number of keys";
    if (k_start < 0) return "k_start must not be negative";
    if (!in_range(k_start, problem.keys)) return "key positions must stay below 2^31";
    const int64_t q_start = problem.q_start ? problem.q_start[b] : k_start + keys - problem.queries;
    if (!in_range(q_start, problem.queries)) return "query positions must stay within the 32-bit range";
  }
  return nullptr;
}

}  // namespace attn::host
