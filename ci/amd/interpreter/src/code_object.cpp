// Loads an ELF code object into memory, with its relocations, kernel descriptors and symbols.
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "memory.h"
#include "program.h"

namespace amd {
namespace {

constexpr uint32_t kRelocationAbs64 = 3, kRelocationRelative64 = 13;

std::string target_of(uint32_t flags) {
  // EF_AMDGPU_MACH values of AMDGPUUsage.
  switch (flags & 0xFF) {
    case 0x3F:
      return "gfx90a";
    case 0x4C:
      return "gfx942";
    case 0x4F:
      return "gfx950";
  }
  throw std::runtime_error("code object for a GPU that the interpreter does not play (EF_AMDGPU_MACH " + std::to_string(flags & 0xFF) +
                           "); it plays gfx90a, gfx942 and gfx950");
}

template <typename T>
T read(const uint8_t* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}

Kernel read_descriptor(const std::string& name, uint64_t address) {
  const auto* at = reinterpret_cast<const uint8_t*>(address);
  Kernel kernel;
  kernel.name = name;
  kernel.lds_bytes = read<uint32_t>(at);
  kernel.scratch_bytes = read<uint32_t>(at + 4);
  kernel.kernarg_bytes = read<uint32_t>(at + 8);
  kernel.entry = address + read<int64_t>(at + 16);
  kernel.rsrc1 = read<uint32_t>(at + 48);
  kernel.rsrc2 = read<uint32_t>(at + 52);
  kernel.properties = read<uint16_t>(at + 56);
  kernel.preload = read<uint16_t>(at + 58);
  return kernel;
}

std::string write_temporary(const void* elf, size_t bytes) {
  std::string path = "/tmp/amd-code-object-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0 || write(file, elf, bytes) != static_cast<ssize_t>(bytes)) throw std::runtime_error("cannot write " + path);
  close(file);
  return path;
}

}  // namespace

uint32_t Program::instruction_at(uint64_t address, const Instruction& from) const {
  const auto found = number_at.find(address);
  if (found == number_at.end()) fail(from, "jump to an address that holds no instruction");
  return found->second;
}

std::unique_ptr<Program> load(const void* elf, size_t bytes) {
  const auto* file = static_cast<const uint8_t*>(elf);
  const auto header = read<Elf64_Ehdr>(file);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_machine != 224 /* EM_AMDGPU */)
    throw std::runtime_error("not an AMDGPU ELF code object");
  auto program = std::make_unique<Program>();
  program->target = target_of(header.e_flags);

  std::vector<Elf64_Phdr> segments(header.e_phnum);
  for (int i = 0; i < header.e_phnum; ++i) segments[i] = read<Elf64_Phdr>(file + header.e_phoff + i * header.e_phentsize);
  uint64_t end = 0;
  for (const auto& segment : segments)
    if (segment.p_type == PT_LOAD) end = std::max(end, segment.p_vaddr + segment.p_memsz);
  program->image_bytes = (end + 4095) & ~uint64_t{4095};
  void* image = mmap(nullptr, program->image_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (image == MAP_FAILED) throw std::runtime_error("no memory for a code object");
  program->image = static_cast<uint8_t*>(image);
  const uint64_t bias = reinterpret_cast<uint64_t>(image);
  for (const auto& segment : segments) {
    if (segment.p_type == PT_LOAD) memcpy(program->image + segment.p_vaddr, file + segment.p_offset, segment.p_filesz);
  }
  memory().add(bias, program->image_bytes, "code object");

  const auto address_of = [&](uint64_t value) { return bias + value; };
  for (int i = 0; i < header.e_shnum; ++i) {
    const auto section = read<Elf64_Shdr>(file + header.e_shoff + i * header.e_shentsize);
    if (section.sh_type == SHT_RELA) {
      const auto symbols = read<Elf64_Shdr>(file + header.e_shoff + section.sh_link * header.e_shentsize);
      for (uint64_t at = 0; at < section.sh_size; at += sizeof(Elf64_Rela)) {
        const auto relocation = read<Elf64_Rela>(file + section.sh_offset + at);
        const auto symbol = read<Elf64_Sym>(file + symbols.sh_offset + ELF64_R_SYM(relocation.r_info) * sizeof(Elf64_Sym));
        const uint32_t type = ELF64_R_TYPE(relocation.r_info);
        if (type != kRelocationAbs64 && type != kRelocationRelative64)
          throw std::runtime_error("code object with a relocation of type " + std::to_string(type));
        const uint64_t value = address_of(type == kRelocationAbs64 ? symbol.st_value : 0) + relocation.r_addend;
        memcpy(program->image + relocation.r_offset, &value, sizeof value);
      }
    }
    if (section.sh_type != SHT_DYNSYM) continue;
    const auto names = read<Elf64_Shdr>(file + header.e_shoff + section.sh_link * header.e_shentsize);
    for (uint64_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = read<Elf64_Sym>(file + section.sh_offset + at);
      const std::string name = reinterpret_cast<const char*>(file + names.sh_offset + symbol.st_name);
      if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_shndx == SHN_UNDEF) continue;
      if (name.size() < 4 || name.compare(name.size() - 3, 3, ".kd") != 0) continue;
      const std::string kernel = name.substr(0, name.size() - 3);
      program->kernels[kernel] = read_descriptor(kernel, address_of(symbol.st_value));
    }
  }
  for (const auto& segment : segments) {
    if (segment.p_type != PT_NOTE) continue;
    for (uint64_t at = segment.p_offset; at < segment.p_offset + segment.p_filesz;) {
      const auto note = read<Elf64_Nhdr>(file + at);
      const uint64_t description = at + sizeof note + ((note.n_namesz + 3) & ~3u);
      if (note.n_type == 32 /* NT_AMDGPU_METADATA */)
        for (auto& [name, arguments] : read_metadata(file + description, note.n_descsz)) program->kernels[name].arguments = arguments;
      at = description + ((note.n_descsz + 3) & ~3u);
    }
  }
  const std::string path = write_temporary(elf, bytes);
  disassemble(*program, path, bias);
  unlink(path.c_str());
  return program;
}

}  // namespace amd
