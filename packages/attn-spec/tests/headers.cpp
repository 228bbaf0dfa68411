// C entry points over the contract headers, compiled by the tests.
#include <cstdint>

#include "attn/float_bits.h"
#include "attn/logical_keys.h"
#include "attn/ordered.h"
#include "attn/philox.h"
#include "attn/sm90.h"
#include "attn/tile_tree.h"

extern "C" {

void half_to_float(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::to_float(attn::float16{in[i]});
}

void brain_to_float(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::to_float(attn::bfloat16{in[i]});
}

void float_to_half(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::from_float<attn::float16>(in[i]).bits;
}

void float_to_brain(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::from_float<attn::bfloat16>(in[i]).bits;
}

void exp_all(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::exp_nonpositive(in[i]);
}

void ln_all(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::ln(in[i]);
}

void merge_all(const float* max_a, const float* sum_a, const float* max_b, const float* sum_b, float* max, float* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const attn::RowState state = attn::merge({max_a[i], sum_a[i]}, {max_b[i], sum_b[i]});
    max[i] = state.max;
    sum[i] = state.sum;
  }
}

void gradient_all(const float* p, const float* dp, const float* delta, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::score_gradient(p[i], dp[i], delta[i]);
}

void ex2_all(const float* in, const float* table, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::sm90::ex2(in[i], table);
}

// One tensor-core step of bfloat16 operands: a and b are [n][16].
void step_all(const float* c, const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = attn::sm90::tensor_step(c[i], a + 16 * i, 1, b + 16 * i, 1, -126);
}

int32_t keys_before(const int32_t* positions, int32_t count, int32_t stored) { return attn::logical_before(positions, count, stored); }

float lse(float max, float sum) { return attn::log_sum_exp({max, sum}); }

float sum_of_tile(float* slots) { return attn::tree_sum(slots); }

float max_of_tile(float* slots) { return attn::tree_max(slots); }

uint32_t philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) { return attn::philox_word(seed, c0, c1, c2, c3); }

}  // extern "C"
