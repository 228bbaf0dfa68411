// Decodes by text: llvm-objdump knows every encoding of every generation, and this file turns what it prints into instructions.
#include <cstdio>
#include <cstdlib>

#include "memory.h"
#include "program.h"
#include "table.h"
#include "vector.h"

namespace amd {
namespace {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : text) {
    depth += (c == '[' || c == '(') - (c == ']' || c == ')');
    if (c == at && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

// v0, v[0:3], s5, s[2:3]: the letters are `prefix`.
bool registers(const std::string& text, const std::string& prefix, Operand& operand, int base) {
  if (!starts(text, prefix.c_str()) || text.size() <= prefix.size()) return false;
  const char* at = text.c_str() + prefix.size();
  char* end = nullptr;
  if (*at == '[') {
    const long first = std::strtol(at + 1, &end, 10), last = *end == ':' ? std::strtol(end + 1, &end, 10) : first;
    if (*end != ']') return false;
    operand.number = base + first;
    operand.count = last - first + 1;
    return true;
  }
  if (*at < '0' || *at > '9') return false;
  operand.number = base + std::strtol(at, &end, 10);
  operand.count = 1;
  return *end == 0;
}

bool named(const std::string& text, Operand& operand) {
  static const struct {
    const char* name;
    uint16_t number, count;
  } kNamed[] = {{"vcc", kVcc, 2},
                {"vcc_lo", kVcc, 1},
                {"vcc_hi", kVcc + 1, 1},
                {"exec", kExec, 2},
                {"exec_lo", kExec, 1},
                {"exec_hi", kExec + 1, 1},
                {"m0", kM0, 1},
                {"flat_scratch", kFlatScratch, 2},
                {"flat_scratch_lo", kFlatScratch, 1},
                {"flat_scratch_hi", kFlatScratch + 1, 1},
                {"xnack_mask", kXnackMask, 2},
                {"xnack_mask_lo", kXnackMask, 1},
                {"xnack_mask_hi", kXnackMask + 1, 1}};
  for (const auto& known : kNamed) {
    if (text != known.name) continue;
    operand.number = known.number;
    operand.count = known.count;
    return true;
  }
  return false;
}

uint64_t constant(const std::string& text, Type type) {
  char* end = nullptr;
  const bool wide = type == Type::b64 || type == Type::i64 || type == Type::f64;
  const bool narrow = type == Type::f16 || type == Type::b16 || type == Type::i16;
  if (text.find('.') != std::string::npos) {
    const double value = std::strtod(text.c_str(), &end);
    if (*end) throw Refused("operand " + text);
    if (wide) return bits_as<uint64_t>(value);
    if (narrow) return to_half(static_cast<float>(value)).bits;
    return bits_as<uint32_t>(std::strtof(text.c_str(), nullptr));
  }
  const bool literal = starts(text, "0x");
  const int64_t value = std::strtoll(text.c_str(), &end, 0);
  if (end == text.c_str() || *end) throw Refused("operand " + text);
  if (!literal) return wide ? static_cast<uint64_t>(value) : static_cast<uint32_t>(value);
  if (type == Type::f64) return static_cast<uint64_t>(value) << 32;
  if (type == Type::i64) return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(value)));
  return static_cast<uint64_t>(value);
}

Operand parse_operand(std::string text, Type type) {
  Operand operand;
  const auto wrapped = [&](const char* before, const char* after) {
    const size_t left = strlen(before), right = strlen(after);
    if (!starts(text, before) || text.size() < left + right || text.compare(text.size() - right, right, after) != 0) return false;
    text = text.substr(left, text.size() - left - right);
    return true;
  };
  if (text.size() > 1 && text[0] == '-' && (text[1] < '0' || text[1] > '9')) {
    operand.negate = true;
    text.erase(0, 1);
  }
  if (wrapped("neg(", ")")) operand.negate = true;
  if (wrapped("|", "|") || wrapped("abs(", ")")) operand.absolute = true;
  if (wrapped("sext(", ")")) operand.extend = true;
  wrapped("lit(", ")");  // a literal whose value an inline constant would have had

  if (registers(text, "v", operand, 0) || registers(text, "a", operand, kAccumulator)) {
    operand.place = Place::vector;
    if (operand.number + operand.count > kVectorRegisters) throw Refused("register " + text);
  } else if (registers(text, "s", operand, 0) || registers(text, "ttmp", operand, 108) || named(text, operand)) {
    operand.place = Place::scalar;
    if (operand.number + operand.count > kScalarRegisters) throw Refused("register " + text);
  } else if (text == "src_scc" || text == "scc") {
    operand.place = Place::scc;
  } else if (text == "off") {
    operand.place = Place::none;
  } else {
    operand.place = Place::constant;
    if (text == "src_shared_base" || text == "src_private_base") {
      if (type != Type::b64 && type != Type::i64) throw Refused("operand " + text + " read as 32 bits");
      operand.value = text == "src_shared_base" ? kSharedAperture : kPrivateAperture;
    } else {
      operand.value = constant(text, type);
    }
  }
  return operand;
}

uint8_t bits_of(const std::string& list) {
  uint8_t bits = 0;
  int place = 0;
  for (char c : list)
    if (c == '0' || c == '1') bits |= (c == '1') << place++;
  return bits;
}

Part part_named(const std::string& name) {
  static const char* kNames[] = {"DWORD", "WORD_0", "WORD_1", "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3"};
  for (int i = 0; i < 7; ++i)
    if (name == kNames[i]) return static_cast<Part>(i);
  throw Refused("selection " + name);
}

void parse_modifier(Instruction& in, const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon), value = colon == std::string::npos ? "" : text.substr(colon + 1);
  const auto number = [&] { return static_cast<int32_t>(std::strtol(value.c_str(), nullptr, 0)); };
  static const std::unordered_map<std::string, Dpp> kDppNames = {
      {"quad_perm", Dpp::quad_perm},      {"row_shl", Dpp::row_shl},
      {"row_shr", Dpp::row_shr},          {"row_ror", Dpp::row_ror},
      {"wave_shl", Dpp::wave_shl},        {"wave_rol", Dpp::wave_rol},
      {"wave_shr", Dpp::wave_shr},        {"wave_ror", Dpp::wave_ror},
      {"row_mirror", Dpp::row_mirror},    {"row_half_mirror", Dpp::row_half_mirror},
      {"row_newbcast", Dpp::row_newbcast}};
  if (const auto dpp = kDppNames.find(name); dpp != kDppNames.end()) {
    in.modifiers |= kDpp;
    in.dpp = dpp->second;
    if (in.dpp == Dpp::quad_perm) {
      int place = 0;
      for (char c : value)
        if (c >= '0' && c <= '3') in.dpp_argument |= (c - '0') << (2 * place++);
    } else if (!value.empty()) {
      in.dpp_argument = number();
    }
  } else if (name == "row_bcast") {
    in.modifiers |= kDpp;
    in.dpp = number() == 15 ? Dpp::row_bcast15 : Dpp::row_bcast31;
  } else if (name == "row_mask") {
    in.row_mask = number();
  } else if (name == "bank_mask") {
    in.bank_mask = number();
  } else if (name == "bound_ctrl") {
    in.bound_zero = true;  // printed only where the bit is set
  } else if (name == "dst_sel") {
    in.modifiers |= kSdwa;
    in.operand[0].part = part_named(value);
  } else if (name == "dst_unused") {
    in.keep_unused = value == "UNUSED_PRESERVE";
    in.operand[0].extend = value == "UNUSED_SEXT";
  } else if (name == "src0_sel" || name == "src1_sel") {
    in.modifiers |= kSdwa;
    // A comparison has no dst_sel, and its mask is operand 0 as well.
    in.operand[name == "src0_sel" ? 1 : 2].part = part_named(value);
  } else if (name == "op_sel") {
    in.modifiers |= kSelect;
    in.select = bits_of(value);
  } else if (name == "op_sel_hi") {
    in.modifiers |= kSelect;
    in.select_high = bits_of(value);
  } else if (name == "neg_lo") {
    in.modifiers |= kSelect;
    in.negate_low = bits_of(value);
  } else if (name == "neg_hi") {
    in.modifiers |= kSelect;
    in.negate_high = bits_of(value);
  } else if (name == "clamp") {
    in.modifiers |= kClamp;
  } else if (name == "mul" || name == "div") {
    in.modifiers |= kOutput;
    in.output_scale = name == "div" ? 0.5f : static_cast<float>(number());
  } else if (name == "offset" || name == "offset0") {
    in.modifiers |= name == "offset" ? kOffset : kOffset2;
    in.offset = starts(value, "swizzle") ? in.word[0] & 0xFFFF : number();
  } else if (name == "offset1") {
    in.modifiers |= kOffset2;
    in.offset2 = number();
  } else if (name == "glc" || name == "slc" || name == "dlc" || name == "sc0" || name == "sc1" || name == "nt" || name == "scc") {
    in.modifiers |= kCache;
  } else if (name == "offen" || name == "idxen") {
    in.modifiers |= kBuffer;
    (name == "offen" ? in.offen : in.idxen) = true;
  } else if (name == "lds") {
    in.modifiers |= kToLds;
  } else if (name == "bitop3") {
    in.modifiers |= kTruth;
    in.truth = number();
  } else {
    throw Refused("modifier " + text);
  }
}

void refuse(Wave&, const Instruction& in) { fail(in, "no such instruction in the interpreter"); }

void decode(Instruction& in, std::string mnemonic, const std::string& rest) {
  const Entry* entry = table().find(mnemonic);
  if (entry == nullptr) {
    for (const char* suffix : {"_e32", "_e64", "_sdwa", "_dpp"}) {
      const size_t length = strlen(suffix);
      if (mnemonic.size() > length && mnemonic.compare(mnemonic.size() - length, length, suffix) == 0)
        mnemonic.resize(mnemonic.size() - length);
    }
    entry = table().find(mnemonic);
  }
  if (entry == nullptr) throw Refused("mnemonic " + mnemonic);
  in.run = entry->run;
  in.shape = entry->shape;
  if (entry->plain_text) return;
  auto tokens = split(rest, ',');
  std::vector<std::string> words;
  if (!tokens.empty()) {
    words = split(tokens.back(), ' ');
    tokens.back() = words.front();
    words.erase(words.begin());
  }
  if (tokens.size() > entry->types.size() || tokens.size() > std::size(in.operand)) throw Refused("number of operands");
  for (const auto& token : tokens) {
    const Operand operand = parse_operand(token, entry->types[in.operands]);
    if (operand.negate || operand.absolute) in.modifiers |= kInputs;
    in.operand[in.operands++] = operand;
  }
  for (const auto& word : words)
    if (!word.empty()) parse_modifier(in, word);
  if (in.modifiers & ~entry->modifiers) throw Refused("modifiers");
}

}  // namespace

void disassemble(Program& program, const std::string& file, uint64_t bias) {
  const char* tool = std::getenv("AMD_INTERPRETER_OBJDUMP");
  const std::string command = std::string(tool ? tool : "llvm-objdump-22") + " -d --mcpu=" + program.target + " " + file;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  char* line = nullptr;
  size_t room = 0;
  std::unordered_map<std::string, uint32_t> known;
  std::vector<uint64_t> targets;
  while (getline(&line, &room, pipe) > 0) {
    const std::string text = line;
    const size_t note = text.find("// ");
    if (text[0] != '\t' || note == std::string::npos) continue;
    const std::string body = trimmed(text.substr(0, note));
    Instruction in;
    unsigned long long address = 0;
    const int words = std::sscanf(text.c_str() + note, "// %llx: %x %x", &address, &in.word[0], &in.word[1]) - 1;
    if (words < 1) throw std::runtime_error("llvm-objdump printed " + text);
    in.address = bias + address;
    in.bytes = 4 * words;
    const size_t space = body.find(' ');
    const std::string mnemonic = body.substr(0, space), rest = space == std::string::npos ? "" : body.substr(space + 1);
    in.text = body;
    in.name = known.emplace(mnemonic, known.size()).first->second;
    if (in.name == program.names.size()) program.names.push_back(mnemonic);
    try {
      decode(in, mnemonic, rest);
    } catch (const Refused& refused) {
      in.run = refuse;
      in.text += " (" + std::string(refused.what()) + ")";
    }
    program.number_at[in.address] = program.code.size();
    const bool branches = starts(mnemonic, "s_branch") || starts(mnemonic, "s_cbranch");
    targets.push_back(branches ? in.address + 4 + 4 * static_cast<int64_t>(static_cast<int16_t>(in.word[0] & 0xFFFF)) : 0);
    program.code.push_back(std::move(in));
  }
  std::free(line);
  if (pclose(pipe) != 0) throw std::runtime_error(command + " failed");
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == 0) continue;
    const auto found = program.number_at.find(targets[i]);
    if (found == program.number_at.end()) {
      program.code[i].run = refuse;
      program.code[i].text += " (target)";
    } else {
      program.code[i].target = found->second;
    }
  }
  program.executed.assign(program.names.size(), 0);
}

void fail(const Instruction& in, const std::string& what) {
  char address[40];
  std::snprintf(address, sizeof address, "0x%llx: ", static_cast<unsigned long long>(in.address));
  throw Fault(address + in.text + ": " + what);
}

}  // namespace amd
