// Independent items over threads, each with its own scratch. Which thread takes an item decides nothing about its bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "attn/host/float_environment.h"

namespace attn::host {

// Cache-line aligned floats.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), std::align_val_t{64}))) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* data() const { return data_; }

 private:
  float* data_;
};

// Calls body(item, scratch) for items 0 .. count - 1 on up to `threads` threads, the calling one included. Scratch is allocated before any
// item runs.
template <typename Body>
void parallel_for(int64_t count, int threads, int64_t scratch_floats, const Body& body) {
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, count));
  std::vector<std::unique_ptr<Scratch>> scratch;
  for (int64_t i = 0; i < workers; ++i) scratch.push_back(std::make_unique<Scratch>(scratch_floats));
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    const DefaultFloatEnvironment environment;
    for (int64_t item = next.fetch_add(1); item < count; item = next.fetch_add(1)) body(item, scratch[worker]->data());
  };
  std::vector<std::thread> pool;
  pool.reserve(static_cast<size_t>(workers));
  try {
    for (int64_t i = 1; i < workers; ++i) pool.emplace_back(work, i);
  } catch (const std::exception&) {
    // The system gives no more threads; those that exist and this one do the work.
  }
  work(0);
  for (std::thread& thread : pool) thread.join();
}

}  // namespace attn::host
