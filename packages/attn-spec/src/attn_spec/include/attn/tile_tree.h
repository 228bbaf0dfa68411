// The halves tree over one tile of 256 slots: slot i meets slot i + half, half = 128, 64, ..., 1.
#pragma once

#include "attn/ordered.h"

namespace attn {

// Both destroy slots[0..255]; the loops run over independent elements, so a compiler may vectorise them.
ATTN_HD float tree_sum(float* slots) {
  for (int half = kTile / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) slots[i] = add(slots[i], slots[i + half]);
  return slots[0];
}

ATTN_HD float tree_max(float* slots) {
  for (int half = kTile / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) slots[i] = max_nan(slots[i], slots[i + half]);
  return slots[0];
}

}  // namespace attn
