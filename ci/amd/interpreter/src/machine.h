// The state of one wave of 64 lanes, and one decoded instruction. Names and numbers follow AMD's CDNA instruction set guides.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace amd {

constexpr int kLanes = 64;
constexpr int kVectorRegisters = 512;  // 256 VGPRs, then 256 AGPRs
constexpr int kAccumulator = 256;      // where the AGPRs begin
constexpr int kScalarRegisters = 128;

// Scalar register numbers, as the encodings have them.
constexpr int kFlatScratch = 102;
constexpr int kXnackMask = 104;
constexpr int kVcc = 106;
constexpr int kM0 = 124;
constexpr int kExec = 126;

constexpr uint32_t kPoison = 0x7FA5A5A5u;  // a signalling NaN, and as an address or index far outside of everything

// Where flat addresses mean LDS or scratch, by their upper 32 bits: no host pointer lies there.
constexpr uint64_t kSharedAperture = 0x0001000000000000ull, kPrivateAperture = 0x0002000000000000ull;
// Upper bits of the base of the private segment's buffer resource (gfx90a): no host pointer lies there either.
constexpr uint32_t kPrivateResourceHigh = 0xAAAA;

// An instruction that breaks a rule of the interpreter. What it says names the instruction and its address.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Type : uint8_t { b32, b64, i64, f16, f32, f64, b16, i16 };

enum class Place : uint8_t { none, vector, scalar, constant, scc };

// Part of a 32-bit register that an SDWA operand reads or writes.
enum class Part : uint8_t { dword, word0, word1, byte0, byte1, byte2, byte3 };

struct Operand {
  Place place = Place::none;
  Part part = Part::dword;
  bool negate = false, absolute = false, extend = false;
  uint16_t number = 0;  // of the first register
  uint16_t count = 1;   // of registers
  uint64_t value = 0;   // a constant, as the bits that the instruction's type reads
};

enum class Fill : uint8_t { all, low_half, high_half };

// How one lane's registers and its bytes in memory correspond.
struct Shape {
  uint8_t words = 1, bytes = 4;  // registers, bytes of each
  bool is_signed = false;
  Fill fill = Fill::all;  // the part of a register that a load writes, or that a store reads
};

struct Wave;
struct Instruction;
using Handler = void (*)(Wave&, const Instruction&);

enum Modifier : uint32_t {
  kClamp = 1,
  kOutput = 2,  // mul:2, mul:4, div:2
  kSelect = 4,  // op_sel, op_sel_hi, neg_lo, neg_hi
  kDpp = 8,
  kSdwa = 16,
  kOffset = 32,
  kOffset2 = 64,  // offset0, offset1
  kCache = 128,   // glc, slc, sc0, sc1, nt
  kBuffer = 256,  // offen, idxen
  kToLds = 512,
  kTruth = 1024,   // bitop3
  kInputs = 2048,  // a sign or an absolute value on a source
};

enum class Dpp : uint8_t {
  none,
  quad_perm,
  row_shl,
  row_shr,
  row_ror,
  wave_shl,
  wave_rol,
  wave_shr,
  wave_ror,
  row_mirror,
  row_half_mirror,
  row_bcast15,
  row_bcast31,
  row_newbcast
};

struct Instruction {
  Handler run = nullptr;
  uint32_t modifiers = 0;
  uint8_t operands = 0;
  Operand operand[6];
  float output_scale = 1.0f;
  uint8_t select = 0, select_high = 0xFF, negate_low = 0, negate_high = 0;  // one bit a source
  Dpp dpp = Dpp::none;
  uint8_t dpp_argument = 0, row_mask = 0xF, bank_mask = 0xF;
  bool bound_zero = false;
  bool keep_unused = false;  // SDWA: dst_unused:UNUSED_PRESERVE
  uint8_t truth = 0;
  Shape shape;
  int32_t offset = 0, offset2 = 0;
  bool offen = false, idxen = false;
  uint32_t word[2] = {0, 0};
  uint64_t address = 0;
  uint32_t target = 0;  // of a branch: the number of the instruction
  uint32_t bytes = 4;
  uint32_t name = 0;  // of the mnemonic in the program's table
  std::string text;
};

struct Program;
struct Workgroup;

enum class Status : uint8_t { running, barrier, ended };

struct Wave {
  alignas(64) uint32_t v[kVectorRegisters][kLanes];
  alignas(8) uint32_t s[kScalarRegisters];
  bool scc = false;
  uint32_t pc = 0;  // number of the next instruction
  Status status = Status::running;
  uint32_t id = 0;  // within its workgroup
  const Program* program = nullptr;
  Workgroup* group = nullptr;
  std::vector<uint8_t> scratch;  // lane by lane
  uint32_t scratch_bytes = 0;    // of one lane

  uint64_t pair(int number) const {
    uint64_t value;
    memcpy(&value, &s[number], 8);
    return value;
  }
  void set_pair(int number, uint64_t value) { memcpy(&s[number], &value, 8); }
  uint64_t exec() const { return pair(kExec); }
  uint64_t vcc() const { return pair(kVcc); }
};

// What a workgroup shares.
struct Workgroup {
  std::vector<uint8_t> lds;
  // Of each 4 bytes of LDS since the last barrier: the waves that wrote and read them, and which of the bytes; a bit each.
  struct Access {
    uint32_t phase = 0;
    uint16_t writers = 0, readers = 0;
    uint8_t written = 0, read = 0;
  };
  std::vector<Access> accesses;
  uint32_t phase = 1;
  uint32_t id[3] = {0, 0, 0};
};

[[noreturn]] void fail(const Instruction& instruction, const std::string& what);

template <typename To, typename From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

}  // namespace amd
