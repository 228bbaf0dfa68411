// joint_attn_qk_gemm and joint_attn_av_gemm, forward and backward: three layouts of one tiled product.
#include "gemm_tile.cuh"
#include "launch.cuh"

namespace attn_cuda {
namespace {

struct ProductArguments {
  GroupedRows left, right;
  int64_t rows;     // outputs of one kv head of one batch item
  int32_t columns;  // of the outputs
  int64_t depth;
  int64_t row_tiles, column_tiles;
  int32_t kv_heads;
  float scale;
  void* out;
  int32_t out_dtype;
  bool vectors;
};

template <typename Left, typename Right>
__global__ void __launch_bounds__(kGemmThreads, 2) product_kernel(const __grid_constant__ ProductArguments arguments) {
  __shared__ float4 storage[2][2][kGemmDepth * kGemmPitch / 4];
  const int64_t tiles = arguments.row_tiles * arguments.column_tiles;
  const int64_t item = blockIdx.x / tiles, tile = blockIdx.x - item * tiles;
  const int64_t batch = item / arguments.kv_heads, kv_head = item - batch * arguments.kv_heads;
  const int64_t row = tile / arguments.column_tiles * kGemmTile;
  const auto column = static_cast<int32_t>(tile % arguments.column_tiles * kGemmTile);
  const int64_t left_base = batch * arguments.left.array.batch + kv_head * arguments.left.group * arguments.left.array.head;
  const int64_t right_base = batch * arguments.right.array.batch + kv_head * arguments.right.group * arguments.right.array.head;
  Left left(arguments.left, left_base, row, static_cast<int32_t>(row));
  Right right(arguments.right, right_base, column, column);
  const GemmPlace place;
  float acc[8][8];
#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n) acc[m][n] = 0.0f;

  Eight next_left = left.load(arguments.left), next_right = right.load(arguments.right);
  int side = 0;
  for (int64_t k = 0; k < arguments.depth; k += kGemmDepth) {
    auto* left_tile = reinterpret_cast<float*>(storage[side][0]);
    auto* right_tile = reinterpret_cast<float*>(storage[side][1]);
    left.store(next_left, arguments.left.array.dtype, left_tile);
    right.store(next_right, arguments.right.array.dtype, right_tile);
    __syncthreads();
    if (k + kGemmDepth < arguments.depth) {
      left.advance(arguments.left);
      right.advance(arguments.right);
      next_left = left.load(arguments.left);
      next_right = right.load(arguments.right);
    }
    multiply_depth(left_tile, right_tile, place, acc);
    side ^= 1;
  }

#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const int64_t out_row = row + place.row + m % 4 + m / 4 * (kGemmTile / 2);
    if (out_row >= arguments.rows) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t out_column = column + place.column + half * (kGemmTile / 2);
      float four[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) four[n] = attn::mul(acc[m][half * 4 + n], arguments.scale);
      store_four(arguments.out, arguments.out_dtype, (item * arguments.rows + out_row) * arguments.columns + out_column, four,
                 arguments.columns - out_column, arguments.vectors);
    }
  }
}

int check_product(const attn_cuda_product& product) {
  if (!is_dtype(product.left.dtype) || !is_dtype(product.right.dtype) || !is_dtype(product.out_dtype)) return ATTN_CUDA_BAD_DTYPE;
  for (const int64_t size : {product.batch, product.heads, product.queries, product.keys, product.width})
    if (size < 0 || size >= INT32_MAX - kGemmTile) return ATTN_CUDA_BAD_SIZE;
  if (product.kv_heads < 1 || product.heads % product.kv_heads != 0) return ATTN_CUDA_BAD_SIZE;
  return product.kind < ATTN_CUDA_OVER_WIDTH || product.kind > ATTN_CUDA_OVER_QUERIES ? ATTN_CUDA_BAD_SIZE : 0;
}

template <Access LeftKind, Access RightKind>
int launch_product(int32_t kind, const ProductArguments& arguments, int64_t blocks, void* stream) {
  void (*kernel)(ProductArguments) = product_kernel<RowsAreDepth<LeftKind>, RowsAreDepth<RightKind>>;
  if (kind == ATTN_CUDA_OVER_WIDTH) kernel = product_kernel<ColumnsAreDepth<LeftKind>, ColumnsAreDepth<RightKind>>;
  if (kind == ATTN_CUDA_OVER_KEYS) kernel = product_kernel<ColumnsAreDepth<LeftKind>, RowsAreDepth<RightKind>>;
  return launch(kernel, arguments, blocks, Block{kGemmThreads, 1, true, false, 0}, stream);
}

int launch_product(int32_t kind, const ProductArguments& arguments, int64_t blocks, void* stream) {
  const Access left = access_of(arguments.left.array), right = access_of(arguments.right.array);
  if (left == Access::floats && right == Access::floats)
    return launch_product<Access::floats, Access::floats>(kind, arguments, blocks, stream);
  if (left == Access::floats && right == Access::halves)
    return launch_product<Access::floats, Access::halves>(kind, arguments, blocks, stream);
  if (left == Access::halves && right == Access::halves)
    return launch_product<Access::halves, Access::halves>(kind, arguments, blocks, stream);
  return launch_product<Access::any, Access::any>(kind, arguments, blocks, stream);
}

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_product_run(int device, void* stream, const attn_cuda_product* product) {
  using namespace attn_cuda;
  if (product == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check_product(*product)) return refusal;
  const auto group = static_cast<int32_t>(product->heads / product->kv_heads);
  const auto queries = static_cast<int32_t>(product->queries), keys = static_cast<int32_t>(product->keys),
             width = static_cast<int32_t>(product->width);
  const int64_t rows = product->queries * group;
  const bool over_queries = product->kind == ATTN_CUDA_OVER_QUERIES, over_width = product->kind == ATTN_CUDA_OVER_WIDTH;
  ProductArguments arguments{};
  arguments.left = GroupedRows{array_of(product->left, over_width ? width : keys), group, queries};
  arguments.right =
      over_queries ? GroupedRows{array_of(product->right, width), group, queries} : GroupedRows{array_of(product->right, width), 1, keys};
  arguments.rows = over_queries ? keys : rows;
  arguments.columns = over_width ? keys : width;
  arguments.depth = over_width ? width : over_queries ? rows : keys;
  arguments.row_tiles = (arguments.rows + kGemmTile - 1) / kGemmTile;
  arguments.column_tiles = (arguments.columns + kGemmTile - 1) / kGemmTile;
  arguments.kv_heads = static_cast<int32_t>(product->kv_heads);
  arguments.scale = product->scale;
  arguments.out = product->out;
  arguments.out_dtype = product->out_dtype;
  const int64_t items = product->batch * product->kv_heads;
  const int64_t blocks = items * arguments.row_tiles * arguments.column_tiles;
  if (blocks == 0) return 0;
  if (blocks >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  if (product->out == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (arguments.depth > 0 && (product->left.data == nullptr || product->right.data == nullptr)) return ATTN_CUDA_NULL_POINTER;
  arguments.vectors = arguments.columns % 4 == 0 && reinterpret_cast<uintptr_t>(product->out) % (4 * size_of(product->out_dtype)) == 0;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  return launch_product(product->kind, arguments, blocks, stream);
}
