// https://clang.llvm.org/docs/ClangOffloadBundler.html, "Bundled Binary File Layout".
#include "fat_binary.h"

#include <elf.h>

#include <cstring>
#include <stdexcept>

namespace amd {
namespace {

constexpr char kMagic[] = "__CLANG_OFFLOAD_BUNDLE__";

uint64_t word(const char* at) {
  uint64_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

// hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+ -> gfx90a
std::string target_of(const std::string& triple) {
  const std::string processor = triple.substr(triple.rfind('-') + 1);
  return processor.substr(0, processor.find(':'));
}

// The size of an ELF file follows from its section headers, which stand last.
size_t elf_bytes(const void* image) {
  Elf64_Ehdr header;
  memcpy(&header, image, sizeof header);
  return header.e_shoff + size_t{header.e_shentsize} * header.e_shnum;
}

}  // namespace

CodeObject code_object_for(const void* image, const std::string& target) {
  const char* data = static_cast<const char*>(image);
  if (memcmp(data, ELFMAG, SELFMAG) == 0) return {image, elf_bytes(image)};
  if (memcmp(data, "CCOB", 4) == 0) throw std::runtime_error("a compressed offload bundle; build without --offload-compress");
  if (memcmp(data, kMagic, sizeof kMagic - 1) != 0) throw std::runtime_error("neither an ELF file nor an offload bundle");
  const char* at = data + sizeof kMagic - 1;
  std::string found;
  uint64_t entries = word(at);
  at += 8;
  for (; entries > 0; --entries) {
    const uint64_t offset = word(at), bytes = word(at + 8), length = word(at + 16);
    const std::string triple(at + 24, length);
    at += 24 + length;
    if (triple.rfind("hip", 0) == 0 && target_of(triple) == target) return {data + offset, bytes};
    found += (found.empty() ? "" : ", ") + triple;
  }
  throw std::runtime_error("no code object for " + target + " in a bundle of " + found);
}

}  // namespace amd
