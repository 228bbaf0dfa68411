// Arrays and build variants as the host kernels take them.
#pragma once

#include <cstdint>

namespace attn::host {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// Element strides of [B, H, S, D] (packed input: batch is unused). Any value is allowed, 0 and negative included.
struct Strides {
  int64_t batch, head, row, column;
};

struct Input {
  const void* data;
  Strides strides;
};

struct Output {
  void* data;
  Strides strides;
};

// One compilation of the kernels. All give the same bits; automatic takes the widest that this CPU runs.
enum class Variant : int32_t { automatic = -1, baseline = 0, avx2 = 1, avx512 = 2, neon = 3 };

// Whether the variant was compiled and this CPU runs it.
bool has_variant(Variant variant);

// The variant that automatic stands for.
Variant best_variant();

const char* variant_name(Variant variant);

// Hash of the sources, flags and compiler of this build.
const char* build_fingerprint();

}  // namespace attn::host
