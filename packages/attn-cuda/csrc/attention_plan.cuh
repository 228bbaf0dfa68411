// Host side of an attention call: checks, the workspace, and how its rows and keys are cut into blocks.
#pragma once

#include <type_traits>

#include "attention_problem.cuh"

namespace attn_cuda {

constexpr int64_t kAlignment = 256;

inline int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What the shapes of blocks depend on. They move no bit.
struct Limits {
  int processors;
  int shared_bytes;  // a block may have: 99 KiB on some devices, 163 or 227 on others
};

int find_limits(int device, Limits* limits);

constexpr size_t kStaticBytes = 2048;  // shared memory that kernels declare, at most

inline bool fits(const Limits& limits, size_t dynamic_bytes) {
  return dynamic_bytes + kStaticBytes <= static_cast<size_t>(limits.shared_bytes);
}

// Blocks that a multiprocessor holds at a time, up to `most`. It may have 1 KiB more than a block, and keeps as much for each.
inline int blocks_that_fit(const Limits& limits, size_t dynamic_bytes, int most) {
  const size_t block = dynamic_bytes + kStaticBytes + 1024;
  return static_cast<int>(clamped(static_cast<int64_t>((static_cast<size_t>(limits.shared_bytes) + 1024) / block), 1, most));
}

// Warps of a block, as many as shared memory allows: `bytes_of(warps)` bytes.
template <typename BytesOf>
int choose_warps(const Limits& limits, BytesOf bytes_of) {
  int warps = 8;
  while (warps > 2 && !fits(limits, bytes_of(warps))) warps /= 2;
  return warps;
}

// Column count that a kernel is compiled for. There is one for two warps.
inline int width_of(int64_t columns, int warps) { return warps == 2 || columns > 128 ? 256 : columns > 64 ? 128 : 64; }

// use(std::integral_constant<int, width>)
template <typename Use>
auto with_width(int width, Use use) {
  if (width == 64) return use(std::integral_constant<int, 64>());
  if (width == 128) return use(std::integral_constant<int, 128>());
  return use(std::integral_constant<int, 256>());
}

inline int32_t columns_in_eights(int64_t columns) { return static_cast<int32_t>((columns + 7) / 8 * 8); }

// Hands out pieces of the caller's workspace in order.
class Workspace {
 public:
  explicit Workspace(void* data) : data_(static_cast<char*>(data)) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(data_);
    data_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return piece;
  }

 private:
  char* data_;
};

// Blocks of one kernel over rows or keys; see find_work.
struct Blocks {
  int64_t count, per_item;
  const int64_t* plan;
};

int check_attention(const attn_cuda_attention& problem);

inline int64_t plan_bytes(const attn_cuda_attention& problem, int plans) {
  return problem.cu_seqlens_q == nullptr ? 0 : plans * aligned((problem.batch + 1) * 8);
}

// An input as the kernels read it, with `heads` heads, `rows` rows of each and `columns` columns. One that is not laid out for 16-byte
// accesses is copied to the workspace.
struct Input {
  const attn_cuda_array& array;
  int64_t heads, rows, columns;
};

int64_t copy_bytes(const attn_cuda_attention& problem, const Input& input);
int take_input(const attn_cuda_attention& problem, const Input& input, Workspace& space, void* stream, Array* array);

// The copy, whatever the layout.
int copy_input(const attn_cuda_attention& problem, const Input& input, Workspace& space, void* stream, Array* array);

// Workspace of `prepare`.
int64_t input_bytes(const attn_cuda_attention& problem);

// Compacts the key mask, copies inputs where needed and fills in the kernels' parameter.
int prepare(int device, void* stream, const attn_cuda_attention& problem, Workspace& space, Attention* attention);

int64_t count_blocks(const attn_cuda_attention& problem, int size, bool of_keys);

// How kernels that take rows in turns are spread: warps of a block, blocks that are in work, and tiles that the workspace holds for each:
// `warp_tile` floats a warp. All that the rows see, if this takes no more than 512 MiB in all; whatever the shape, it does not grow beyond.
struct RowsInWork {
  int warps;
  int64_t count, held_tiles, bytes;  // of the workspace, which has room for one more tile
};

RowsInWork rows_in_work(const Limits& limits, const attn_cuda_attention& problem, int warps, size_t shared_bytes, int most_blocks,
                        int64_t warp_tile);

// Launches kernel_of(width, warps), for `columns` columns, on the blocks in work.
template <typename KernelOf, typename Arguments>
int launch_in_work(KernelOf kernel_of, int64_t columns, const Arguments& arguments, const RowsInWork& rows, size_t shared_bytes,
                   void* stream) {
  const Block block{rows.warps * kLanes, 1, true, false, shared_bytes};
  return with_width(width_of(columns, rows.warps), [&](auto width) {
    using Width = decltype(width);
    auto kernel = kernel_of(Width(), std::integral_constant<int, 8>());
    if (rows.warps == 4) kernel = kernel_of(Width(), std::integral_constant<int, 4>());
    if constexpr (Width::value == 256)
      if (rows.warps == 2) kernel = kernel_of(Width(), std::integral_constant<int, 2>());
    return static_cast<int>(launch(kernel, arguments, rows.count, block, stream));
  });
}

// Blocks of `size` rows of each kv head's group, or of `size` logical keys.
int plan_rows(const attn_cuda_attention& problem, const Attention& attention, int size, Workspace& space, void* stream, Blocks* blocks);
int plan_keys(const attn_cuda_attention& problem, const Attention& attention, int size, Workspace& space, void* stream, Blocks* blocks);

int fill_bytes(void* data, int64_t bytes, void* stream);
int fill_dead(float* lse, int64_t rows, void* stream);  // -inf
int fill_empty_rows(float* lse, float* row_max, float* row_sum, int64_t rows, void* stream);

inline bool stores_fours(const void* data, int32_t dtype, int64_t width) {
  return width % 4 == 0 && reinterpret_cast<uintptr_t>(data) % (4 * size_of(dtype)) == 0;
}

}  // namespace attn_cuda
