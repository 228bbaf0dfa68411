// How a vector instruction reads its sources, runs a function on every lane, and writes what EXEC enables.
#pragma once

#include <array>
#include <tuple>
#include <utility>

#include "table.h"

namespace amd {

// A binary16 value as storage.
struct Half {
  uint16_t bits;
};

inline float to_float(Half value) { return static_cast<float>(bits_as<_Float16>(value.bits)); }
inline Half to_half(float value) { return Half{bits_as<uint16_t>(static_cast<_Float16>(value))}; }

template <typename T>
constexpr Type type_of() {
  if constexpr (std::is_same_v<T, float>)
    return Type::f32;
  else if constexpr (std::is_same_v<T, double>)
    return Type::f64;
  else if constexpr (std::is_same_v<T, Half>)
    return Type::f16;
  else if constexpr (std::is_same_v<T, int64_t>)
    return Type::i64;
  else if constexpr (std::is_same_v<T, uint64_t>)
    return Type::b64;
  else if constexpr (std::is_same_v<T, int16_t>)
    return Type::i16;
  else if constexpr (std::is_same_v<T, uint16_t>)
    return Type::b16;
  else
    return Type::b32;
}

template <typename T>
struct Lanes {
  alignas(64) T x[kLanes];
};

// The lane that each lane reads under DPP, or -1.
int dpp_source(const Instruction& instruction, int lane, uint64_t exec);

// `word` as an SDWA operand selects it.
inline uint32_t part_of(uint32_t word, Part part, bool extend) {
  switch (part) {
    case Part::dword:
      return word;
    case Part::word0:
      return extend ? static_cast<int16_t>(word) : word & 0xFFFFu;
    case Part::word1:
      return extend ? static_cast<int16_t>(word >> 16) : word >> 16;
    default: {
      const uint32_t byte = word >> (8 * (static_cast<int>(part) - static_cast<int>(Part::byte0)));
      return extend ? static_cast<int8_t>(byte) : byte & 0xFFu;
    }
  }
}

template <typename T>
T with_sign(const Operand& operand, T value) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  constexpr Bits sign = Bits(Bits{1} << (8 * sizeof(T) - 1));
  Bits bits = bits_as<Bits>(value);
  if (operand.absolute) bits = Bits(bits & ~sign);
  if (operand.negate) bits = Bits(bits ^ sign);
  return bits_as<T>(bits);
}

// One value that every lane reads: a scalar register or a constant.
template <typename T>
T uniform(const Wave& w, const Operand& operand) {
  uint64_t value = operand.value;
  if (operand.place == Place::scalar) value = sizeof(T) == 8 && operand.count > 1 ? w.pair(operand.number) : w.s[operand.number];
  if (operand.place == Place::scc) value = w.scc;
  T result;
  memcpy(&result, &value, sizeof result);
  return result;
}

// Source `place` of the instruction, lane by lane: the register itself where nothing changes it, else `buffer`.
template <typename T>
const T* source(const Wave& w, const Instruction& in, const Operand& operand, int place, T* buffer) {
  if (operand.place != Place::vector) {
    T value = uniform<T>(w, operand);
    if constexpr (sizeof(T) == 4) {
      if (operand.part != Part::dword) value = bits_as<T>(part_of(bits_as<uint32_t>(value), operand.part, operand.extend));
    }
    if (operand.negate || operand.absolute) value = with_sign(operand, value);
    for (int lane = 0; lane < kLanes; ++lane) buffer[lane] = value;
    return buffer;
  }
  const uint32_t* low = w.v[operand.number];
  const bool permuted = in.dpp != Dpp::none && place == 0;
  if constexpr (sizeof(T) == 4) {
    if (!permuted && operand.part == Part::dword && !operand.negate && !operand.absolute) return reinterpret_cast<const T*>(low);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int from = permuted ? dpp_source(in, lane, w.exec()) : lane;
      const uint32_t word = from < 0 ? 0 : low[from];
      buffer[lane] = with_sign(operand, bits_as<T>(part_of(word, operand.part, operand.extend)));
    }
  } else if constexpr (sizeof(T) == 8) {
    const uint32_t* high = w.v[operand.number + 1];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int from = permuted ? dpp_source(in, lane, w.exec()) : lane;
      buffer[lane] = from < 0 ? T{} : bits_as<T>(static_cast<uint64_t>(high[from]) << 32 | low[from]);
    }
    if (operand.negate || operand.absolute)
      for (int lane = 0; lane < kLanes; ++lane) buffer[lane] = with_sign(operand, buffer[lane]);
  } else {
    const int shift = in.select >> place & 1 ? 16 : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int from = permuted ? dpp_source(in, lane, w.exec()) : lane;
      const uint32_t word = from < 0 ? 0 : part_of(low[from], operand.part, operand.extend);
      buffer[lane] = with_sign(operand, bits_as<T>(static_cast<uint16_t>(word >> shift)));
    }
  }
  return buffer;
}

// The lanes that an instruction writes: EXEC, and under DPP those with a source.
inline uint64_t written(const Wave& w, const Instruction& in) {
  uint64_t mask = w.exec();
  if (in.dpp == Dpp::none) return mask;
  for (int lane = 0; lane < kLanes; ++lane) {
    const bool rows = in.row_mask >> (lane / 16) & 1, banks = in.bank_mask >> (lane % 16 / 4) & 1;
    const bool sourced = in.bound_zero || dpp_source(in, lane, w.exec()) >= 0;
    if (!(rows && banks && sourced)) mask &= ~(uint64_t{1} << lane);
  }
  return mask;
}

inline void write_words(Wave& w, int number, const uint32_t* words, uint64_t mask) {
  uint32_t* to = w.v[number];
  if (mask == ~uint64_t{0}) {
    memcpy(to, words, kLanes * 4);
    return;
  }
  const uint32_t halves[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
  for (int half = 0; half < 2; ++half)
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t chosen = 0u - (halves[half] >> lane & 1u);
      const int at = 32 * half + lane;
      to[at] = (words[at] & chosen) | (to[at] & ~chosen);
    }
}

void write_part(Wave& w, const Instruction& in, const Operand& operand, const uint32_t* words, uint64_t mask);

// clamp and the output multiplier of a binary32 result.
void finish(const Instruction& in, float* values);

template <typename T>
void write(Wave& w, const Instruction& in, const Operand& operand, T* values) {
  if constexpr (std::is_same_v<T, float>) {
    if (in.modifiers & (kClamp | kOutput)) finish(in, values);
  }
  const uint64_t mask = written(w, in);
  if constexpr (sizeof(T) == 4) {
    if (operand.part != Part::dword) return write_part(w, in, operand, reinterpret_cast<const uint32_t*>(values), mask);
    write_words(w, operand.number, reinterpret_cast<const uint32_t*>(values), mask);
  } else if constexpr (sizeof(T) == 8) {
    Lanes<uint32_t> low, high;
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t bits = bits_as<uint64_t>(values[lane]);
      low.x[lane] = static_cast<uint32_t>(bits);
      high.x[lane] = static_cast<uint32_t>(bits >> 32);
    }
    write_words(w, operand.number, low.x, mask);
    write_words(w, operand.number + 1, high.x, mask);
  } else {
    // A 16-bit result clears the other half, unless op_sel puts it there.
    Lanes<uint32_t> words;
    const bool high = in.select >> 3 & 1;
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t bits = bits_as<uint16_t>(values[lane]);
      words.x[lane] = high ? bits << 16 | (w.v[operand.number][lane] & 0xFFFFu) : bits;
    }
    if (operand.part != Part::dword) return write_part(w, in, operand, words.x, mask);
    write_words(w, operand.number, words.x, mask);
  }
}

// The types of a lambda.
template <typename F>
struct Signature : Signature<decltype(&F::operator())> {};
template <typename C, typename R, typename... A>
struct Signature<R (C::*)(A...) const> {
  using Result = R;
  using Arguments = std::tuple<A...>;
  static constexpr size_t count = sizeof...(A);
};

// Runs F on the sources that `at` numbers and returns the results.
template <typename F, typename... A, size_t... I>
void apply(const Wave& w, const Instruction& in, const std::array<int, sizeof...(I)>& at, typename Signature<F>::Result* results,
           std::tuple<A...>*, std::index_sequence<I...>) {
  std::tuple<Lanes<A>...> buffers;
  const std::tuple<const A*...> sources{source<A>(w, in, in.operand[at[I]], I, std::get<I>(buffers).x)...};
  const F function{};
  for (int lane = 0; lane < kLanes; ++lane) results[lane] = function(std::get<I>(sources)[lane]...);
}

template <typename F, int first = 1>
void apply(const Wave& w, const Instruction& in, typename Signature<F>::Result* results) {
  using S = Signature<F>;
  std::array<int, S::count> at{};
  for (size_t i = 0; i < S::count; ++i) at[i] = first + static_cast<int>(i);
  apply<F>(w, in, at, results, static_cast<typename S::Arguments*>(nullptr), std::make_index_sequence<S::count>{});
}

template <typename F>
void run_lanes(Wave& w, const Instruction& in) {
  Lanes<typename Signature<F>::Result> results;
  apply<F>(w, in, results.x);
  write(w, in, in.operand[0], results.x);
}

// The destination is the last source.
template <typename F>
void run_accumulate(Wave& w, const Instruction& in) {
  using S = Signature<F>;
  Lanes<typename S::Result> results;
  std::array<int, S::count> at{};
  for (size_t i = 0; i + 1 < S::count; ++i) at[i] = static_cast<int>(i) + 1;
  apply<F>(w, in, at, results.x, static_cast<typename S::Arguments*>(nullptr), std::make_index_sequence<S::count>{});
  write(w, in, in.operand[0], results.x);
}

template <typename F, typename... A>
std::vector<Type> types_of(std::tuple<A...>*) {
  return {type_of<typename Signature<F>::Result>(), type_of<A>()...};
}

constexpr uint32_t kVectorModifiers = kDpp | kSdwa | kInputs;

// `function` on every lane: destination, sources.
template <typename F>
void each_lane(Table& table, const std::string& mnemonic, F) {
  using S = Signature<F>;
  constexpr bool binary32 = std::is_same_v<typename S::Result, float>;
  constexpr bool half = sizeof(typename S::Result) == 2;
  table.add(mnemonic, {run_lanes<F>, types_of<F>(static_cast<typename S::Arguments*>(nullptr)),
                       kVectorModifiers | (binary32 ? kClamp | kOutput : 0u) | (half ? kSelect : 0u)});
}

template <typename F>
void accumulate(Table& table, const std::string& mnemonic, F) {
  using S = Signature<F>;
  auto types = types_of<F>(static_cast<typename S::Arguments*>(nullptr));
  types.pop_back();
  table.add(mnemonic, {run_accumulate<F>, types, kVectorModifiers | kClamp | kOutput});
}

// 64 flags, each 0 or 1, as a mask.
inline uint64_t mask_of(const uint8_t* flags) {
  uint64_t mask = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t bytes;
    memcpy(&bytes, flags + 8 * i, 8);
    mask |= (bytes * 0x0102040810204080ull) >> 56 << (8 * i);
  }
  return mask;
}

}  // namespace amd
