// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) and the dropout decision of the contracts.
#pragma once

#include "attn/float_bits.h"

namespace attn {

// Word 0 of Philox4x32-10 for a 64-bit key and four counter words.
ATTN_HD uint32_t philox_word(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// Dropout of one pair: kept iff the Philox word reaches floor(p * 2^32).
struct Dropout {
  uint64_t seed;
  uint64_t threshold;  // 0: no dropout
  float keep_scale;    // 1 / (1 - p), 0 for p = 1
};

// The same on every backend: both numbers come from binary64.
inline Dropout make_dropout(double p, uint64_t seed) {
  return Dropout{seed, static_cast<uint64_t>(p * 4294967296.0), p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f};
}

ATTN_HD bool keeps(const Dropout& dropout, uint32_t batch, uint32_t head, uint32_t query, uint32_t key) {
  return static_cast<uint64_t>(philox_word(dropout.seed, batch, head, query, key)) >= dropout.threshold;
}

}  // namespace attn
