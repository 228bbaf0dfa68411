// One attention call of the host kernels, read from named FFI operands and attributes.
#pragma once

#include "convert.h"

namespace attn::xla_host {

// Attributes that forward and backward share.
struct Options {
  bool causal;
  int64_t window_left, window_right;  // -1: no bound
  float scale;
  double dropout_p;
};

// Owns what ``problem`` points to beside the XLA buffers.
class Call {
 public:
  Call(const Buffers& operands, const Options& options) {
    read_sizes(operands);
    read_masks(operands);
    read_optional(operands);
    problem.causal = options.causal;
    problem.window_left = options.window_left;
    problem.window_right = options.window_right;
    problem.scale = options.scale;
    problem.dropout_p = options.dropout_p;
    if (const ffi::AnyBuffer* seed = operands.find("dropout_seed")) {
      require_type("dropout_seed", *seed, ffi::U32);
      require_shape("dropout_seed", *seed, {4});
      const uint32_t* words = static_cast<const uint32_t*>(data_of(*seed));
      problem.dropout_seed = static_cast<uint64_t>(words[1]) << 32 | words[0];
      problem.dropout_item = words[2];
      problem.dropout_head = words[3];
    } else if (options.dropout_p > 0) {
      throw InvalidCall("dropout needs operand dropout_seed");
    }
    if (const char* message = host::check_attention(problem)) throw InvalidCall(message);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::vector<int64_t> row_shape() const { return {problem.batch, problem.heads, problem.queries}; }
  std::vector<int64_t> out_shape() const { return {problem.batch, problem.heads, problem.queries, problem.value_dim}; }

  host::AttentionProblem problem{};

 private:
  void read_sizes(const Buffers& operands) {
    const ffi::AnyBuffer &q = operands.at("q"), &k = operands.at("k"), &v = operands.at("v");
    if (q.dimensions().size() != 4 || k.dimensions().size() != 4 || v.dimensions().size() != 4)
      throw InvalidCall("q, k and v must have 4 axes");
    problem.batch = q.dimensions()[0];
    problem.heads = q.dimensions()[1];
    problem.queries = q.dimensions()[2];
    problem.head_dim = q.dimensions()[3];
    problem.kv_heads = k.dimensions()[1];
    problem.keys = k.dimensions()[2];
    problem.value_dim = v.dimensions()[3];
    require_shape("k", k, {problem.batch, problem.kv_heads, problem.keys, problem.head_dim});
    require_shape("v", v, {problem.batch, problem.kv_heads, problem.keys, problem.value_dim});
    if (problem.kv_heads < 1 || problem.heads % problem.kv_heads != 0) throw InvalidCall("query heads must be a multiple of kv heads");
    problem.dtype = float_type("q", q);
    require_type("k", k, q.element_type());
    require_type("v", v, q.element_type());
    problem.q = {data_of(q), dense(problem.heads, problem.queries, problem.head_dim)};
    problem.k = {data_of(k), dense(problem.kv_heads, problem.keys, problem.head_dim)};
    problem.v = {data_of(v), dense(problem.kv_heads, problem.keys, problem.value_dim)};
  }

  void read_masks(const Buffers& operands) {
    if (const ffi::AnyBuffer* mask = operands.find("key_padding_mask")) {
      require_type("key_padding_mask", *mask, ffi::PRED);
      require_shape("key_padding_mask", *mask, {problem.batch, problem.keys});
      problem.key_mask = static_cast<const uint8_t*>(data_of(*mask));
    }
    problem.kv_lengths = read_integers(operands, "kv_lengths", kv_lengths_);
    problem.q_start = read_integers(operands, "q_start", q_start_);
    problem.k_start = read_integers(operands, "k_start", k_start_);
  }

  void read_optional(const Buffers& operands) {
    if (const ffi::AnyBuffer* sinks = operands.find("sinks")) {
      require_shape("sinks", *sinks, {problem.heads});
      sinks_ = FloatOperand("sinks", *sinks);
      problem.sinks = sinks_.data();
    }
    if (const ffi::AnyBuffer* bias = operands.find("bias")) {
      const auto shape = bias->dimensions();
      const int64_t full[4] = {problem.batch, problem.heads, problem.queries, problem.keys};
      if (shape.size() != 4) throw InvalidCall("bias must have 4 axes");
      for (int axis = 0; axis < 4; ++axis)
        if (shape[axis] != 1 && shape[axis] != full[axis]) throw InvalidCall("bias has a shape that does not fit the other operands");
      bias_ = FloatOperand("bias", *bias);
      problem.bias = bias_.data();
      const host::Strides strides = dense(shape[1], shape[2], shape[3]);
      problem.bias_strides = {shape[0] == 1 ? 0 : strides.batch, shape[1] == 1 ? 0 : strides.head, shape[2] == 1 ? 0 : strides.row,
                              shape[3] == 1 ? 0 : strides.column};
    }
  }

  const int64_t* read_integers(const Buffers& operands, std::string_view name, std::vector<int64_t>& storage) {
    const ffi::AnyBuffer* buffer = operands.find(name);
    if (buffer == nullptr) return nullptr;
    storage = integers(name, *buffer, problem.batch);
    return storage.data();
  }

 public:
  static host::Strides dense(int64_t heads, int64_t rows, int64_t columns) { return {heads * rows * columns, rows * columns, columns, 1}; }

 private:
  std::vector<int64_t> kv_lengths_, q_start_, k_start_;
  FloatOperand sinks_, bias_;
};

}  // namespace attn::xla_host
