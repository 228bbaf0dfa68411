// Prints one line a part of ordered-v1: a hash over its results on generated bit patterns. The text is the same on every processor.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "attn/host/attention.h"
#include "attn/ordered.h"
#include "attn/philox.h"
#include "attn/tile_tree.h"

namespace {

// FNV-1a over 32-bit words.
class Digest {
 public:
  void add(uint32_t word) {
    for (int shift = 0; shift < 32; shift += 8) state_ = (state_ ^ ((word >> shift) & 0xFFu)) * 0x100000001B3ull;
  }
  // The contract fixes where a NaN is, not its payload.
  void add(float value) { add(attn::is_nan(value) ? attn::kQuietNaNBits : attn::float_to_bits(value)); }
  void add(const std::vector<float>& values) {
    for (float value : values) add(value);
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xCBF29CE484222325ull;
};

void print(const char* part, uint64_t digest) { std::printf("%-20s %016" PRIx64 "\n", part, digest); }

uint32_t word(uint32_t stream, uint32_t index) { return attn::philox_word(20260101, stream, index, 0, 0); }

// Values in (-2, 2) with outliers, subnormals and both zeros among them.
std::vector<float> values(uint32_t stream, int64_t count) {
  std::vector<float> found(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = word(stream, static_cast<uint32_t>(i));
    const float plain = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-30f;
    const uint32_t kind = bits & 63u;
    found[i] = kind == 0   ? plain * 64.0f
               : kind == 1 ? attn::bits_to_float(bits & 0x807FFFFFu)
               : kind == 2 ? attn::bits_to_float(bits & 0x80000000u)
                           : plain;
  }
  return found;
}

void scalars() {
  Digest exponential, logarithm, conversion, ternary;
  for (uint32_t i = 0; i < 1u << 20; ++i) {
    const float a = attn::bits_to_float(word(1, i)), b = attn::bits_to_float(word(2, i)), c = attn::bits_to_float(word(3, i));
    exponential.add(attn::exp_nonpositive(a > 0.0f ? -a : a));
    logarithm.add(attn::ln(a < 0.0f ? 1.0f - a : 1.0f + a));
    conversion.add(static_cast<uint32_t>(attn::from_float<attn::bfloat16>(a).bits) << 16 | attn::from_float<attn::float16>(b).bits);
    ternary.add(attn::fma(a, b, c));
    ternary.add(attn::div(a, b));
  }
  print("exp", exponential.value());
  print("ln", logarithm.value());
  print("bfloat16, float16", conversion.value());
  print("fma, division", ternary.value());
}

attn::host::Strides contiguous(int64_t heads, int64_t rows, int64_t columns) {
  return {heads * rows * columns, rows * columns, columns, 1};
}

uint64_t attention(attn::host::Variant variant) {
  constexpr int64_t kBatch = 2, kHeads = 4, kGroups = 2, kQueries = 37, kKeys = 611, kWidth = 40;
  const auto q = values(10, kBatch * kHeads * kQueries * kWidth), dout = values(13, kBatch * kHeads * kQueries * kWidth);
  const auto k = values(11, kBatch * kGroups * kKeys * kWidth), v = values(12, kBatch * kGroups * kKeys * kWidth);
  const auto sinks = values(14, kHeads);
  const auto rows = contiguous(kHeads, kQueries, kWidth), columns = contiguous(kGroups, kKeys, kWidth);

  attn::host::AttentionProblem problem{};
  problem.batch = kBatch, problem.heads = kHeads, problem.kv_heads = kGroups, problem.queries = kQueries, problem.keys = kKeys;
  problem.head_dim = problem.value_dim = kWidth;
  problem.dtype = attn::host::DType::float32;
  problem.q = {q.data(), rows}, problem.k = {k.data(), columns}, problem.v = {v.data(), columns};
  problem.sinks = sinks.data();
  problem.causal = true;
  problem.window_left = 500, problem.window_right = -1;
  problem.scale = 0.158113883f;
  problem.dropout_p = 0.125, problem.dropout_seed = 7;

  std::vector<float> out(q.size()), lse(kBatch * kHeads * kQueries), row_max(lse.size()), row_sum(lse.size());
  attn::host::AttentionForward forward{};
  forward.out = {out.data(), rows}, forward.out_dtype = attn::host::DType::float32;
  forward.lse = lse.data(), forward.row_max = row_max.data(), forward.row_sum = row_sum.data();
  attn::host::attention_forward(problem, forward, 2, variant);

  std::vector<float> dq(q.size()), dk(k.size()), dv(v.size()), dsinks(kHeads);
  attn::host::AttentionBackward backward{};
  backward.dout = {dout.data(), rows}, backward.dout_dtype = attn::host::DType::float32;
  backward.row_max = row_max.data(), backward.row_sum = row_sum.data();
  backward.dq = dq.data(), backward.dk = dk.data(), backward.dv = dv.data(), backward.dsinks = dsinks.data();
  attn::host::attention_backward(problem, backward, 2, variant);

  Digest digest;
  for (const auto* part : {&out, &lse, &dq, &dk, &dv, &dsinks}) digest.add(*part);
  return digest.value();
}

}  // namespace

int main() {
  scalars();
  using attn::host::Variant;
  const uint64_t expected = attention(attn::host::best_variant());
  print("attention", expected);
  for (Variant variant : {Variant::baseline, Variant::avx2, Variant::avx512, Variant::neon}) {
    if (!attn::host::has_variant(variant)) continue;
    const bool equal = attention(variant) == expected;
    std::fprintf(stderr, "variant %s: %s\n", attn::host::variant_name(variant), equal ? "the same bits" : "other bits");
    if (!equal) return 1;
  }
}
