// Devices, memory, streams and events of the stand-in HIP runtime. Device memory is host memory, and every stream is done at once.
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "runtime.h"

using amd::guarded;
using amd::memory;
using amd::runtime;

namespace {

constexpr size_t kAlignment = 256;

hipError_t allocate(void** pointer, size_t bytes) {
  return guarded(hipErrorOutOfMemory, [&] {
    *pointer = nullptr;
    if (bytes == 0) return;
    *pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (*pointer == nullptr) throw std::runtime_error("no memory for " + std::to_string(bytes) + " bytes");
    memset(*pointer, 0xFF, bytes);  // NaN in every format: what is read before it is written shows
    memory().add(reinterpret_cast<uint64_t>(*pointer), bytes, "an allocation of hipMalloc");
  });
}

hipError_t release(void* pointer) {
  return guarded(hipErrorInvalidValue, [&] {
    if (pointer == nullptr) return;
    if (!memory().remove(reinterpret_cast<uint64_t>(pointer))) throw std::runtime_error("hipFree of what hipMalloc did not give");
    std::free(pointer);
  });
}

hipError_t unsupported(const char* what) {
  return guarded(hipErrorNotSupported, [&] { throw std::runtime_error(std::string(what) + " is not in the stand-in runtime"); });
}

uint32_t lds_bytes() { return (runtime().target == "gfx950" ? 160 : 64) * 1024; }
int compute_units() { return runtime().target == "gfx90a" ? 104 : runtime().target == "gfx942" ? 304 : 256; }

}  // namespace

extern "C" {

hipError_t hipInit(unsigned) { return hipSuccess; }

hipError_t hipGetDeviceCount(int* count) {
  *count = 1;
  return hipSuccess;
}

hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}

hipError_t hipSetDevice(int device) { return device == 0 ? hipSuccess : hipErrorInvalidDevice; }

hipError_t hipDeviceSynchronize() { return runtime().error; }

hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  if (device != 0) return hipErrorInvalidDevice;
  memset(properties, 0, sizeof *properties);
  const std::string& target = runtime().target;
  strncpy(properties->name, ("CPU interpreter of " + target).c_str(), sizeof properties->name - 1);
  strncpy(properties->gcnArchName, target.c_str(), sizeof properties->gcnArchName - 1);
  properties->warpSize = amd::kLanes;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = lds_bytes();
  properties->multiProcessorCount = compute_units();
  properties->major = 9;
  properties->minor = target == "gfx90a" ? 0 : target == "gfx942" ? 4 : 5;
  properties->totalGlobalMem = size_t{1} << 33;
  for (int axis = 0; axis < 3; ++axis) {
    properties->maxThreadsDim[axis] = 1024;
    properties->maxGridSize[axis] = axis == 0 ? 0x7FFFFFFF : 65535;
  }
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  if (device != 0) return hipErrorInvalidDevice;
  switch (attribute) {
    case hipDeviceAttributeWarpSize:
      *value = amd::kLanes;
      return hipSuccess;
    case hipDeviceAttributeMaxThreadsPerBlock:
      *value = 1024;
      return hipSuccess;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
      *value = lds_bytes();
      return hipSuccess;
    case hipDeviceAttributeMultiprocessorCount:
      *value = compute_units();
      return hipSuccess;
    default:
      return unsupported("this device attribute");
  }
}

hipError_t hipRuntimeGetVersion(int* version) {
  *version = HIP_VERSION;
  return hipSuccess;
}

hipError_t hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }

hipError_t hipMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
hipError_t hipMallocAsync(void** pointer, size_t bytes, hipStream_t) { return allocate(pointer, bytes); }
hipError_t hipFree(void* pointer) { return release(pointer); }
hipError_t hipFreeAsync(void* pointer, hipStream_t) { return release(pointer); }
hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes); }
hipError_t hipHostFree(void* pointer) { return release(pointer); }

hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
  memmove(to, from, bytes);
  return hipSuccess;
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
  return hipMemcpy(to, from, bytes, kind);
}

hipError_t hipMemset(void* to, int value, size_t bytes) {
  memset(to, value, bytes);
  return hipSuccess;
}
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) { return hipMemset(to, value, bytes); }

hipError_t hipMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, hipStream_t) {
  for (size_t row = 0; row < height; ++row) memset(static_cast<char*>(to) + row * pitch, value, width);
  return hipSuccess;
}

hipError_t hipStreamCreate(hipStream_t* stream) {
  *stream = reinterpret_cast<hipStream_t>(new char);
  return hipSuccess;
}
hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) { return hipStreamCreate(stream); }
hipError_t hipStreamDestroy(hipStream_t stream) {
  delete reinterpret_cast<char*>(stream);
  return hipSuccess;
}
hipError_t hipStreamSynchronize(hipStream_t) { return runtime().error; }
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned) { return hipSuccess; }

hipError_t hipEventCreate(hipEvent_t* event) {
  *event = reinterpret_cast<hipEvent_t>(new char);
  return hipSuccess;
}
hipError_t hipEventDestroy(hipEvent_t event) {
  delete reinterpret_cast<char*>(event);
  return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipSuccess; }
hipError_t hipEventSynchronize(hipEvent_t) { return runtime().error; }
hipError_t hipEventElapsedTime(float*, hipEvent_t, hipEvent_t) { return unsupported("hipEventElapsedTime"); }

hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int) { return hipSuccess; }

hipError_t hipPeekAtLastError() { return runtime().error; }

hipError_t hipGetLastError() {
  const hipError_t error = runtime().error;
  runtime().error = hipSuccess;
  return error;
}

const char* hipGetErrorName(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "hipSuccess";
    case hipErrorInvalidValue:
      return "hipErrorInvalidValue";
    case hipErrorOutOfMemory:
      return "hipErrorOutOfMemory";
    case hipErrorInvalidDevice:
      return "hipErrorInvalidDevice";
    case hipErrorInvalidImage:
      return "hipErrorInvalidImage";
    case hipErrorNotFound:
      return "hipErrorNotFound";
    case hipErrorLaunchFailure:
      return "hipErrorLaunchFailure";
    case hipErrorNotSupported:
      return "hipErrorNotSupported";
    default:
      return "an error that the stand-in runtime has no name for";
  }
}

const char* hipGetErrorString(hipError_t error) {
  static thread_local std::string text;
  text = hipGetErrorName(error);
  if (error != hipSuccess && !runtime().message.empty()) text += ": " + runtime().message;
  return text.c_str();
}

}  // extern "C"
