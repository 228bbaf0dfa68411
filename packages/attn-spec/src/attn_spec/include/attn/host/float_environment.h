// The floating-point control register of the calling thread: default while the object lives (nearest even, subnormals kept), then as
// before.
#pragma once

#include <cstdint>

namespace attn::host {

class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() : saved_(get()) { set(kDefault); }
  ~DefaultFloatEnvironment() { set(saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kDefault = 0x1F80;  // MXCSR: exceptions masked
  static Register get() { return __builtin_ia32_stmxcsr(); }
  static void set(Register value) { __builtin_ia32_ldmxcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kDefault = 0;  // FPCR
  static Register get() {
    Register value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(Register value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
#error "attn host kernels: the floating-point control register of this processor is not known"
#endif
  Register saved_;
};

}  // namespace attn::host
