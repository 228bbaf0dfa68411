// launch.h on HIP: one kernel for every element-wise work of the ck engine.
#include <hip/hip_runtime.h>

#include <mutex>
#include <stdexcept>
#include <vector>

#include "launch.h"

namespace attn::ck {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = int64_t{1} << 20;

void check(hipError_t error, const char* what) {
  if (error != hipSuccess) throw std::runtime_error(std::string(what) + ": " + hipGetErrorString(error));
}

template <typename Work>
__global__ void elements(Work work, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < count; index += step) element(work, index);
}

// Buffers that are free, of each a size. It is never destroyed: CK's callbacks may run while the process ends.
struct PinnedPool {
  std::mutex mutex;
  std::vector<std::pair<int64_t, void*>> free;
};
PinnedPool& pinned_pool() {
  static auto* pool = new PinnedPool;
  return *pool;
}

}  // namespace

template <typename Work>
void launch(const Work& work, int64_t count, void* stream) {
  if (count == 0) return;
  const int64_t wanted = (count + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(wanted < kMostBlocks ? wanted : kMostBlocks);
  elements<<<dim3(blocks), dim3(kThreads), 0, static_cast<hipStream_t>(stream)>>>(work, count);
  check(hipGetLastError(), "a kernel of the ck engine");
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

void set_zero(void* data, int64_t bytes, void* stream) {
  if (bytes > 0) check(hipMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<hipStream_t>(stream)), "hipMemsetAsync");
}

std::shared_ptr<void> pinned(int64_t bytes) {
  PinnedPool& pool = pinned_pool();
  void* found = nullptr;
  int64_t size = bytes;
  {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    for (auto entry = pool.free.begin(); entry != pool.free.end() && found == nullptr; ++entry)
      if (entry->first >= bytes) {
        size = entry->first;
        found = entry->second;
        pool.free.erase(entry);
        break;
      }
  }
  if (found == nullptr) check(hipHostMalloc(&found, static_cast<size_t>(bytes), hipHostMallocDefault), "hipHostMalloc");
  return std::shared_ptr<void>(found, [size](void* data) {
    PinnedPool& pool = pinned_pool();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    pool.free.emplace_back(size, data);
  });
}

std::string architecture(int64_t device) {
  hipDeviceProp_t properties;
  check(hipGetDeviceProperties(&properties, static_cast<int>(device)), "hipGetDeviceProperties");
  const std::string name = properties.gcnArchName;  // "gfx942:sramecc+:xnack-"
  return name.substr(0, name.find(':'));
}

}  // namespace attn::ck
