// csrc/ck/launch.h on the host: elements in descending order, which must not matter.
#include "../../csrc/ck/launch.h"

#include <cstdlib>
#include <cstring>

namespace {

std::string gpu = "gfx942";

}  // namespace

namespace attn::ck {

template <typename Work>
void launch(const Work& work, int64_t count, void*) {
  for (int64_t index = count; index-- > 0;) element(work, index);
}

template void launch(const Offsets&, int64_t, void*);
template void launch(const Fill&, int64_t, void*);
template void launch(const RescaleOut&, int64_t, void*);
template void launch(const RescaleRows&, int64_t, void*);
template void launch(const SinkTerms&, int64_t, void*);
template void launch(const SinkChunks&, int64_t, void*);
template void launch(const SinkHeads&, int64_t, void*);
template void launch(const GroupSum&, int64_t, void*);
template void launch(const BiasSum&, int64_t, void*);

void set_zero(void* data, int64_t bytes, void*) { std::memset(data, 0, static_cast<size_t>(bytes)); }

std::shared_ptr<void> pinned(int64_t bytes) { return std::shared_ptr<void>(std::malloc(static_cast<size_t>(bytes)), std::free); }

std::string architecture(int64_t) { return gpu; }

}  // namespace attn::ck

extern "C" void fake_gpu_set(const char* name) { gpu = name; }
