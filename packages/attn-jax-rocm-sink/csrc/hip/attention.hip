// Launches of the HIP attention kernels: grids, and the order of the kernels on the stream.
#include <hip/hip_runtime.h>

#include "attention.h"
#include "bias_gradient_kernel.h"
#include "forward_kernel.h"
#include "key_gradient_kernel.h"
#include "sum_kernels.h"

namespace attn::hip {
namespace {

constexpr int64_t kMostBlocks = 1 << 20;  // a grid of 2^32 threads cannot be launched; blocks take further work in turns

template <typename Arguments>
hipError_t launch(void (*kernel)(Arguments), Arguments arguments, int64_t blocks, hipStream_t stream) {
  if (blocks <= 0) return hipSuccess;
  arguments.blocks = blocks;
  arguments.grid = blocks < kMostBlocks ? blocks : kMostBlocks;
  void* parameters[] = {&arguments};
  return hipLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<uint32_t>(arguments.grid)), dim3(kThreads), parameters, 0,
                         stream);
}

hipError_t prepare(const Config& config, const Tensors& tensors, const Space& space, hipStream_t stream, Attention* attention) {
  attention->config = config;
  attention->tensors = tensors;
  attention->bias_strides = engine::bias_strides(config);
  attention->group = config.heads / config.kv_heads;
  attention->key_positions = space.key_positions;
  attention->key_counts = space.key_counts;
  attention->scale = static_cast<float>(config.scale);
  attention->dropout = make_dropout(config.dropout_p, 0);
  if (space.key_positions == nullptr) return hipSuccess;
  return launch(compact_keys_kernel, CompactArguments{tensors.key_padding_mask, config.keys, space.key_positions, space.key_counts, 0, 0},
                config.batch, stream);
}

// Blocks of eight rows for each kv head; a block more for each packed segment, whose last one may be partial.
int64_t blocks_over(const Config& config, int64_t rows) {
  const int64_t blocks = config.packed != 0 ? owned_blocks(rows) + config.batch : config.batch * owned_blocks(rows);
  return blocks * config.kv_heads;
}

// Packed results have rows that belong to no segment.
hipError_t clear(void* data, int64_t rows, int64_t heads, int64_t columns, DType dtype, hipStream_t stream) {
  const int64_t bytes = rows * heads * columns * engine::size_of(dtype);
  return data == nullptr || bytes == 0 ? hipSuccess : hipMemsetAsync(data, 0, static_cast<size_t>(bytes), stream);
}

hipError_t clear_forward(const Config& config, const Tensors& tensors, hipStream_t stream) {
  if (config.packed == 0) return hipSuccess;
  if (const hipError_t error = clear(tensors.out, config.queries, config.heads, config.value_dim, config.out_dtype, stream)) return error;
  const int64_t rows = engine::rows_of(config);
  return launch(empty_rows_kernel, EmptyRowsArguments{tensors, rows, 0, 0}, (rows + kThreads - 1) / kThreads, stream);
}

hipError_t clear_backward(const Config& config, const Tensors& tensors, hipStream_t stream) {
  if (config.packed == 0) return hipSuccess;
  if (const hipError_t error = clear(tensors.dq, config.queries, config.heads, config.head_dim, config.dtype, stream)) return error;
  if (const hipError_t error = clear(tensors.dk, config.keys, config.kv_heads, config.head_dim, config.dtype, stream)) return error;
  return clear(tensors.dv, config.keys, config.kv_heads, config.value_dim, config.dtype, stream);
}

int64_t bias_blocks(const int64_t (&shape)[4]) { return shape[0] * shape[1] * owned_blocks(shape[2]) * ((shape[3] + kTile - 1) / kTile); }

}  // namespace

int attention_forward(const Config& config, const Tensors& tensors, const Space& space, void* stream) {
  const hipStream_t on = static_cast<hipStream_t>(stream);
  ForwardArguments arguments{};
  if (const hipError_t error = prepare(config, tensors, space, on, &arguments.attention)) return error;
  if (const hipError_t error = clear_forward(config, tensors, on)) return error;
  return launch(attention_forward_kernel, arguments, blocks_over(config, arguments.attention.group * config.queries), on);
}

int attention_backward(const Config& config, const Tensors& tensors, const Space& space, void* stream) {
  const hipStream_t on = static_cast<hipStream_t>(stream);
  BackwardArguments arguments{};
  const Attention& attention = arguments.attention;
  if (const hipError_t error = prepare(config, tensors, space, on, &arguments.attention)) return error;
  if (const hipError_t error = clear_backward(config, tensors, on)) return error;
  arguments.delta = space.delta;
  arguments.dsink = space.dsink;
  const int64_t row_blocks = blocks_over(config, attention.group * config.queries);
  if (const hipError_t error = launch(attention_query_gradient_kernel, arguments, row_blocks, on)) return error;
  if (tensors.dk != nullptr || tensors.dv != nullptr)
    if (const hipError_t error = launch(attention_key_gradient_kernel, arguments, blocks_over(config, config.keys), on)) return error;
  if (tensors.dsinks != nullptr) {
    const SinkArguments sinks{attention, space.dsink, space.sink_items, 0, 0};
    if (const hipError_t error = launch(attention_sink_gradient_kernel, sinks, config.heads, on)) return error;
  }
  if (tensors.dbias == nullptr) return hipSuccess;
  return launch(attention_bias_gradient_kernel, arguments, bias_blocks(config.bias_shape), on);
}

const char* error_message(int code) { return hipGetErrorString(static_cast<hipError_t>(code)); }

}  // namespace attn::hip
