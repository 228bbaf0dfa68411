// How a scalar instruction reads and writes.
#pragma once

#include "vector.h"

namespace amd {

template <typename T>
void write_scalar(Wave& w, const Operand& operand, T value) {
  if constexpr (sizeof(T) == 8)
    w.set_pair(operand.number, bits_as<uint64_t>(value));
  else
    w.s[operand.number] = bits_as<uint32_t>(value);
}

// A function of scalar sources; `first` is the operand of the first one.
template <typename F, int first, size_t... I>
auto scalar_call(const Wave& w, const Instruction& in, std::index_sequence<I...>) {
  using Arguments = typename Signature<F>::Arguments;
  return F{}(uniform<std::tuple_element_t<I, Arguments>>(w, in.operand[first + I])...);
}

template <typename F, int first>
auto scalar_call(const Wave& w, const Instruction& in) {
  return scalar_call<F, first>(w, in, std::make_index_sequence<Signature<F>::count>{});
}

}  // namespace amd
