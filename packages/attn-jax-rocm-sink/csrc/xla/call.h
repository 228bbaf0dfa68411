// One call of an engine, unpacked from named XLA buffers by the lists of tensors.h. Every buffer is checked against the configuration
// before the engine runs.
#pragma once

#include <algorithm>
#include <deque>
#include <limits>

#include "../engine.h"
#include "convert.h"

namespace attn::engine {

// Where the buffers lie. Small operands in host memory may have other types and are converted here; a device has no such step, and takes
// float32 (the bias in `bias_dtype`), and int64 or pairs of int32 (low word first), since JAX has no int64 without its 64-bit mode.
enum class Memory { host, device };

class Call {
 public:
  Call(const Engine& engine, Pass pass, Memory memory, const Config& config, const Buffers& operand_buffers, const Buffers& result_buffers)
      : engine_(engine), pass_(pass), memory_(memory), config_(config) {
    const std::string reasons = engine.supports(config, pass);
    if (!reasons.empty()) throw InvalidCall(std::string("engine ") + engine.name() + " does not run this call: " + reasons);
    const auto wanted = operands(config, pass, engine.kept());
    operand_buffers.require_only(wanted, {});
    for (std::string_view name : wanted) at(tensors_, name) = const_cast<void*>(operand(name, operand_buffers.at(name)));
    const auto written = results(config, pass, engine.kept());
    result_buffers.require_only(written, {"workspace"});
    for (std::string_view name : written) at(tensors_, name) = result(name, result_buffers.at(name));
    const ffi::AnyBuffer& workspace = result_buffers.at("workspace");
    require_type("workspace", workspace, ffi::U8);
    workspace_ = data_of(workspace);
    workspace_bytes_ = static_cast<int64_t>(workspace.element_count());
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void run(void* stream) {
    if (pass_ == Pass::forward) {
      engine_.forward(config_, tensors_, workspace_, workspace_bytes_, stream);
    } else {
      engine_.backward(config_, tensors_, workspace_, workspace_bytes_, stream);
    }
    for (const FloatResult& gradient : narrow_) gradient.store();
  }

 private:
  static bool is_any_of(std::string_view name, std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  // Elements of an array that lies in memory by `strides`, every element of the buffer once.
  int64_t count_of(std::string_view name, int64_t heads, int64_t rows, int64_t columns, const Strides& strides) const {
    const int64_t outer = outer_of(config_);
    const int64_t sizes[4] = {outer, heads, rows, columns}, steps[4] = {strides.batch, strides.head, strides.row, strides.column};
    int64_t count = 1, last = 0;
    for (int axis = 0; axis < 4; ++axis) {
      if (sizes[axis] < 0) throw InvalidCall("an axis of " + std::string(name) + " has a negative size");
      if (sizes[axis] > 1 && steps[axis] < 0) throw InvalidCall(std::string(name) + " has a negative stride");
      count *= sizes[axis];
      last += sizes[axis] > 1 ? (sizes[axis] - 1) * steps[axis] : 0;
    }
    if (count > 0 && last >= count) throw InvalidCall("the strides of " + std::string(name) + " leave its buffer");
    return count;
  }

  int64_t count_of(std::string_view name) const {
    const Config& config = config_;
    if (is_any_of(name, {"q", "dq"})) return count_of(name, config.heads, config.queries, config.head_dim, config.q);
    if (is_any_of(name, {"k", "dk"})) return count_of(name, config.kv_heads, config.keys, config.head_dim, config.k);
    if (is_any_of(name, {"v", "dv"})) return count_of(name, config.kv_heads, config.keys, config.value_dim, config.v);
    if (is_any_of(name, {"out", "dout"})) return count_of(name, config.heads, config.queries, config.value_dim, config.out);
    if (is_any_of(name, {"lse", "dlse", "row_max", "row_sum"})) return rows_of(config);
    if (is_any_of(name, {"sinks", "dsinks"})) return config.heads;
    if (is_any_of(name, {"kv_lengths", "q_start", "k_start", "seqlens_q", "seqlens_k"})) return config.batch;
    if (is_any_of(name, {"cu_seqlens_q", "cu_seqlens_k"})) return config.batch + 1;
    if (name == "key_padding_mask") return config.batch * config.keys;
    if (name == "dropout_seed") return 4;
    return checked_bias_count();
  }

  int64_t checked_bias_count() const {
    const int64_t full[4] = {config_.batch, config_.heads, config_.queries, config_.keys};
    for (int axis = 0; axis < 4; ++axis)
      if (config_.bias_shape[axis] != 1 && config_.bias_shape[axis] != full[axis])
        throw InvalidCall("bias has a shape that does not fit the other operands");
    return bias_count(config_);
  }

  void require_float(std::string_view name, const ffi::AnyBuffer& buffer, DType type) const {
    if (float_type(name, buffer) != type) throw InvalidCall(std::string(name) + " must be " + name_of(type));
  }

  const void* operand(std::string_view name, const ffi::AnyBuffer& buffer) {
    if (is_any_of(name, {"kv_lengths", "q_start", "k_start", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k"}))
      return integer_operand(name, buffer);
    require_count(name, buffer, count_of(name));
    if (is_any_of(name, {"q", "k", "v"})) require_float(name, buffer, config_.dtype);
    if (is_any_of(name, {"out", "dout"})) require_float(name, buffer, config_.out_dtype);
    if (is_any_of(name, {"lse", "dlse", "row_max", "row_sum"})) require_type(name, buffer, ffi::F32);
    if (name == "key_padding_mask") require_type(name, buffer, ffi::PRED);
    if (name == "dropout_seed") require_type(name, buffer, ffi::U32);
    if (!is_any_of(name, {"sinks", "bias"})) return data_of(buffer);
    if (memory_ == Memory::device) {
      require_float(name, buffer, name == "bias" ? config_.bias_dtype : DType::float32);
      return data_of(buffer);
    }
    wide_.emplace_back(name, buffer);
    return wide_.back().data();
  }

  const void* integer_operand(std::string_view name, const ffi::AnyBuffer& buffer) {
    if (memory_ == Memory::host) {
      require_count(name, buffer, count_of(name));
      integers_.push_back(integers(name, buffer));
      return integers_.back().data();
    }
    const bool pairs = buffer.element_type() == ffi::S32;
    if (!pairs) require_type(name, buffer, ffi::S64);
    require_count(name, buffer, (pairs ? 2 : 1) * count_of(name));
    return data_of(buffer);
  }

  void* result(std::string_view name, const ffi::AnyBuffer& buffer) {
    require_count(name, buffer, count_of(name));
    if (is_any_of(name, {"dq", "dk", "dv"})) require_float(name, buffer, config_.dtype);
    if (name == "out") require_float(name, buffer, config_.out_dtype);
    if (is_any_of(name, {"lse", "row_max", "row_sum"})) require_type(name, buffer, ffi::F32);
    if (!is_any_of(name, {"dsinks", "dbias"})) return data_of(buffer);
    if (memory_ == Memory::device) {
      require_type(name, buffer, ffi::F32);
      return data_of(buffer);
    }
    narrow_.emplace_back(name, buffer);
    return narrow_.back().data();
  }

  const Engine& engine_;
  const Pass pass_;
  const Memory memory_;
  const Config config_;
  Tensors tensors_{};
  void* workspace_;
  int64_t workspace_bytes_;
  // Deques keep the addresses of their elements.
  std::deque<FloatOperand> wide_;
  std::deque<std::vector<int64_t>> integers_;
  std::deque<FloatResult> narrow_;
};

}  // namespace attn::engine
