// Row values of the backward pass of sm90-v1, delta and the origin of P, and the gradients of the sinks, which are sums of them.
#include "hopper/backward.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int kThreads = 256;
constexpr int kTileLanes = 32;

template <typename Half>
__device__ __forceinline__ float product_at(uint32_t left, uint32_t right, int half) {
  const auto bits = [half](uint32_t pair) { return static_cast<uint16_t>(half == 0 ? pair & 0xFFFF : pair >> 16); };
  return mul(widened(Half{bits(left)}), widened(Half{bits(right)}));
}

// delta of a row before dLSE: kColumns / 8 neighbouring threads hold eight columns each and all get the sum.
template <typename Half, int kColumns>
__device__ __forceinline__ float row_delta(uint4 dout, uint4 out) {
  const uint32_t left[4] = {dout.x, dout.y, dout.z, dout.w}, right[4] = {out.x, out.y, out.z, out.w};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = product_at<Half>(left[i / 2], right[i / 2], i % 2);
#pragma unroll
  for (int distance = kColumns / 16; distance >= 1; distance /= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = add(x[i], __shfl_xor_sync(~0u, x[i], distance));
  }
#pragma unroll
  for (int half = 4; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) x[i] = add(x[i], x[i + half]);
  }
  return x[0];
}

template <typename Half, int kColumns>
__global__ void __launch_bounds__(kThreads) row_values_kernel(const __grid_constant__ BackwardCall call) {
  constexpr int kLanesOfRow = kColumns / 8, kRows = kThreads / kLanesOfRow;
  const Attention& problem = call.problem;
  const HeadBlock block = find_block(problem, problem.heads, call.query_blocks, problem.cu_seqlens_q, 1, false, false, blockIdx.x);
  if (block.first < 0) return;
  const int piece = static_cast<int>(threadIdx.x) % kLanesOfRow;
  const int64_t line = line_of(call, block.item, block.head);
#pragma unroll 2
  for (int base = 0; base < kBlock; base += kRows) {
    const int query = block.first + base + static_cast<int>(threadIdx.x) / kLanesOfRow;
    const Row row{block.head, query};
    const bool present = query < block.item.queries;
    uint4 dout{}, out{};
    if (present) {
      dout = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(call.dout.data) + query_offset(call.dout, block.item, row))[piece];
      out = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(call.out.data) + query_offset(call.out, block.item, row))[piece];
    }
    float delta = row_delta<Half, kColumns>(dout, out), origin = -dead();
    if (piece != 0) continue;
    if (present) {
      const int64_t index = row_index(problem, block.item, row);
      if (call.dlse != nullptr) delta = sub(delta, call.dlse[index]);
      origin = attn::sm90::weight_origin(call.lse[index]);
    }
    call.delta[line + query] = delta;
    call.origin[line + query] = origin;
  }
}

// The sum over a tile of 128 queries by halves, in every lane.
__device__ __forceinline__ float tile_sum(float (&x)[kBlock / kTileLanes]) {
#pragma unroll
  for (int half = kBlock / kTileLanes / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) x[i] = add(x[i], x[i + half]);
  }
#pragma unroll
  for (int distance = kTileLanes / 2; distance >= 1; distance /= 2) x[0] = add(x[0], __shfl_xor_sync(~0u, x[0], distance));
  return x[0];
}

// items[b, h]: a block for each, whose warps take tiles in turns; the first thread adds them in order.
__global__ void __launch_bounds__(kThreads) sink_items_kernel(const __grid_constant__ BackwardCall call) {
  constexpr int kWarps = kThreads / kTileLanes;
  __shared__ float tiles[kWarps];
  const int64_t batch = blockIdx.x / call.problem.heads;
  const auto head = static_cast<int32_t>(blockIdx.x - batch * call.problem.heads);
  const Item item = item_of(call.problem, batch);
  const int64_t line = line_of(call, item, head);
  const float sink = call.problem.sinks[head], logit = mul(sink, attn::bits_to_float(attn::sm90::kLog2EBits));
  const int warp = static_cast<int>(threadIdx.x) / kTileLanes, lane = static_cast<int>(threadIdx.x) % kTileLanes;
  float total = 0.0f;
  for (int64_t first = 0; first < item.queries; first += kWarps * kBlock) {
    float x[kBlock / kTileLanes];
#pragma unroll
    for (int i = 0; i < kBlock / kTileLanes; ++i) {
      const int64_t query = first + warp * kBlock + i * kTileLanes + lane;
      x[i] = 0.0f;
      if (query < item.queries && sink != dead()) x[i] = -mul(ex2(sub(logit, call.origin[line + query])), call.delta[line + query]);
    }
    const float sum = tile_sum(x);
    if (lane == 0) tiles[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int tile = 0; tile < kWarps && first + tile * kBlock < item.queries; ++tile) total = add(total, tiles[tile]);
    __syncthreads();
  }
  if (threadIdx.x == 0) call.items[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads) sinks_kernel(const __grid_constant__ BackwardCall call) {
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (head >= call.problem.heads) return;
  float total = 0.0f;
  for (int64_t batch = 0; batch < call.problem.batch; ++batch) total = add(total, call.items[batch * call.problem.heads + head]);
  call.dsinks[head] = total;
}

}  // namespace

int launch_row_values(const BackwardCall& call, void* stream) {
  const int64_t blocks = call.query_blocks * call.problem.heads * (call.problem.cu_seqlens_q == nullptr ? call.problem.batch : 1);
  return with_traits(call, [&](auto half, auto columns) {
    return launch_blocks(row_values_kernel<decltype(half), decltype(columns)::value>, blocks, kThreads, 0, stream, call);
  });
}

int launch_sink_gradients(const BackwardCall& call, void* stream) {
  const int64_t items = call.problem.batch * call.problem.heads;
  if (const int error = launch_blocks(sink_items_kernel, items, kThreads, 0, stream, call)) return error;
  return launch_blocks(sinks_kernel, (call.problem.heads + kThreads - 1) / kThreads, kThreads, 0, stream, call);
}

}  // namespace attn_cuda::hopper
