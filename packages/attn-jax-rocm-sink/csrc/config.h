// One attention call as plain data. The workspace is sized from it when a program is traced and the kernels run from the same bytes, so
// that sizing and execution cannot decide differently. Every member has 8 bytes; `_config.py` has the same list.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace attn::engine {

enum class DType : int64_t { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Softmax : int64_t { vanilla = 0, off_by_one = 1, learnable = 2 };
// elementwise: added to the scaled scores.
enum class Bias : int64_t { none = 0, elementwise = 1 };
// Which key is on the diagonal of query 0: the last query sees the last used key, query 0 sees key 0, or values known when the call runs.
enum class Alignment : int64_t { bottom_right = 0, top_left = 1, operands = 2 };
enum class Pass : int64_t { forward = 0, backward = 1 };

// Gradients that a backward pass writes; a sum of these.
enum Gradient : int64_t { kDq = 1, kDk = 2, kDv = 4, kDsinks = 8, kDbias = 16 };

// In elements. Packed arrays leave `batch` unused.
struct Strides {
  int64_t batch, head, row, column;
};

// Axes: B batch, H heads, K kv heads, S queries, T keys, D head dim, V value dim. Packed: q [queries, H, D], k [keys, K, D],
// v [keys, K, V], queries and keys are totals and batch is the number of segments.
struct Config {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  DType dtype;      // of q, k, v, dq, dk and dv
  DType out_dtype;  // of out and dout
  Strides q, k, v, out;
  Softmax softmax;
  Bias bias;
  DType bias_dtype;       // of the buffer that the engine reads
  int64_t bias_shape[4];  // of [B, H, S, T]; 1 on broadcast axes
  int64_t packed;
  int64_t key_padding_mask, kv_lengths, k_start, seqlens;  // operands that the call has
  Alignment alignment;
  int64_t causal, window_left, window_right;  // -1: no bound
  int64_t dlse;                               // backward: the log-sum-exp has a cotangent
  int64_t gradients;                          // backward: sum of Gradient
  int64_t device;                             // index of the device: how many processors it has may decide a workspace
  double scale, dropout_p;
};
static_assert(std::is_trivially_copyable_v<Config> && sizeof(Config) % 8 == 0);

// The two predicates that decide whether a buffer exists, in every list of buffers and in every engine. A pointer never does.
inline bool has_bias(const Config& config) { return config.bias == Bias::elementwise; }
inline bool has_sinks(const Config& config) { return config.softmax != Softmax::vanilla; }
inline bool has_dropout(const Config& config) { return config.dropout_p > 0; }
inline bool wants(const Config& config, Gradient gradient) { return (config.gradients & gradient) != 0; }

inline int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }
inline const char* name_of(DType dtype) {
  return dtype == DType::float32 ? "float32" : dtype == DType::bfloat16 ? "bfloat16" : dtype == DType::float16 ? "float16" : "unknown";
}
inline const char* name_of(Softmax softmax) {
  return softmax == Softmax::vanilla ? "vanilla" : softmax == Softmax::off_by_one ? "off_by_one" : "learnable";
}

// Strides of the contiguous bias over [B, H, S, T]: 0 on broadcast axes.
inline Strides bias_strides(const Config& config) {
  const int64_t (&shape)[4] = config.bias_shape;
  return {shape[0] == 1 ? 0 : shape[1] * shape[2] * shape[3], shape[1] == 1 ? 0 : shape[2] * shape[3], shape[2] == 1 ? 0 : shape[3],
          shape[3] == 1 ? 0 : 1};
}

inline int64_t bias_count(const Config& config) {
  if (!has_bias(config)) return 0;
  return config.bias_shape[0] * config.bias_shape[1] * config.bias_shape[2] * config.bias_shape[3];
}

// Rows of queries over all batch items or segments.
inline int64_t outer_of(const Config& config) { return config.packed ? 1 : config.batch; }
inline int64_t rows_of(const Config& config) { return outer_of(config) * config.heads * config.queries; }

// Becomes INVALID_ARGUMENT in XLA.
class InvalidCall : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

inline Config config_from(const int64_t* words, size_t count) {
  if (count != sizeof(Config) / 8)
    throw InvalidCall("a configuration of " + std::to_string(sizeof(Config) / 8) + " words was expected, not of " + std::to_string(count));
  Config config;
  std::memcpy(static_cast<void*>(&config), words, sizeof(Config));
  return config;
}

}  // namespace attn::engine
