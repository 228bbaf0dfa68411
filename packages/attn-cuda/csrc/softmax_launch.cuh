// What the softmax kernels of both contracts share: parameters, the checks of a call, and which variant of a kernel runs.
#pragma once

#include "launch.cuh"

namespace attn_cuda {

struct SoftmaxForward {
  Axes axes;
  int64_t keys;
  Source scores;
  attn_cuda_mask mask;
  void* probs;
  bool probs_are_float;
  float* row_max;  // null when not wanted, and then row_sum
  float* row_sum;
};

struct SoftmaxBackward {
  Axes axes;
  int64_t keys;
  Source scores;
  Source dprobs;
  attn_cuda_mask mask;
  const float* row_max;
  const float* row_sum;
  void* dscores;
};

// One row of the scores.
template <typename In>
__device__ __forceinline__ const In* scores_of(const Axes& axes, const Source& scores, int64_t row) {
  return static_cast<const In*>(scores.data) + row_offset(axes, scores.strides, row);
}

// One row of dP, in the dtype of the scores or binary32.
template <typename In>
struct Cotangents {
  const void* data;
  bool is_float;

  __device__ __forceinline__ Cotangents(const Axes& axes, const Source& dprobs, int64_t row)
      : is_float(sizeof(In) == sizeof(float) || dprobs.is_float) {
    const int64_t offset = row_offset(axes, dprobs.strides, row);
    data = static_cast<const char*>(dprobs.data) + offset * static_cast<int64_t>(is_float ? sizeof(float) : sizeof(In));
  }
};

inline int check_shape(const attn_cuda_shape* shape, const attn_cuda_mask* mask) {
  if (shape == nullptr) return ATTN_CUDA_NULL_POINTER;
  for (const int64_t size : shape->sizes)
    if (size < 0) return ATTN_CUDA_BAD_SIZE;
  if (shape->keys < 1 || shape->keys > INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  if (mask != nullptr) {
    if (mask->kept == nullptr || mask->positions == nullptr || mask->counts == nullptr) return ATTN_CUDA_NULL_POINTER;
    if (mask->rows_per_batch < 1) return ATTN_CUDA_BAD_SIZE;
  }
  return 0;
}

inline Axes axes_of(const attn_cuda_shape& shape) {
  const int64_t rows = shape.sizes[0] * shape.sizes[1] * shape.sizes[2];
  return Axes{rows, shape.sizes[1], shape.sizes[2], shape.sizes[0] == 1 && shape.sizes[1] == 1, rows <= INT32_MAX};
}

inline Source source_of(const attn_cuda_rows& rows, int32_t dtype) {
  const bool is_float = rows.dtype == ATTN_CUDA_FLOAT32 && dtype != ATTN_CUDA_FLOAT32;
  return Source{rows.data, {rows.strides[0], rows.strides[1], rows.strides[2]}, is_float};
}

// V neighbouring keys can be accessed at once: every row starts at a multiple of V elements.
template <int V>
bool in_vectors(const void* data, int32_t dtype, const int64_t (&strides)[3]) {
  const bool whole = strides[0] % V == 0 && strides[1] % V == 0 && strides[2] % V == 0;
  return whole && reinterpret_cast<uintptr_t>(data) % (V * size_of(dtype)) == 0;
}

// The same of contiguous rows.
template <int V>
bool in_vectors(const void* data, int32_t dtype, int64_t keys) {
  return in_vectors<V>(data, dtype, {keys, keys, keys});
}

// use(element), of the C++ type of `dtype`.
template <typename Use>
int with_element(int32_t dtype, Use use) {
  if (dtype == ATTN_CUDA_FLOAT32) return use(float{});
  if (dtype == ATTN_CUDA_BFLOAT16) return use(attn::bfloat16{});
  return dtype == ATTN_CUDA_FLOAT16 ? use(attn::float16{}) : ATTN_CUDA_BAD_DTYPE;
}

// The variant of `Kernels` for a block; V and, of a warp a row, NarrowV neighbours are accessed at once where `vectors` allows it and no
// key is dropped.
template <typename Kernels, int NarrowV, int V>
auto choose_kernel(const Block& block, bool masked, bool vectors) {
  if (!block.wide) {
    if (masked) return Kernels::template kernel<1, true, false, true>();
    return vectors ? Kernels::template kernel<NarrowV, false, false, true>() : Kernels::template kernel<1, false, false, true>();
  }
  if (!block.staged) return masked ? Kernels::template kernel<1, true, true, false>() : Kernels::template kernel<1, false, true, false>();
  if (masked) return Kernels::template kernel<1, true, true, true>();
  return vectors ? Kernels::template kernel<V, false, true, true>() : Kernels::template kernel<1, false, true, true>();
}

// Checks a call and, with `device` current, runs launch(element, arguments, vectors) with an element of the scores' type.
template <int V, typename Launch>
int run_forward(int device, const attn_cuda_shape* shape, const attn_cuda_rows* scores, const attn_cuda_mask* mask, void* probs,
                int32_t probs_dtype, float* row_max, float* row_sum, Launch launch) {
  if (const int refusal = check_shape(shape, mask)) return refusal;
  if (scores == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (probs_dtype != scores->dtype && probs_dtype != ATTN_CUDA_FLOAT32) return ATTN_CUDA_BAD_DTYPE;
  const Axes axes = axes_of(*shape);
  if (axes.rows == 0) return 0;
  if (scores->data == nullptr || probs == nullptr || (row_max == nullptr) != (row_sum == nullptr)) return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const SoftmaxForward arguments{axes,
                                 shape->keys,
                                 source_of(*scores, scores->dtype),
                                 mask == nullptr ? attn_cuda_mask{} : *mask,
                                 probs,
                                 probs_dtype == ATTN_CUDA_FLOAT32,
                                 row_max,
                                 row_sum};
  const bool vectors = in_vectors<V>(scores->data, scores->dtype, scores->strides) && in_vectors<V>(probs, probs_dtype, shape->keys);
  return with_element(scores->dtype, [&](auto element) { return launch(element, arguments, vectors); });
}

template <int V, typename Launch>
int run_backward(int device, const attn_cuda_shape* shape, const attn_cuda_rows* scores, const attn_cuda_rows* dprobs,
                 const attn_cuda_mask* mask, const float* row_max, const float* row_sum, void* dscores, Launch launch) {
  if (const int refusal = check_shape(shape, mask)) return refusal;
  if (scores == nullptr || dprobs == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (dprobs->dtype != scores->dtype && dprobs->dtype != ATTN_CUDA_FLOAT32) return ATTN_CUDA_BAD_DTYPE;
  const Axes axes = axes_of(*shape);
  if (axes.rows == 0) return 0;
  if (scores->data == nullptr || dprobs->data == nullptr || row_max == nullptr || row_sum == nullptr || dscores == nullptr)
    return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const SoftmaxBackward arguments{axes,
                                  shape->keys,
                                  source_of(*scores, scores->dtype),
                                  source_of(*dprobs, scores->dtype),
                                  mask == nullptr ? attn_cuda_mask{} : *mask,
                                  row_max,
                                  row_sum,
                                  dscores};
  const bool vectors = in_vectors<V>(scores->data, scores->dtype, scores->strides) &&
                       in_vectors<V>(dprobs->data, dprobs->dtype, dprobs->strides) && in_vectors<V>(dscores, scores->dtype, shape->keys);
  return with_element(scores->dtype, [&](auto element) { return launch(element, arguments, vectors); });
}

}  // namespace attn_cuda
