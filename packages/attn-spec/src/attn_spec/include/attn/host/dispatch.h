// Choice of a compiled variant and of the number of threads. For the one translation unit that holds the dispatcher.
#pragma once

#include "attn/host/parallel.h"
#include "attn/host/plan.h"

namespace attn::host {

inline bool is_compiled(Variant variant) {
  switch (variant) {
#if defined(ATTN_HOST_HAS_baseline)
    case Variant::baseline:
      return true;
#endif
#if defined(ATTN_HOST_HAS_avx2)
    case Variant::avx2:
      return true;
#endif
#if defined(ATTN_HOST_HAS_avx512)
    case Variant::avx512:
      return true;
#endif
#if defined(ATTN_HOST_HAS_neon)
    case Variant::neon:
      return true;
#endif
    default:
      return false;
  }
}

inline bool is_executable([[maybe_unused]] Variant variant) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (variant == Variant::avx2) return avx2;
  if (variant == Variant::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
#endif
  return true;
}

inline const Kernels& kernels_of(Variant variant) {
  switch (variant == Variant::automatic ? best_variant() : variant) {
#if defined(ATTN_HOST_HAS_avx2)
    case Variant::avx2:
      return avx2::kernels;
#endif
#if defined(ATTN_HOST_HAS_avx512)
    case Variant::avx512:
      return avx512::kernels;
#endif
#if defined(ATTN_HOST_HAS_neon)
    default:
      return neon::kernels;
#else
    default:
      return baseline::kernels;
#endif
  }
}

// One thread for work (in multiplications) that is done before a second one has started.
inline int threads_for(double work, int threads) { return work < 3e5 ? 1 : std::max(threads, 1); }

// Kept keys of every batch item from a byte mask.
class KeptKeyLists {
 public:
  KeptKeyLists(const uint8_t* mask, int64_t batch, int64_t keys) {
    if (mask == nullptr) return;
    stored_.resize(static_cast<size_t>(batch * keys) + 1);
    counts_.resize(static_cast<size_t>(batch) + 1);
    for (int64_t b = 0; b < batch; ++b) {
      int64_t count = 0;
      for (int64_t j = 0; j < keys; ++j)
        if (mask[b * keys + j] != 0) stored_[static_cast<size_t>(b * keys + count++)] = static_cast<int32_t>(j);
      counts_[static_cast<size_t>(b)] = count;
    }
  }
  KeptKeys view() const { return counts_.empty() ? KeptKeys{nullptr, nullptr} : KeptKeys{stored_.data(), counts_.data()}; }

 private:
  std::vector<int32_t> stored_;
  std::vector<int64_t> counts_;
};

}  // namespace attn::host
