// State of the stand-in HIP runtime: the GPU that it plays, its modules and its last error. Streams run everything at once, in order.
#pragma once

#include <hip/hip_runtime_api.h>

#include <functional>
#include <mutex>
#include <string>

#include "dispatch.h"

namespace amd {

struct Runtime {
  std::recursive_mutex mutex;
  std::string target = "gfx942";
  hipError_t error = hipSuccess;
  std::string message;  // of the last fault
};

Runtime& runtime();

// Runs `action` alone. What it throws is kept as the last error, printed, and returned as `code`.
hipError_t guarded(hipError_t code, const std::function<void()>& action);

// Launches with an array of pointers to the arguments, or with the packed arguments.
void launch_kernel(const Program& program, const Kernel& kernel, dim3 blocks, dim3 threads, size_t dynamic_lds, void** arguments);
void launch_packed(const Program& program, const Kernel& kernel, dim3 blocks, dim3 threads, size_t dynamic_lds, const void* packed,
                   size_t bytes);

}  // namespace amd
