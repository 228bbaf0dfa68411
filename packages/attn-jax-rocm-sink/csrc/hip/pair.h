// Values of one pair of a query row and a key.
#pragma once

#include "geometry.h"

namespace attn::hip {

// A query row as its pairs need it.
struct Query {
  Row row;
  Range seen;  // slots or stored keys, as the kernel counts them
  RowState state;
  float delta;
};

// Final score of a visible pair from its chain.
__device__ inline float final_score(const Attention& attention, const Item& item, const Row& row, int64_t key, float chain) {
  const float scaled = mul(chain, attention.scale);
  const auto* bias = static_cast<const float*>(attention.tensors.bias);
  if (bias == nullptr) return scaled;
  const Strides& strides = attention.bias_strides;
  return add(scaled, bias[item.batch * strides.batch + row.head * strides.head + row.query * strides.row + key * strides.column]);
}

// Whether dropout keeps a pair.
__device__ inline bool is_kept(const Attention& attention, const Item& item, const Row& row, int64_t key) {
  Dropout dropout = attention.dropout;
  if (dropout.threshold == 0) return true;
  const uint32_t* words = attention.tensors.dropout_seed;
  dropout.seed = static_cast<uint64_t>(words[1]) << 32 | words[0];
  const uint32_t batch = words[2] + static_cast<uint32_t>(item.batch), head = words[3] + static_cast<uint32_t>(row.head);
  return keeps(dropout, batch, head, static_cast<uint32_t>(row.query), static_cast<uint32_t>(key));
}

// P or dS of a masked pair, which has no term. No other value has these bits, by the zero rule and because P is not negative.
constexpr uint32_t kMaskedBits = 0x80000000u;

__device__ inline float masked() { return bits_to_float(kMaskedBits); }
__device__ inline bool is_masked(float value) { return float_to_bits(value) == kMaskedBits; }

// One pair from its final score, which is -inf when it is masked.
struct Pair {
  float p;
  bool kept;

  __device__ Pair(const Attention& attention, const Item& item, const Query& query, int64_t key, float score) {
    const bool is_visible = score != negative_infinity();
    p = is_visible ? probability(score, query.state) : masked();
    kept = !is_visible || is_kept(attention, item, query.row, key);
  }

  // The factor of v and of dO.
  __device__ float dropped(const Attention& attention) const {
    if (attention.dropout.threshold == 0 || is_masked(p)) return p;
    return kept ? mul(p, attention.dropout.keep_scale) : masked();
  }

  // dP from its chain.
  __device__ float upstream(const Attention& attention, float chain) const {
    if (attention.dropout.threshold == 0) return chain;
    return kept ? mul(chain, attention.dropout.keep_scale) : 0.0f;
  }

  // The term of delta, and dS.
  __device__ float product(const Attention& attention, float chain) const {
    return is_masked(p) ? 0.0f : mul(p, upstream(attention, chain));
  }
  __device__ float gradient(const Attention& attention, float chain, float delta) const {
    return is_masked(p) ? masked() : score_gradient(p, upstream(attention, chain), delta);
  }
};

}  // namespace attn::hip
