// What the ck engine asks of the HIP runtime. The stream is a hipStream_t; errors throw std::runtime_error.
#pragma once

#include <memory>
#include <string>

#include "elements.h"

namespace attn::ck {

// Computes elements [0, count) of `work` in any order.
template <typename Work>
void launch(const Work& work, int64_t count, void* stream);

void set_zero(void* data, int64_t bytes, void* stream);

// Page-locked host memory that goes back to a pool of the process: CK may drop it on a thread where HIP must not be called.
std::shared_ptr<void> pinned(int64_t bytes);

// "gfx942" of a device.
std::string architecture(int64_t device);

}  // namespace attn::ck
