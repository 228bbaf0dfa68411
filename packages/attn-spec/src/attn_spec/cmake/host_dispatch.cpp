// The interface of the host kernels: checks, cutting into items, threads, and the choice of a variant.
#include "attn/host/check_attention.h"
#include "attn/host/launch_attention.h"
#include "attn/host/launch_joint.h"
#include "attn/host/launch_sm90.h"

namespace attn::host {

bool has_variant(Variant variant) { return is_compiled(variant) && is_executable(variant); }

Variant best_variant() {
  static const Variant best = [] {
    for (Variant variant : {Variant::avx512, Variant::avx2, Variant::neon})
      if (has_variant(variant)) return variant;
    return Variant::baseline;
  }();
  return best;
}

const char* variant_name(Variant variant) {
  switch (variant) {
    case Variant::avx2:
      return "avx2";
    case Variant::avx512:
      return "avx512";
    case Variant::neon:
      return "neon";
    case Variant::baseline:
      return "baseline";
    default:
      return variant_name(best_variant());
  }
}

const char* build_fingerprint() { return ATTN_HOST_FINGERPRINT; }

}  // namespace attn::host
