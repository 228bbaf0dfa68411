// What the ck engine computes itself, an element at a time, as code that the HIP kernels run on the device and the tests on the host:
// exact sinks over a version of CK without them, the gradient of the sinks in a fixed order, and sums over grouped heads and broadcast
// axes in a fixed order.
#pragma once

#include <cmath>
#include <cstdint>

#include "../config.h"
#include "attn/ordered.h"

namespace attn::ck {

using engine::DType;
using engine::Strides;

constexpr int64_t kChunk = 256;  // rows whose terms one thread adds

// Stands for the log-sum-exp of a row outside every segment until sinks are added: such a row gets none. CK writes -inf for a row of a
// segment without a visible key.
constexpr float kGap = INFINITY;

ATTN_HD float load(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::bfloat16) return to_float(static_cast<const bfloat16*>(data)[index]);
  if (dtype == DType::float16) return to_float(static_cast<const float16*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

ATTN_HD void store(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::bfloat16) {
    static_cast<bfloat16*>(data)[index] = from_float<bfloat16>(value);
  } else if (dtype == DType::float16) {
    static_cast<float16*>(data)[index] = from_float<float16>(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

// [outer, heads, rows] in order.
struct RowIndex {
  int64_t outer, head, row;
};
ATTN_HD RowIndex row_index(int64_t index, int64_t heads, int64_t rows) {
  return {index / rows / heads, index / rows % heads, index % rows};
}

// int32 offsets that CK reads. One element does them all: a batch is short.
struct Offsets {
  const int64_t *cu_seqlens_q, *cu_seqlens_k;  // packed: physical offsets [batch + 1]
  const int64_t *seqlens_q, *seqlens_k;        // used lengths [batch]; dense: seqlens_k are kv_lengths
  int64_t batch, queries, keys;                // dense: of each item
  int32_t *seqstart_q, *seqstart_k;            // physical; null when dense
  int32_t *used_q, *used_k;                    // cumulative used lengths; null when every row is used
};
ATTN_HD void element(const Offsets& a, int64_t) {
  const auto clamped = [](int64_t value, int64_t most) { return value < 0 ? int64_t{0} : value > most ? most : value; };
  int64_t used_q = 0, used_k = 0;
  for (int64_t b = 0; b <= a.batch; ++b) {
    if (a.seqstart_q != nullptr) a.seqstart_q[b] = static_cast<int32_t>(clamped(a.cu_seqlens_q[b], a.queries));
    if (a.seqstart_k != nullptr) a.seqstart_k[b] = static_cast<int32_t>(clamped(a.cu_seqlens_k[b], a.keys));
    if (a.used_q != nullptr) a.used_q[b] = static_cast<int32_t>(used_q);
    if (a.used_k != nullptr) a.used_k[b] = static_cast<int32_t>(used_k);
    if (b == a.batch) return;
    const int64_t room_q = a.cu_seqlens_q == nullptr ? a.queries : a.cu_seqlens_q[b + 1] - a.cu_seqlens_q[b];
    const int64_t room_k = a.cu_seqlens_k == nullptr ? a.keys : a.cu_seqlens_k[b + 1] - a.cu_seqlens_k[b];
    used_q += a.seqlens_q == nullptr ? room_q : clamped(a.seqlens_q[b], room_q);
    used_k += a.seqlens_k == nullptr ? room_k : clamped(a.seqlens_k[b], room_k);
  }
}

struct Fill {
  float* data;
  float value;
};
ATTN_HD void element(const Fill& a, int64_t index) { a.data[index] = a.value; }

// A row whose log-sum-exp without the sink is `lse`, with its sink merged in: one state (lse, 1) and one more (sink, 1).
ATTN_HD RowState with_sink(float lse, float sink) { return merge(RowState{lse, 1.0f}, RowState{sink, 1.0f}); }

// Exact sinks over an output and a log-sum-exp without them: first the output [outer, heads, rows, columns], then the rows.
struct RescaleOut {
  void* out;
  DType dtype;
  Strides strides;
  int64_t heads, rows, columns;
  const float* lse;
  const float* sinks;
};
ATTN_HD void element(const RescaleOut& a, int64_t index) {
  const int64_t row = index / a.columns, column = index % a.columns;
  const RowIndex at = row_index(row, a.heads, a.rows);
  const int64_t offset = at.outer * a.strides.batch + at.head * a.strides.head + at.row * a.strides.row + column * a.strides.column;
  const float lse = a.lse[row];
  if (lse == kGap) return;
  const float share = lse == negative_infinity() ? 0.0f : probability(lse, with_sink(lse, a.sinks[at.head]));
  store(a.out, a.dtype, offset, share == 0.0f ? 0.0f : share * load(a.out, a.dtype, offset));
}

struct RescaleRows {
  float* lse;
  int64_t heads, rows;
  const float* sinks;
};
ATTN_HD void element(const RescaleRows& a, int64_t index) {
  const float lse = a.lse[index];
  a.lse[index] = lse == kGap ? negative_infinity() : log_sum_exp(with_sink(lse, a.sinks[row_index(index, a.heads, a.rows).head]));
}

// Gradient of a row's sink: -exp(sink - lse) * (dout . out), with the log-sum-exp that includes the sink. The true output is read, so
// dropout needs no factor. A row outside every segment has lse -inf and adds 0.
struct SinkTerms {
  const void *out, *dout;
  DType dtype;
  Strides strides;
  int64_t heads, rows, columns;
  const float* lse;
  const float* sinks;
  float* terms;  // [outer, heads, rows]
};
ATTN_HD void element(const SinkTerms& a, int64_t index) {
  const RowIndex at = row_index(index, a.heads, a.rows);
  const float sink = a.sinks[at.head], lse = a.lse[index];
  float term = 0.0f;
  if (sink != negative_infinity() && lse != negative_infinity()) {
    const int64_t offset = at.outer * a.strides.batch + at.head * a.strides.head + at.row * a.strides.row;
    float product = 0.0f;
    for (int64_t column = 0; column < a.columns; ++column)
      product += load(a.dout, a.dtype, offset + column * a.strides.column) * load(a.out, a.dtype, offset + column * a.strides.column);
    const float below = sink - lse;  // above 0 by the rounding of lse alone
    term = -exp_nonpositive(below > 0.0f ? 0.0f : below) * product;
  }
  a.terms[index] = term;
}

// Sums of kChunk neighbouring rows, then of a head: outer index first, chunks ascending.
struct SinkChunks {
  const float* terms;
  int64_t rows, chunks;
  float* sums;  // [outer, heads, chunks]
};
ATTN_HD void element(const SinkChunks& a, int64_t index) {
  const int64_t first = index % a.chunks * kChunk, last = first + kChunk < a.rows ? first + kChunk : a.rows;
  const float* terms = a.terms + index / a.chunks * a.rows;
  float sum = 0.0f;
  for (int64_t row = first; row < last; ++row) sum += terms[row];
  a.sums[index] = sum;
}

struct SinkHeads {
  const float* sums;
  int64_t outer, heads, chunks;
  float* dsinks;
};
ATTN_HD void element(const SinkHeads& a, int64_t head) {
  float sum = 0.0f;
  for (int64_t outer = 0; outer < a.outer; ++outer)
    for (int64_t chunk = 0; chunk < a.chunks; ++chunk) sum += a.sums[(outer * a.heads + head) * a.chunks + chunk];
  a.dsinks[head] = sum;
}

// Gradients of query heads to those of kv heads, in float32 over the heads of a group ascending. `from` has `group` times the heads of
// `to` and the same layout: [outer, heads, rows, columns], or packed [rows, heads, columns].
struct GroupSum {
  const void* from;
  void* to;
  DType dtype;
  int64_t kv_heads, group, rows, columns, packed;
};
ATTN_HD void element(const GroupSum& a, int64_t index) {
  const int64_t column = index % a.columns, second = index / a.columns, inner = a.packed ? a.kv_heads : a.rows;
  const int64_t low = second % inner, high = second / inner;  // (row, head) packed, else (outer and head, row)
  float sum = 0.0f;
  for (int64_t member = 0; member < a.group; ++member) {
    const int64_t row = a.packed ? high * a.kv_heads * a.group + low * a.group + member : (high * a.group + member) * a.rows + low;
    sum += load(a.from, a.dtype, row * a.columns + column);
  }
  store(a.to, a.dtype, index, sum);
}

// Gradient of the bias: float32 sums over the broadcast axes of dS [B, H, S, T], ascending.
struct BiasSum {
  const void* from;
  float* to;
  DType dtype;
  int64_t full[4], shape[4];
};
ATTN_HD void element(const BiasSum& a, int64_t index) {
  const int64_t target = index;
  int64_t first[4], count[4];
  for (int axis = 3; axis >= 0; --axis) {
    first[axis] = a.shape[axis] == 1 ? 0 : index % a.shape[axis];
    count[axis] = a.shape[axis] == 1 ? a.full[axis] : 1;
    if (a.shape[axis] != 1) index /= a.shape[axis];
  }
  float sum = 0.0f;
  int64_t i[4];
  for (i[0] = first[0]; i[0] < first[0] + count[0]; ++i[0])
    for (i[1] = first[1]; i[1] < first[1] + count[1]; ++i[1])
      for (i[2] = first[2]; i[2] < first[2] + count[2]; ++i[2])
        for (i[3] = first[3]; i[3] < first[3] + count[3]; ++i[3])
          sum += load(a.from, a.dtype, ((i[0] * a.full[1] + i[1]) * a.full[2] + i[2]) * a.full[3] + i[3]);
  a.to[target] = sum;
}

}  // namespace attn::ck
