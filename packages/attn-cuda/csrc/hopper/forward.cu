// Host side of the forward pass of sm90-v1: checks, workspace, tensor maps, and which kernels run.
#include "hopper/forward.h"

#include "hopper/forward.cuh"

namespace attn_cuda::hopper {
namespace {

constexpr int64_t kCacheBytes = int64_t{32} << 20;      // of keys and values that are read together; the second-level cache has 50 MB
constexpr int64_t kMostPartBytes = int64_t{512} << 20;  // of states of segments

int check(const attn_cuda_attention& problem) {
  if (const int refusal = check_attention(problem)) return refusal;
  if (problem.q.dtype != ATTN_CUDA_BFLOAT16 && problem.q.dtype != ATTN_CUDA_FLOAT16) return ATTN_CUDA_BAD_DTYPE;
  if ((problem.head_dim != 64 && problem.head_dim != 128) || problem.value_dim != problem.head_dim) return ATTN_CUDA_BAD_SIZE;
  if (problem.query_mask != nullptr || problem.bias != nullptr) return ATTN_CUDA_BAD_SIZE;
  if (problem.key_mask != nullptr && !may_have_hole(problem)) return ATTN_CUDA_BAD_SIZE;
  return 0;
}

bool is_packed(const attn_cuda_attention& problem) { return problem.cu_seqlens_q != nullptr; }

int64_t row_count(const attn_cuda_attention& problem) { return problem.heads * problem.queries * (is_packed(problem) ? 1 : problem.batch); }

// Segments that blocks of their own take, or 0: only a question of speed, since both ways give the same bits. Few rows (decode) are always
// split. Packed calls never are, nor are those with a hole in the keys: how many keys there are is known on the device alone.
int64_t split_segments(const attn_cuda_attention& problem, int processors) {
  if (is_packed(problem) || problem.key_mask != nullptr) return 0;
  const int64_t rows = problem.queries * (problem.heads / problem.kv_heads);
  const int64_t lead = problem.k_start == nullptr ? 0 : attn::sm90::kSegment - 1;
  const int64_t segments = (problem.keys + lead + attn::sm90::kSegment - 1) / attn::sm90::kSegment;
  if (segments < 2) return 0;
  const int64_t blocks = count_blocks(problem, static_cast<int>(whole_rows(problem.head_dim)), false);
  if (rows > kSegmentRows && 2 * blocks > processors) return 0;
  return segments * row_count(problem) * problem.head_dim * 4 <= kMostPartBytes ? segments : 0;
}

int64_t part_bytes(const attn_cuda_attention& problem, int64_t segments) {
  const int64_t states = segments * row_count(problem);
  return 2 * aligned(states * 4) + aligned(states * problem.head_dim * 4);
}

Input key_input(const attn_cuda_attention& problem, const attn_cuda_array& array) {
  return Input{array, problem.kv_heads, problem.keys, problem.head_dim};
}

// Sizes and strides of keys or values as a tensor map has them.
struct Layout {
  int64_t sizes[4], strides[3];

  Layout(const attn_cuda_attention& problem, int64_t batch, int64_t head, int64_t row)
      : sizes{is_packed(problem) ? 1 : problem.batch, problem.kv_heads, problem.keys, problem.head_dim}, strides{batch, head, row} {}
};

bool mappable(const attn_cuda_attention& problem, const attn_cuda_array& array) {
  const Layout layout(problem, array.strides[0], array.strides[1], array.strides[2]);
  return can_map(array.data, layout.sizes, layout.strides, array.strides[3]);
}

// A copy of keys or values that 16-byte accesses could read, and a tensor map cannot describe (an expanded axis).
bool needs_copy(const attn_cuda_attention& problem, const attn_cuda_array& array) {
  return problem.keys > 0 && copy_bytes(problem, key_input(problem, array)) == 0 && !mappable(problem, array);
}

int64_t extra_copy_bytes(const attn_cuda_attention& problem) {
  const int64_t bytes = aligned((is_packed(problem) ? 1 : problem.batch) * problem.kv_heads * problem.keys * problem.head_dim * 2);
  return (needs_copy(problem, problem.k) ? bytes : 0) + (needs_copy(problem, problem.v) ? bytes : 0);
}

int describe(const attn_cuda_attention& problem, const attn_cuda_array& given, Workspace& space, void* stream, Array* array,
             CUtensorMap* map) {
  if (needs_copy(problem, given))
    if (const int error = copy_input(problem, key_input(problem, given), space, stream, array)) return error;
  if (problem.keys == 0) return 0;
  const Layout layout(problem, array->batch, array->head, array->row);
  return encode_map(map, array->data, array->dtype, layout.sizes, layout.strides, kTileKeys);
}

int find_processors(int device, int* processors) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaSuccess && (major != 9 || minor != 0)) error = cudaErrorNoKernelImageForDevice;
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
}

int64_t section_of(const attn_cuda_attention& problem) {
  const int64_t bytes = 4 * problem.keys * problem.head_dim;
  return bytes == 0 ? 1 : clamped(kCacheBytes / bytes, 1, problem.batch * problem.kv_heads);
}

}  // namespace
}  // namespace attn_cuda::hopper

extern "C" int attn_cuda_sm90_forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes) {
  using namespace attn_cuda::hopper;
  if (problem == nullptr || bytes == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check(*problem)) return refusal;
  int processors = 0;
  if (const int error = find_processors(device, &processors)) return error;
  const int64_t segments = split_segments(*problem, processors);
  *bytes = attn_cuda::input_bytes(with_all_keys(*problem)) + hole_bytes(*problem) + extra_copy_bytes(*problem) +
           attn_cuda::plan_bytes(*problem, 1) + (segments == 0 ? attn_cuda::aligned(sizeof(uint32_t)) : part_bytes(*problem, segments));
  return 0;
}

extern "C" int attn_cuda_sm90_forward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                                      const attn_cuda_sm90_results* results, void* workspace) {
  using namespace attn_cuda;
  using namespace attn_cuda::hopper;
  if (problem == nullptr || results == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check(*problem)) return refusal;
  const int64_t rows = row_count(*problem);
  if (rows == 0) return 0;
  if (results->out == nullptr || results->lse == nullptr) return ATTN_CUDA_NULL_POINTER;
  int processors = 0;
  if (const int error = find_processors(device, &processors)) return error;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  Workspace space(workspace);
  ForwardArguments arguments{};
  Attention& attention = arguments.problem;
  if (const int error = prepare(device, stream, with_all_keys(*problem), space, &attention)) return error;
  if (const int error = find_holes(*problem, space, stream, &arguments.holes)) return error;
  if (const int error = describe(*problem, problem->k, space, stream, &attention.k, &arguments.k)) return error;
  if (const int error = describe(*problem, problem->v, space, stream, &attention.v, &arguments.v)) return error;
  arguments.factor = factor;
  arguments.out = results->out;
  arguments.lse = results->lse;
  arguments.garbage = is_packed(*problem) || problem->kv_lengths != nullptr;
  if (is_packed(*problem)) {
    if (const int error = fill_bytes(results->out, rows * problem->head_dim * 2, stream)) return error;
    if (const int error = fill_dead(results->lse, rows, stream)) return error;
  }
  const int64_t segments = split_segments(*problem, processors);
  const int size = segments > 0 ? kSegmentRows : static_cast<int>(whole_rows(problem->head_dim));
  Blocks blocks;
  if (const int error = plan_rows(*problem, attention, size, space, stream, &blocks)) return error;
  arguments.order = WorkOrder{blocks.per_item, blocks.plan, section_of(*problem)};
  if (blocks.count == 0) return 0;
  arguments.blocks = blocks.count;
  if (segments == 0) {
    if (blocks.count <= processors) return launch_whole(arguments, blocks.count, stream);
    arguments.counter = space.take<uint32_t>(1);
    if (const int error = fill_bytes(arguments.counter, sizeof(uint32_t), stream)) return error;
    return launch_whole(arguments, processors, stream);
  }
  if (blocks.count * segments >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  arguments.segments = static_cast<int32_t>(segments);
  arguments.part_n = space.take<float>(segments * rows);
  arguments.part_sum = space.take<float>(segments * rows);
  arguments.part_o = space.take<float>(segments * rows * problem->head_dim);
  return launch_segments(arguments, blocks.count, rows, stream);
}
