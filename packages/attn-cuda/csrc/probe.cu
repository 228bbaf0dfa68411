// Does this build compute IEEE arithmetic on this device? Operands come from memory, so that no compiler folds them.
#include "attn_build_info.h"
#include "launch.cuh"

namespace attn_cuda {
namespace {

// Order of the names in attn_cuda_probe_names.
constexpr uint32_t kExpected[] = {
    0x00000200u,  // 2^-140 = 2^-70 * 2^-70: a subnormal product
    0x00000300u,  // 2^-140 + 2^-141: subnormal operands
    0x3EAAAAABu,  // 1 / 3, nearest even
    0x00155555u,  // 2^-126 / 6: a subnormal quotient, nearest even
    0x00000000u,  // RN((1 + 2^-12)^2) - (1 + 2^-11): 2^-24 when contracted
    0x00000001u,  // exp(-103.2): the smallest subnormal
    0x3F800000u,  // exp(0)
};
constexpr int kCount = sizeof kExpected / sizeof kExpected[0];

__device__ uint32_t operands[] = {0x1C800000u, 0x00000200u, 0x00000100u, 0x3F800000u, 0x40400000u, 0x00800000u,
                                  0x40C00000u, 0x3F800800u, 0x3F801000u, 0xC2CE6666u, 0x00000000u};
__device__ uint32_t results[kCount];

__device__ __forceinline__ float operand(int i) { return bits_to_float(*const_cast<volatile uint32_t*>(&operands[i])); }

__global__ void probe_kernel() {
  results[0] = float_to_bits(operand(0) * operand(0));
  results[1] = float_to_bits(operand(1) + operand(2));
  results[2] = float_to_bits(operand(3) / operand(4));
  results[3] = float_to_bits(operand(5) / operand(6));
  results[4] = float_to_bits(operand(7) * operand(7) - operand(8));
  results[5] = float_to_bits(exp_nonpositive(operand(9)));
  results[6] = float_to_bits(exp_nonpositive(operand(10)));
}

cudaError_t run_probe(cudaStream_t stream, uint32_t (&found)[kCount]) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(1);
  config.stream = stream;
  cudaError_t error = cudaLaunchKernelEx(&config, probe_kernel);
  if (error != cudaSuccess) return error;
  error = cudaMemcpyFromSymbolAsync(found, results, sizeof found, 0, cudaMemcpyDeviceToHost, stream);
  if (error != cudaSuccess) return error;
  return cudaStreamSynchronize(stream);
}

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_probe(int device, uint32_t* failed) {
  using namespace attn_cuda;
  if (failed == nullptr) return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  uint32_t found[kCount] = {};
  cudaStream_t stream = nullptr;
  error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = run_probe(stream, found);
    const cudaError_t destroyed = cudaStreamDestroy(stream);
    if (error == cudaSuccess) error = destroyed;
  }
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  if (restored != cudaSuccess) return restored;
  *failed = 0;
  for (int i = 0; i < kCount; ++i) *failed |= (found[i] != kExpected[i] ? 1u : 0u) << i;
  return 0;
}

extern "C" const char* attn_cuda_probe_names(void) {
  return "subnormal product,subnormal operands,division,subnormal quotient,separate rounding of product and sum,subnormal exp,exp of zero";
}

extern "C" int attn_cuda_capability(int device, int* capability) {
  if (capability == nullptr) return ATTN_CUDA_NULL_POINTER;
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaSuccess) *capability = 10 * major + minor;
  return error;
}

extern "C" const char* attn_cuda_message(int code) {
  switch (code) {
    case 0:
      return "no error";
    case ATTN_CUDA_BAD_DTYPE:
      return "unknown dtype code, or an output or cotangent that is neither float32 nor the dtype of the scores";
    case ATTN_CUDA_BAD_SIZE:
      return "a size is out of range (outer axes >= 0, 1 <= keys < 2^31, rows_per_batch >= 1)";
    case ATTN_CUDA_NULL_POINTER:
      return "a pointer is null";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

extern "C" const char* attn_cuda_architectures(void) { return ATTN_CUDA_ARCHITECTURES; }
extern "C" const char* attn_cuda_flags(void) { return ATTN_CUDA_FLAGS; }
extern "C" const char* attn_cuda_compiler(void) { return ATTN_CUDA_COMPILER; }
extern "C" const char* attn_cuda_fingerprint(void) { return ATTN_CUDA_FINGERPRINT; }
extern "C" int attn_cuda_softmax_tile(void) { return attn_cuda::kRowTile; }
