// What the kernels of the backward pass of sm90-v1 share: the call, its blocks of 128 rows or keys, and the workspace of row values.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_problem.cuh"
#include "hopper/arithmetic.cuh"
#include "hopper/hole.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"

namespace attn_cuda::hopper {

constexpr int kBlock = 128;            // rows or keys of a block: one head, one item
constexpr int kBackwardThreads = 384;  // a warpgroup that loads and two that compute
constexpr int kConsumers = 256;        // threads
constexpr int kLaunchRegisters = 168;  // of each of 384 threads; setmaxnreg only moves them between warpgroups
constexpr int kLoaderRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kLoaderRegisters + 2 * kConsumerRegisters <= 3 * kLaunchRegisters, "a consumer would wait for registers for ever");
constexpr int64_t kUnbounded = int64_t{1} << 40;

// Parameter of every kernel. A pair is visible iff -left <= j - (i + item.offset) <= right and j < item.used, and j not in the item's hole.
struct BackwardCall {
  Attention problem;
  Array dout, out;
  int64_t left, right;
  int64_t query_blocks, key_blocks;  // of a head: of one item, or packed of all segments (see count_packed)
  int64_t section;                   // heads whose blocks are in work together
  float factor;
  const float* lse;
  const float* dlse;
  float* origin;  // by line: RN(LSE * log2 e), +inf for rows that weigh nothing and in places without a row
  float* delta;   // by line; +0 in places without a row
  float* items;   // [batch, heads], sums for dsinks
  void* dq;
  void* dk;
  void* dv;
  float* dsinks;
  const Hole* holes;  // of each item; null: none
};

// Packed: block b of segment i has number `first row of i` div 128 + i + b among the blocks of a head. Distinct, and below this count, for
// any offsets that ascend; those between two segments have no work. So no plan is needed.
__host__ __device__ __forceinline__ int64_t count_packed(int64_t rows, int64_t segments) { return rows / kBlock + segments; }

struct HeadBlock {
  Item item;
  int32_t head;   // of `heads`
  int32_t first;  // row or key of the item, -1: nothing to do
};

// Block `id` of a grid of heads x blocks, in sections of `section` heads; in a section, the first blocks of all heads come first, or the
// last ones. `offsets` null: dense.
__device__ __forceinline__ HeadBlock find_block(const Attention& problem, int32_t heads, int64_t blocks, const int64_t* offsets,
                                                int64_t section, bool of_keys, bool last_first, int64_t id) {
  HeadBlock found;
  const int64_t all = offsets == nullptr ? problem.batch * heads : heads;
  const int64_t first_head = id / (blocks * section) * section, inside = id - first_head * blocks;
  const int64_t width = min(section, all - first_head), outer = first_head + inside % width;
  int64_t block = inside / width, batch = 0;
  if (last_first) block = blocks - 1 - block;
  if (offsets == nullptr) {
    batch = outer / heads;
    found.head = static_cast<int32_t>(outer - batch * heads);
  } else {
    const int64_t rows = of_keys ? problem.keys : problem.queries;
    found.head = static_cast<int32_t>(outer);
    int64_t high = problem.batch;
    while (high - batch > 1) {
      const int64_t middle = (batch + high) / 2;
      if (clamped(offsets[middle], 0, rows) / kBlock + middle <= block) {
        batch = middle;
      } else {
        high = middle;
      }
    }
    block -= clamped(offsets[batch], 0, rows) / kBlock + batch;
  }
  found.item = item_of(problem, batch);
  const int64_t first = block * kBlock;
  found.first = block < 0 || first >= (of_keys ? found.item.keys : found.item.queries) ? -1 : static_cast<int32_t>(first);
  return found;
}

// Index in the workspace of query 0 of a head; the item's queries follow, and places up to a multiple of 128.
__device__ __forceinline__ int64_t line_of(const BackwardCall& call, const Item& item, int32_t head) {
  const bool packed = call.problem.cu_seqlens_q != nullptr;
  const int64_t block = packed ? head * call.query_blocks + item.first_query / kBlock + item.batch
                               : (item.batch * call.problem.heads + head) * call.query_blocks;
  return block * kBlock;
}

// cp.async.bulk: addresses and `bytes` are multiples of 16; awaited on `barrier`.
__device__ __forceinline__ void load_bytes(void* shared, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Of an item's rows [from, to) of a tile in panels `panel_bytes` apart, set to +0 by the consumers, who all wait.
template <int kColumns>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int panel_bytes, int from, int to, int thread) {
#pragma unroll 1
  for (int panel = 0; panel < kColumns / kPanel; ++panel) {
    auto* pieces = reinterpret_cast<uint4*>(tile + panel * panel_bytes);
#pragma unroll 1
    for (int piece = from * (kPanelRowBytes / 16) + thread; piece < to * (kPanelRowBytes / 16); piece += kConsumers)
      pieces[piece] = make_uint4(0, 0, 0, 0);
  }
}

// A stage of a ring of `Stages` buffers.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Low word of the matrix descriptor of an operand whose panels are `panel_bytes` apart; the high word is the same for all of them (eight
// rows in 1024 bytes, the 128-byte swizzle). Additions to a word of 32 bits keep descriptors out of the registers of a loop.
__device__ __forceinline__ uint32_t operand_at(const uint8_t* tile, uint32_t panel_bytes) {
  return shared_address(tile) >> 4 | panel_bytes >> 4 << 16;
}

__device__ __forceinline__ uint64_t descriptor_of(uint32_t low) { return uint64_t{1 << 30 | 1024 >> 4} << 32 | low; }

// d (64 x N) = a b^T over all kColumns: a and b are tiles in panels whose inner index is the column.
template <typename Half, int kColumns, int kPanelOfA, int kPanelOfB, int kCount>
__device__ __forceinline__ void multiply_columns(float (&d)[kCount], const uint8_t* a, const uint8_t* b) {
  const uint32_t left = operand_at(a, 0), right = operand_at(b, 0);
#pragma unroll
  for (int step = 0; step < kColumns / kStepColumns; ++step) {
    const int panel = step / 4, inside = step % 4 * static_cast<int>(kColumnStep);
    mma_step<Half>(d, descriptor_of(left + panel * (kPanelOfA >> 4) + inside), descriptor_of(right + panel * (kPanelOfB >> 4) + inside),
                   step == 0 ? 0 : 1);
  }
  mma_commit();
}

// d (64 x N) += a b, or = where `kFresh`: a in registers by steps of 16 rows of b.
template <typename Half, bool kFresh, int kPanelOfB, int kSteps, int kCount>
__device__ __forceinline__ void multiply_rows(float (&d)[kCount], const uint32_t (&a)[kSteps][4], const uint8_t* b) {
  const uint32_t right = operand_at(b, kPanelOfB);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    mma_step<Half, kAlongRows>(d, a[step], descriptor_of(right + step * static_cast<int>(kRowStep)), kFresh && step == 0 ? 0 : 1);
  mma_commit();
}

// Where a consumer thread is: it holds the rows `row` and `row` + 8 of the block's 128, and the columns `column` + 8 j + {0, 1} of a tile.
struct Place {
  int thread, own, row, column;  // `own`: the first row of its warpgroup, known to be the same in a warp
};

__device__ __forceinline__ Place place() {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int own = __shfl_sync(~0u, thread / kWarpgroup, 0) * kWarpgroupRows;
  return Place{thread, own, own + thread % kWarpgroup / 32 * 16 + thread % 32 / 4, 2 * (thread % 4)};
}

// A row of results of a warpgroup: d[4 j + 2 h + e] scaled, as halves; `to` is the element of column 0.
template <typename Half, int kCount>
__device__ __forceinline__ void store_row(void* to, int64_t element, const float (&d)[kCount], int h, float scale) {
  auto* pairs = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(to) + element) + threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) pairs[4 * j] = pair_of<Half>(mul(d[4 * j + 2 * h], scale), mul(d[4 * j + 2 * h + 1], scale));
}

int launch_row_values(const BackwardCall& call, void* stream);
int launch_sink_gradients(const BackwardCall& call, void* stream);
int launch_key_gradients(const BackwardCall& call, void* stream);
int launch_query_gradients(const BackwardCall& call, void* stream);

struct GradientMaps {
  CUtensorMap q, dout, k, v;
};

// A block of dk and dv, or of dq, in a warpgroup that loads and two that compute. shared.begin finds its work and sets up barriers; it has
// something to load where [work.begin, work.end) is not empty.
template <typename Shared, typename Load, typename Consume>
__device__ __forceinline__ void run_block(Shared& shared, const BackwardCall& call, Load load, Consume consume) {
  if (threadIdx.x == 0) {
    shared.begin(call, blockIdx.x);
    barrier_init_fence();
  }
  __syncthreads();
  if (shared.work.block.first < 0) return;
  if (threadIdx.x < kWarpgroup) {
    fewer_registers<kLoaderRegisters>();
    if (threadIdx.x == 0 && shared.work.begin < shared.work.end) load();
  } else {
    more_registers<kConsumerRegisters>();
    consume();
  }
}

// launch(half, columns) for the call's dtype and head dim, given as values of types that hold them.
template <typename Launch>
int with_traits(const BackwardCall& call, Launch launch) {
  const auto with_columns = [&](auto half) {
    if (call.problem.head_dim == 64) return launch(half, std::integral_constant<int, 64>());
    return launch(half, std::integral_constant<int, 128>());
  };
  return call.problem.q.dtype == ATTN_CUDA_BFLOAT16 ? with_columns(attn::bfloat16()) : with_columns(attn::float16());
}

template <typename... Parameters>
int launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, void* stream,
                  const std::common_type_t<Parameters>&... arguments) {
  if (blocks == 0) return 0;
  if (blocks > INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  if (shared_bytes > 48 * 1024) {
    const auto bytes = static_cast<int>(shared_bytes);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The kernel of dk and dv, or of dq, over `blocks` blocks of each of `heads` heads, with tiles of `query_rows` and `key_rows`.
inline int launch_gradients(void (*kernel)(BackwardCall, GradientMaps), const BackwardCall& call, int64_t heads, int64_t blocks,
                            int query_rows, int key_rows, size_t shared_bytes, void* stream) {
  const Attention& problem = call.problem;
  const int64_t items = problem.cu_seqlens_q == nullptr ? problem.batch : 1;
  GradientMaps maps;
  const auto describe = [&](CUtensorMap* map, const Array& array, int64_t of_heads, int64_t rows, int box_rows) {
    return encode_map(map, array.data, array.dtype, {items, of_heads, rows, problem.head_dim}, {array.batch, array.head, array.row},
                      box_rows);
  };
  cudaError_t error = describe(&maps.q, problem.q, problem.heads, problem.queries, query_rows);
  if (error == cudaSuccess) error = describe(&maps.dout, call.dout, problem.heads, problem.queries, query_rows);
  if (error == cudaSuccess) error = describe(&maps.k, problem.k, problem.kv_heads, problem.keys, key_rows);
  if (error == cudaSuccess) error = describe(&maps.v, problem.v, problem.kv_heads, problem.keys, key_rows);
  if (error != cudaSuccess) return error;
  return launch_blocks(kernel, items * heads * blocks, kBackwardThreads, shared_bytes, stream, call, maps);
}

}  // namespace attn_cuda::hopper
