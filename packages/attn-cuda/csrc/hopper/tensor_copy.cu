#include "hopper/tensor_copy.cuh"

namespace attn_cuda::hopper {

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, without linking to the driver.
cudaError_t find_encode(Encode* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  *encode = reinterpret_cast<Encode>(function);
  return cudaSuccess;
}

}  // namespace

bool can_map(const void* data, const int64_t (&sizes)[4], const int64_t (&strides)[3], int64_t column_stride) {
  if (reinterpret_cast<uintptr_t>(data) % kMapAlignment != 0 || column_stride != 1) return false;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t bytes = strides[axis] * 2;
    if (sizes[axis] > 1 && (bytes <= 0 || bytes % kMapAlignment != 0 || bytes >= (int64_t{1} << 40))) return false;
  }
  return true;
}

cudaError_t encode_map(CUtensorMap* map, const void* data, int32_t dtype, const int64_t (&sizes)[4], const int64_t (&strides)[3],
                       int box_rows) {
  static Encode encode = nullptr;
  if (encode == nullptr) {
    const cudaError_t error = find_encode(&encode);
    if (error != cudaSuccess) return error;
  }
  const auto kind = dtype == ATTN_CUDA_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  cuuint64_t lengths[4], bytes[3];
  for (int axis = 0; axis < 4; ++axis) lengths[axis] = static_cast<cuuint64_t>(sizes[3 - axis]);
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t stride = sizes[2 - axis] > 1 ? strides[2 - axis] : sizes[3];
    bytes[axis] = static_cast<cuuint64_t>(stride) * 2;
  }
  const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result = encode(map, kind, 4, const_cast<void*>(data), lengths, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace attn_cuda::hopper
