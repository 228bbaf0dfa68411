// What racecheck says of the ring that the kernel of dk and dv reads its row values from, by itself: bulk copies into shared memory, and
// readers that give a slot back. sanitize.py builds and runs it beside the kernels.
//
//   racecheck_control 0   a warp meets in __syncwarp, then one lane arrives for it, as in the kernel: free of races
//   racecheck_control 1   every reader arrives for itself: free of races
//   racecheck_control 2   readers arrive before they read: a race
#include <cstdio>
#include <cstdlib>

#include "hopper/backward.cuh"

namespace {

using namespace attn_cuda::hopper;

constexpr int kStages = 4, kReaders = 256, kValues = 64, kSteps = 12;

template <int kWay>
__global__ void ring_kernel(const float* from, float* to) {
  __shared__ alignas(128) float values[kStages][kValues];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int thread = static_cast<int>(threadIdx.x) - 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&full[stage], 1);
      barrier_init(&empty[stage], kWay == 0 ? kReaders / 32 : kReaders);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int step = 0; step < kSteps; ++step) {
      const int stage = step % kStages;
      barrier_wait(&empty[stage], step / kStages % 2 ^ 1);
      barrier_expect(&full[stage], kValues * sizeof(float));
      load_bytes(values[stage], from + step * kValues, kValues * sizeof(float), &full[stage]);
    }
  } else if (thread >= 0) {
    float sum = 0.0f;
    for (int step = 0; step < kSteps; ++step) {
      const int stage = step % kStages;
      barrier_wait(&full[stage], step / kStages % 2);
      if (kWay == 2) barrier_arrive(&empty[stage]);
      sum += values[stage][thread % kValues];
      if (kWay == 0) {
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(&empty[stage]);
      }
      if (kWay == 1) barrier_arrive(&empty[stage]);
    }
    to[thread] = sum;
  }
}

}  // namespace

int main(int count, char** words) {
  const int way = count == 2 ? std::atoi(words[1]) : -1;
  auto* const kernel = way == 0 ? ring_kernel<0> : way == 1 ? ring_kernel<1> : way == 2 ? ring_kernel<2> : nullptr;
  if (kernel == nullptr) {
    std::fprintf(stderr, "racecheck_control: 0, 1 or 2\n");
    return 2;
  }
  float *from = nullptr, *to = nullptr;
  if (cudaMalloc(&from, kSteps * kValues * sizeof(float)) != cudaSuccess || cudaMalloc(&to, kReaders * sizeof(float)) != cudaSuccess ||
      cudaMemset(from, 0, kSteps * kValues * sizeof(float)) != cudaSuccess)
    return 3;
  kernel<<<1, 32 + kReaders>>>(from, to);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("ring %d: %s\n", way, cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 4;
}
