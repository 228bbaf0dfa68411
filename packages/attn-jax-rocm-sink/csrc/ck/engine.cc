#include "engine.h"

#include <limits>

#include "arguments.h"
#include "launch.h"

namespace attn::engine {
namespace {

using namespace attn::ck;

bool needs_lengths(const Config& config) { return config.packed != 0 || config.kv_lengths != 0; }

int64_t pairs_of(const Config& config) { return config.batch * config.heads * config.queries * config.keys; }

int64_t group_of(const Config& config) { return config.heads / config.kv_heads; }

int64_t chunks_of(const Config& config) { return (config.queries + kChunk - 1) / kChunk; }

bool needs_pairs(const Config& config) {
  return (config.gradients & (kDq | kDk | kDv | kDbias)) != 0 && rows_of(config) > 0 && config.keys > 0;
}

const Gpu* gpu_of(const Config& config) { return find_gpu(architecture(config.device)); }

// The most that mha_bwd asks for: a float32 dq of every split, and its tables.
int64_t aiter_bytes(const Config& config) {
  const int64_t split = find_head_dims(config)->split;
  const int64_t splits = (config.keys + split - 1) / split;
  const int64_t tables = (4096 + 64 * (config.batch + 1) + 4095) / 4096 * 4096;
  return tables + 4 * splits * rows_of(config) * config.head_dim;
}

// Largest offset that the call forms in an int32 of CK.
int64_t largest_offset(const Config& config) {
  const int64_t width = config.head_dim > config.value_dim ? config.head_dim : config.value_dim;
  const int64_t longest = config.queries > config.keys ? config.queries : config.keys;
  const int64_t of_rows = outer_of(config) * config.heads * longest * width;
  return has_bias(config) && pairs_of(config) > of_rows ? pairs_of(config) : of_rows;
}

Lengths take_lengths(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) {
  if (!needs_lengths(config)) return {};
  Offsets offsets{};
  offsets.cu_seqlens_q = tensors.cu_seqlens_q;
  offsets.cu_seqlens_k = tensors.cu_seqlens_k;
  offsets.seqlens_q = tensors.seqlens_q;
  offsets.seqlens_k = config.packed ? tensors.seqlens_k : tensors.kv_lengths;
  offsets.batch = config.batch;
  offsets.queries = config.queries;
  offsets.keys = config.keys;
  offsets.seqstart_q = workspace.part<int32_t>("seqstart_q");
  offsets.seqstart_k = workspace.part<int32_t>("seqstart_k");
  offsets.used_q = workspace.part<int32_t>("used_q");
  offsets.used_k = workspace.part<int32_t>("used_k");
  launch(offsets, 1, stream);
  return {offsets.seqstart_q, offsets.seqstart_k, offsets.used_q, offsets.used_k};
}

const void* take_zero(const Workspace& workspace, void* stream) {
  void* zero = workspace.part<void>("random_offset");
  if (zero != nullptr) set_zero(zero, 8, stream);
  return zero;
}

ck_tile::stream_config on(void* stream) {
  ck_tile::stream_config config{};
  config.stream_id_ = static_cast<hipStream_t>(stream);
  config.time_kernel_ = false;
  return config;
}

void check(float milliseconds, const char* function) {
  if (milliseconds < 0) throw std::runtime_error(std::string("AITER has no kernel for this call of ") + function);
}

void add_sinks(const Config& config, const Tensors& tensors, void* stream) {
  RescaleOut out{};
  out.out = tensors.out;
  out.dtype = config.dtype;
  out.strides = config.out;
  out.heads = config.heads;
  out.rows = config.queries;
  out.columns = config.value_dim;
  out.lse = tensors.lse;
  out.sinks = tensors.sinks;
  launch(out, rows_of(config) * config.value_dim, stream);
  launch(RescaleRows{tensors.lse, config.heads, config.queries, tensors.sinks}, rows_of(config), stream);
}

void sum_sinks(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) {
  auto* terms = workspace.part<float>("sink_terms");
  auto* sums = workspace.part<float>("sink_sums");
  SinkTerms rows{};
  rows.out = tensors.out;
  rows.dout = tensors.dout;
  rows.dtype = config.dtype;
  rows.strides = config.out;
  rows.heads = config.heads;
  rows.rows = config.queries;
  rows.columns = config.value_dim;
  rows.lse = tensors.lse;
  rows.sinks = tensors.sinks;
  rows.terms = terms;
  launch(rows, rows_of(config), stream);
  launch(SinkChunks{terms, config.queries, chunks_of(config), sums}, outer_of(config) * config.heads * chunks_of(config), stream);
  launch(SinkHeads{sums, outer_of(config), config.heads, chunks_of(config), tensors.dsinks}, config.heads, stream);
}

// Hands out the part that the plan holds for AITER.
class Pool {
 public:
  Pool(const Config& config, const Workspace& workspace, void* stream)
      : next_(workspace.part<char>("aiter")), left_(aiter_bytes(config)), stream_(stream) {}

  void* take(size_t bytes, bool zero) {
    const int64_t size = (static_cast<int64_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    if (static_cast<int64_t>(bytes) > left_)
      throw InvalidCall("AITER asks for " + std::to_string(bytes) + " bytes of workspace and the plan has " + std::to_string(left_));
    void* taken = next_;
    next_ += size;
    left_ -= size;
    if (zero) set_zero(taken, static_cast<int64_t>(bytes), stream_);
    return taken;
  }

 private:
  char* next_;
  int64_t left_;
  void* stream_;
};

void sum_groups(const Config& config, const void* from, void* to, int64_t columns, void* stream) {
  if (to == nullptr || from == to) return;
  GroupSum sum{};
  sum.from = from;
  sum.to = to;
  sum.dtype = config.dtype;
  sum.kv_heads = config.kv_heads;
  sum.group = group_of(config);
  sum.rows = config.keys;
  sum.columns = columns;
  sum.packed = config.packed;
  launch(sum, outer_of(config) * config.kv_heads * config.keys * columns, stream);
}

void sum_bias(const Config& config, const void* from, float* to, void* stream) {
  BiasSum sum{from, to, config.dtype, {config.batch, config.heads, config.queries, config.keys}, {}};
  int64_t count = 1;
  for (int axis = 0; axis < 4; ++axis) {
    sum.shape[axis] = config.bias_shape[axis];
    count *= config.bias_shape[axis];
  }
  launch(sum, count, stream);
}

struct GradientBytes {
  int64_t dq, dk, dv, dbias;  // of the arrays that CK writes
};
GradientBytes gradient_bytes(const Config& config) {
  const int64_t keys = outer_of(config) * config.heads * config.keys * size_of(config.dtype);
  return {rows_of(config) * config.head_dim * size_of(config.dtype), keys * config.head_dim, keys * config.value_dim,
          wants(config, kDbias) ? pairs_of(config) * size_of(config.dtype) : 0};
}

}  // namespace

bool CkEngine::has_native_sinks() { return TakesSinks<aiter::mha_fwd_args>::value; }

std::string CkEngine::refuse(const Config& config, Pass pass) const {
  Reasons reasons;
  const std::string gpu = architecture(config.device);
  std::string gpus;
  for (const Gpu& known : kGpus) gpus += (gpus.empty() ? "" : ", ") + std::string(known.name);
  reasons.add(find_gpu(gpu) == nullptr, "GPU " + gpu + " (supported: " + gpus + ")");
  reasons.add(config.dtype == DType::float32, "dtype float32 (supported: bfloat16, float16)");
  reasons.add(config.out_dtype != config.dtype, std::string("an output of ") + name_of(config.out_dtype) + " (supported: the dtype of q)");
  reasons.add(find_head_dims(config) == nullptr, "head dims " + std::to_string(config.head_dim) + " and " +
                                                     std::to_string(config.value_dim) +
                                                     " (supported: multiples of 8 up to 256, of v up to 128 where that of q is up to 192)");
  reasons.add(!(config.scale > 0), "scale " + std::to_string(config.scale) + " (supported: above 0)");
  reasons.add(config.key_padding_mask != 0, "key_padding_mask (supported: kv_lengths)");
  reasons.add(config.alignment == Alignment::operands, "q_start (supported: top-left and bottom-right alignment)");
  reasons.add(config.k_start != 0, "k_start (not supported)");
  reasons.add(has_bias(config) && needs_lengths(config), "a bias together with lengths or packed input");
  reasons.add(has_bias(config) && config.bias_dtype != config.dtype,
              std::string("a bias of ") + name_of(config.bias_dtype) + " (supported: the dtype of q)");
  reasons.add(has_bias(config) && (config.bias_shape[2] != config.queries || config.bias_shape[3] != config.keys),
              "a bias that broadcasts over queries or keys");
  reasons.add(config.dropout_p >= 1, "dropout_p=1 (supported: below 1)");
  reasons.add(pass == Pass::backward && config.dlse != 0, "a gradient through the log-sum-exp");
  reasons.add(config.packed != 0 && config.keys == 0, "packed input without keys");
  reasons.add(largest_offset(config) > std::numeric_limits<int32_t>::max(), "an array of 2^31 elements or more");
  return reasons.text();
}

void CkEngine::size(const Config& config, Pass pass, Plan& plan) const {
  const int64_t offsets = 4 * (config.batch + 1);
  const bool packed = config.packed != 0;
  plan.add("seqstart_q", packed ? offsets : 0);
  plan.add("seqstart_k", packed ? offsets : 0);
  plan.add("used_q", needs_lengths(config) && (!packed || config.seqlens != 0) ? offsets : 0);
  plan.add("used_k", needs_lengths(config) && (!packed || config.seqlens != 0) ? offsets : 0);
  plan.add("random_offset", has_dropout(config) ? 8 : 0);
  if (pass == Pass::forward) return;
  if (wants(config, kDsinks)) {
    plan.add("sink_terms", 4 * rows_of(config));
    plan.add("sink_sums", 4 * outer_of(config) * config.heads * chunks_of(config));
  }
  if (!needs_pairs(config)) return;
  const GradientBytes bytes = gradient_bytes(config);
  plan.add("d", 4 * rows_of(config));
  plan.add("dq", wants(config, kDq) ? 0 : bytes.dq);
  plan.add("dk", wants(config, kDk) && group_of(config) == 1 ? 0 : bytes.dk);
  plan.add("dv", wants(config, kDv) && group_of(config) == 1 ? 0 : bytes.dv);
  plan.add("dbias", bytes.dbias);
  plan.add("aiter", aiter_bytes(config));
}

void CkEngine::run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  if (rows_of(config) == 0) return;
  const bool rescales = has_sinks(config) && (!has_native_sinks() || config.keys == 0);
  if (config.packed != 0 || config.keys == 0) {  // rows that CK does not write
    set_zero(tensors.out, rows_of(config) * config.value_dim * size_of(config.dtype), stream);
    launch(Fill{tensors.lse, rescales && config.packed != 0 ? kGap : -kGap}, rows_of(config), stream);
  }
  if (config.keys > 0) {
    const Lengths lengths = take_lengths(config, tensors, workspace, stream);
    check(aiter::mha_fwd(forward_arguments(config, *gpu_of(config), tensors, lengths, take_zero(workspace, stream)), on(stream)),
          "mha_fwd");
  }
  if (rescales) add_sinks(config, tensors, stream);
}

void CkEngine::run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const {
  if (wants(config, kDsinks)) sum_sinks(config, tensors, workspace, stream);
  if (!needs_pairs(config)) {
    const int64_t size = size_of(config.dtype), keys = outer_of(config) * config.kv_heads * config.keys * size;
    if (tensors.dq != nullptr) set_zero(tensors.dq, rows_of(config) * config.head_dim * size, stream);
    if (tensors.dk != nullptr) set_zero(tensors.dk, keys * config.head_dim, stream);
    if (tensors.dv != nullptr) set_zero(tensors.dv, keys * config.value_dim, stream);
    if (tensors.dbias != nullptr) set_zero(tensors.dbias, 4 * bias_count(config), stream);
    return;
  }
  const bool grouped = group_of(config) != 1;
  Scratch scratch{};
  scratch.d = workspace.part<void>("d");
  scratch.dq = wants(config, kDq) ? tensors.dq : workspace.part<void>("dq");
  scratch.dk = wants(config, kDk) && !grouped ? tensors.dk : workspace.part<void>("dk");
  scratch.dv = wants(config, kDv) && !grouped ? tensors.dv : workspace.part<void>("dv");
  scratch.dbias = workspace.part<void>("dbias");
  scratch.zero = take_zero(workspace, stream);
  const GradientBytes bytes = gradient_bytes(config);
  // CK writes neither rows past a length nor pairs that a mask hides.
  set_zero(scratch.dq, bytes.dq, stream);
  set_zero(scratch.dk, bytes.dk, stream);
  set_zero(scratch.dv, bytes.dv, stream);
  if (scratch.dbias != nullptr) set_zero(scratch.dbias, bytes.dbias, stream);
  aiter::mha_bwd_args arguments = backward_arguments(config, tensors, take_lengths(config, tensors, workspace, stream), scratch);
  Pool pool(config, workspace, stream);
  arguments.workspace_alloc = [&pool](size_t size, bool zero) { return pool.take(size, zero); };
  set_pinned(arguments, [](size_t size) { return pinned(static_cast<int64_t>(size)); });
  check(aiter::mha_bwd(arguments, on(stream)), "mha_bwd");
  if (wants(config, kDk)) sum_groups(config, scratch.dk, tensors.dk, config.head_dim, stream);
  if (wants(config, kDv)) sum_groups(config, scratch.dv, tensors.dv, config.value_dim, stream);
  if (wants(config, kDbias)) sum_bias(config, scratch.dbias, tensors.dbias, stream);
}

}  // namespace attn::engine
