// Offload bundles: what clang embeds in a host program, and what it writes for several GPUs at once.
#pragma once

#include <string>
#include <vector>

namespace amd {

struct CodeObject {
  const void* data = nullptr;
  size_t bytes = 0;
};

// The code object for `target` in a bundle, or the ELF file itself. Throws std::runtime_error that lists what the bundle has.
CodeObject code_object_for(const void* image, const std::string& target);

}  // namespace amd
