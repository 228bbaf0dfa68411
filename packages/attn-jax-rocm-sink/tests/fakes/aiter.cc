// A recording AITER that computes attention pair by pair in binary64, with the traits of CK that the adapter must mind: a masked kernel
// drops the sink unless has_sink is set, rows past a used length are not written, the workspace is requested by callback and filled with
// junk, the gradient of k and v goes to query heads, and the sum dout . out carries 1 - p.
#include <mha_bwd.h>
#include <mha_fwd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attn/float_bits.h"
#include "log.h"

namespace {

int64_t more_bytes = 0;
bool has_kernel = true;

double load(const void* data, const std::string& type, int64_t index) {
  if (type == "bf16") return attn::to_float(static_cast<const attn::bfloat16*>(data)[index]);
  return attn::to_float(static_cast<const attn::float16*>(data)[index]);
}
void store(void* data, const std::string& type, int64_t index, double value) {
  const auto narrow = static_cast<float>(value);
  if (type == "bf16") {
    static_cast<attn::bfloat16*>(data)[index] = attn::from_float<attn::bfloat16>(narrow);
  } else {
    static_cast<attn::float16*>(data)[index] = attn::from_float<attn::float16>(narrow);
  }
}

// Rows and keys of one batch item.
struct Item {
  int64_t first_q, first_k, queries, keys;
};
template <typename Arguments>
Item item_of(const Arguments& a, int64_t batch) {
  const auto at = [](const void* data, int64_t index) { return static_cast<const int32_t*>(data)[index]; };
  Item item{0, 0, a.seqlen_q, a.seqlen_k};
  if (a.is_group_mode) {
    item.first_q = at(a.seqstart_q_ptr, batch);
    item.first_k = at(a.seqstart_k_ptr, batch);
    item.queries = at(a.seqstart_q_ptr, batch + 1) - item.first_q;
    item.keys = at(a.seqstart_k_ptr, batch + 1) - item.first_k;
  }
  if (a.cu_seqlen_q_ptr != nullptr) item.queries = at(a.cu_seqlen_q_ptr, batch + 1) - at(a.cu_seqlen_q_ptr, batch);
  if (a.cu_seqlen_k_ptr != nullptr) item.keys = at(a.cu_seqlen_k_ptr, batch + 1) - at(a.cu_seqlen_k_ptr, batch);
  return item;
}

template <typename Arguments>
bool sees(const Arguments& a, const Item& item, int64_t query, int64_t key) {
  if (a.mask_type == 0) return true;
  const int64_t diagonal = query + (a.mask_type == 2 ? item.keys - item.queries : 0);
  return (a.window_size_left < 0 || key >= diagonal - a.window_size_left) &&
         (a.window_size_right < 0 || key <= diagonal + a.window_size_right);
}

template <typename Arguments>
double score(const Arguments& a, double scale, int64_t batch, const Item& item, int64_t head, int64_t query, int64_t key) {
  const int64_t kv_head = head / (a.nhead_q / a.nhead_k);
  const int64_t q = batch * a.batch_stride_q + head * a.nhead_stride_q + (item.first_q + query) * a.stride_q;
  const int64_t k = batch * a.batch_stride_k + kv_head * a.nhead_stride_k + (item.first_k + key) * a.stride_k;
  double sum = 0;
  for (int64_t d = 0; d < a.hdim_q; ++d) sum += load(a.q_ptr, a.data_type, q + d) * load(a.k_ptr, a.data_type, k + d);
  double x = sum * scale;
  if (a.bias_type == 1)
    x += load(a.bias_ptr, a.data_type, batch * a.batch_stride_bias + head * a.nhead_stride_bias + query * a.stride_bias + key);
  return x;
}

// Whether dropout keeps a pair: a hash of its place and the seed, the same forward and backward.
template <typename Arguments>
bool keeps(const Arguments& a, int64_t batch, int64_t head, int64_t query, int64_t key) {
  if (a.p_drop <= 0) return true;
  const auto& seed = std::get<std::pair<const void*, const void*>>(a.drop_seed_offset);
  uint64_t state = *static_cast<const uint64_t*>(seed.first) + *static_cast<const uint64_t*>(seed.second);
  for (const int64_t place : {batch, head, query, key}) {
    state = (state ^ static_cast<uint64_t>(place)) * 0x9E3779B97F4A7C15u;
    state ^= state >> 29;
  }
  return static_cast<double>(state >> 11) * 0x1p-53 >= a.p_drop;
}

template <typename Arguments>
fakes::Line& record(fakes::Line& line, const Arguments& a, const ck_tile::stream_config& config) {
  line("stream", reinterpret_cast<uintptr_t>(config.stream_id_))("timed", config.time_kernel_)("type", a.data_type);
  line("group", a.is_group_mode)("bias", a.bias_type)("mask", a.mask_type)("left", a.window_size_left)("right", a.window_size_right);
  line("seqlen_q", a.seqlen_q)("seqlen_k", a.seqlen_k)("batch", a.batch)("max_seqlen_q", a.max_seqlen_q)("nhead_q", a.nhead_q);
  line("nhead_k", a.nhead_k)("hdim_q", a.hdim_q)("hdim_v", a.hdim_v)("asm", a.use_asm_v3)("probe", a.v3_api_check)("p_drop", a.p_drop);
  line("seqstart", a.seqstart_q_ptr != nullptr)("cu", a.cu_seqlen_k_ptr != nullptr)("seqlens", a.seqlen_k_ptr != nullptr);
  line("q_strides", a.stride_q)("", a.nhead_stride_q)("", a.batch_stride_q);
  line("bias_strides", a.stride_bias)("", a.nhead_stride_bias)("", a.batch_stride_bias);
  return line;
}

template <typename Arguments>
double sink_of(const Arguments& a, int64_t head) {
#if defined(FAKE_AITER_OLD)
  (void)a, (void)head;
#else
  if (a.sink_ptr != nullptr && (a.mask_type == 0 || a.has_sink)) return static_cast<const float*>(a.sink_ptr)[head];
#endif
  return -std::numeric_limits<double>::infinity();
}

}  // namespace

namespace aiter {

float mha_fwd(mha_fwd_args a, const ck_tile::stream_config& config) {
  {
    fakes::Line line("mha_fwd");
    record(line, a, config)("lse_strides", a.nhead_stride_lse)("", a.batch_stride_lse)("sink_size", a.sink_size);
#if !defined(FAKE_AITER_OLD)
    line("has_sink", a.has_sink)("sink_ptr", a.sink_ptr != nullptr);
#endif
  }
  if (!has_kernel) return -1;
  const double none = -std::numeric_limits<double>::infinity();
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    const Item item = item_of(a, batch);
    for (int64_t head = 0; head < a.nhead_q; ++head)
      for (int64_t query = 0; query < item.queries; ++query) {
        std::vector<double> x(static_cast<size_t>(item.keys), none);
        const double sink = sink_of(a, head);
        double most = sink;
        for (int64_t key = 0; key < item.keys; ++key)
          if (sees(a, item, query, key)) {
            x[key] = score(a, a.scale_s, batch, item, head, query, key);
            most = std::fmax(most, x[key]);
          }
        double sum = sink == none ? 0 : std::exp(sink - most);
        for (const double value : x) sum += value == none ? 0 : std::exp(value - most);
        const double lse = sum == 0 ? none : most + std::log(sum);
        const int64_t row = item.first_q + query;
        static_cast<float*>(a.lse_ptr)[batch * a.batch_stride_lse + head * a.nhead_stride_lse + row] = static_cast<float>(lse);
        const int64_t kv_head = head / (a.nhead_q / a.nhead_k);
        for (int64_t column = 0; column < a.hdim_v; ++column) {
          double out = 0;
          for (int64_t key = 0; key < item.keys; ++key)
            if (x[key] != none && keeps(a, batch, head, query, key))
              out += std::exp(x[key] - lse) / (1.0 - a.p_drop) *
                     load(a.v_ptr, a.data_type,
                          batch * a.batch_stride_v + kv_head * a.nhead_stride_v + (item.first_k + key) * a.stride_v + column);
          store(a.o_ptr, a.data_type, batch * a.batch_stride_o + head * a.nhead_stride_o + row * a.stride_o + column, out);
        }
      }
  }
  return 0;
}

float mha_bwd(mha_bwd_args a, const ck_tile::stream_config& config) {
  {
    fakes::Line line("mha_bwd");
    record(line, a, config)("deterministic", a.is_deterministic)("dropout", a.has_dropout)("dbias", a.has_dbias)("p_undrop", a.p_undrop);
    line("dk_strides", a.stride_dk)("", a.nhead_stride_dk)("", a.batch_stride_dk)("lsed", a.nhead_stride_lsed)("", a.batch_stride_lsed);
    line("max_seqlen_k", a.max_seqlen_k);
#if !defined(FAKE_AITER_OLD)
    line("sink_ptr", a.sink_ptr != nullptr)("d_sink_ptr", a.d_sink_ptr != nullptr);
#endif
  }
  if (!has_kernel) return -1;
  const int64_t split = a.hdim_q > 128 ? 64 : 128;
  const int64_t rows = static_cast<int64_t>(a.is_group_mode ? 1 : a.batch) * a.nhead_q * a.seqlen_q;
  const auto bytes = static_cast<size_t>((a.seqlen_k + split - 1) / split * rows * a.hdim_q * 4 + 4096 + more_bytes);
  std::memset(a.workspace_alloc(bytes, false), 0xFF, bytes);
#if !defined(FAKE_AITER_OLD)
  if (a.is_group_mode) std::memset(a.pinned_host_alloc(128).get(), 0xFF, 128);
#endif
  const std::string& type = a.data_type;
  const double keep = 1.0 / (1.0 - a.p_drop);
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    const Item item = item_of(a, batch);
    for (int64_t head = 0; head < a.nhead_q; ++head) {
      const int64_t kv_head = head / (a.nhead_q / a.nhead_k);
      std::vector<double> dk(static_cast<size_t>(item.keys * a.hdim_q)), dv(static_cast<size_t>(item.keys * a.hdim_v));
      for (int64_t query = 0; query < item.queries; ++query) {
        const int64_t row = item.first_q + query;
        const int64_t q = batch * a.batch_stride_q + head * a.nhead_stride_q + row * a.stride_q;
        const int64_t o = batch * a.batch_stride_o + head * a.nhead_stride_o + row * a.stride_o;
        const int64_t g = batch * a.batch_stride_do + head * a.nhead_stride_do + row * a.stride_do;
        const int64_t at = batch * a.batch_stride_lsed + head * a.nhead_stride_lsed + row;
        const double lse = static_cast<const float*>(a.lse_ptr)[at];
        double delta = 0;
        for (int64_t column = 0; column < a.hdim_v; ++column) delta += load(a.do_ptr, type, g + column) * load(a.o_ptr, type, o + column);
        static_cast<float*>(a.d_ptr)[at] = static_cast<float>(a.p_undrop * delta);
        std::vector<double> dq(static_cast<size_t>(a.hdim_q));
        for (int64_t key = 0; key < item.keys; ++key) {
          if (!sees(a, item, query, key) || std::isinf(lse)) continue;
          const double p = std::exp(score(a, a.scale, batch, item, head, query, key) - lse);
          const double drop = keeps(a, batch, head, query, key) ? keep : 0.0;
          const int64_t v = batch * a.batch_stride_v + kv_head * a.nhead_stride_v + (item.first_k + key) * a.stride_v;
          const int64_t k = batch * a.batch_stride_k + kv_head * a.nhead_stride_k + (item.first_k + key) * a.stride_k;
          double dp = 0;
          for (int64_t column = 0; column < a.hdim_v; ++column) {
            const double dout = load(a.do_ptr, type, g + column);
            dp += drop * dout * load(a.v_ptr, type, v + column);
            dv[key * a.hdim_v + column] += drop * p * dout;
          }
          const double ds = p * (dp - delta);
          for (int64_t d = 0; d < a.hdim_q; ++d) {
            dq[d] += a.scale * ds * load(a.k_ptr, type, k + d);
            dk[key * a.hdim_q + d] += a.scale * ds * load(a.q_ptr, type, q + d);
          }
          if (a.has_dbias)
            store(a.dbias_ptr, type, batch * a.batch_stride_dbias + head * a.nhead_stride_dbias + query * a.stride_dbias + key, ds);
        }
        for (int64_t d = 0; d < a.hdim_q; ++d)
          store(a.dq_ptr, type, batch * a.batch_stride_dq + head * a.nhead_stride_dq + row * a.stride_dq + d, dq[d]);
      }
      for (int64_t key = 0; key < item.keys; ++key) {
        const int64_t row = item.first_k + key;
        for (int64_t d = 0; d < a.hdim_q; ++d)
          store(a.dk_ptr, type, batch * a.batch_stride_dk + head * a.nhead_stride_dk + row * a.stride_dk + d, dk[key * a.hdim_q + d]);
        for (int64_t d = 0; d < a.hdim_v; ++d)
          store(a.dv_ptr, type, batch * a.batch_stride_dv + head * a.nhead_stride_dv + row * a.stride_dv + d, dv[key * a.hdim_v + d]);
      }
    }
  }
  return 0;
}

}  // namespace aiter

extern "C" void fake_aiter_set(int kernel, int64_t more) {
  has_kernel = kernel != 0;
  more_bytes = more;
}
