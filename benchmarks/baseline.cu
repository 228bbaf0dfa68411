// What the attention benchmarks compare with: products of one thread an output, and a chain of dependent FMAs.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

struct Product {
  const float *left, *right;
  float* out;
  int64_t items, rows, columns, depth;
  int64_t left_item, left_row, left_step;
  int64_t right_item, right_column, right_step;
  float scale;
};

// out[item, row, column] = scale * sum over depth of left * right; out is contiguous.
__global__ void product_kernel(Product product) {
  const int64_t size = product.items * product.rows * product.columns;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const int64_t column = index % product.columns, row = index / product.columns % product.rows,
                item = index / product.columns / product.rows;
  const float* left = product.left + item * product.left_item + row * product.left_row;
  const float* right = product.right + item * product.right_item + column * product.right_column;
  float sum = 0.0f;
  for (int64_t step = 0; step < product.depth; ++step) sum = fmaf(left[step * product.left_step], right[step * product.right_step], sum);
  product.out[index] = sum * product.scale;
}

// One warp, each thread one chain: what a sum in a stated order cannot go below.
__global__ void chain_kernel(int64_t length, float factor, float* out, int64_t* clocks) {
  float sum = static_cast<float>(threadIdx.x);
  const int64_t begin = clock64();
#pragma unroll 64
  for (int64_t i = 0; i < length; ++i) sum = fmaf(sum, factor, factor);
  const int64_t end = clock64();
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) *clocks = end - begin;
}

constexpr int kThreads = 256;

}  // namespace

extern "C" int baseline_product(void* stream, const int64_t* sizes, const int64_t* strides, float scale, const float* left,
                                const float* right, float* out) {
  const Product product{left,       right,      out,        sizes[0],   sizes[1],   sizes[2],   sizes[3],
                        strides[0], strides[1], strides[2], strides[3], strides[4], strides[5], scale};
  const int64_t blocks = (sizes[0] * sizes[1] * sizes[2] + kThreads - 1) / kThreads;
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  product_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(product);
  return cudaGetLastError();
}

extern "C" int baseline_chain(void* stream, int64_t length, float* out, int64_t* clocks) {
  chain_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(length, 0.5f, out, clocks);
  return cudaGetLastError();
}
