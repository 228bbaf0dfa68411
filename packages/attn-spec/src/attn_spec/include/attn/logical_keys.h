// Logical keys of contract ordered-v1: the stored keys that a padding mask keeps, in their order.
#pragma once

#include "attn/float_bits.h"

namespace attn {

// Number of logical keys that are stored before `stored`. `positions`: where each of `count` logical keys is stored, ascending; null: each
// in its place.
template <typename Index>
ATTN_HD Index logical_before(const int32_t* positions, Index count, Index stored) {
  if (positions == nullptr) return stored;
  Index low = 0, high = count;
  while (low < high) {
    const Index middle = low + (high - low) / 2;
    if (positions[middle] < stored) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace attn
