// Chains over the keys for the rows of a block: weights of pairs, a warp's part of them in shared memory, times rows of keys or values. A
// lane owns a few rows and columns.
#pragma once

#include "attention_rows.cuh"

namespace attn_cuda {

constexpr int kStagedFloats = 8192;  // of keys or values at a time

// Outputs of one lane, and kKeys keys of one step.
template <int Width>
struct Columns {
  static constexpr int kLanesOfRow = Width / 4 < kLanes ? Width / 4 : kLanes;
  static constexpr int kRowGroups = kLanes / kLanesOfRow;
  static constexpr int kOwnRows = kWarpRows / kRowGroups;
  static constexpr int kVectors = Width / 4 / kLanesOfRow;
  static constexpr int kKeys = kStagedFloats / Width;
  static constexpr int kStepSlots = kKeys / kLanes;
  static constexpr int kPitch = kKeys + 4;  // of P; rows of both half warps are read without a bank conflict

  __device__ static __forceinline__ int row(int i) { return lane_id() / kLanesOfRow * kOwnRows + i; }
  __device__ static __forceinline__ int column(int vector) { return (vector * kLanesOfRow + lane_id() % kLanesOfRow) * 4; }
};

template <int Width>
struct Outputs {
  using C = Columns<Width>;
  float sum[C::kOwnRows][C::kVectors][4];

  template <typename Use>
  __device__ __forceinline__ void each(Use use) {
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
#pragma unroll
      for (int vector = 0; vector < C::kVectors; ++vector) use(sum[i][vector], i, vector);
  }

  __device__ __forceinline__ void clear() {
    each([](float (&o)[4], int, int) { o[0] = o[1] = o[2] = o[3] = 0.0f; });
  }

  __device__ __forceinline__ void park(float* to) {
    each([&](float (&o)[4], int i, int vector) {
      reinterpret_cast<float4*>(to)[(i * C::kVectors + vector) * kLanes + lane_id()] = make_float4(o[0], o[1], o[2], o[3]);
    });
  }

  __device__ __forceinline__ void unpark(const float* from) {
    each([&](float (&o)[4], int i, int vector) {
      const float4 four = reinterpret_cast<const float4*>(from)[(i * C::kVectors + vector) * kLanes + lane_id()];
      o[0] = four.x, o[1] = four.y, o[2] = four.z, o[3] = four.w;
    });
  }

  __device__ __forceinline__ bool has_nan() {
    bool nan = false;
    each([&](float (&o)[4], int, int) {
      nan = nan || attn::is_nan(o[0]) || attn::is_nan(o[1]) || attn::is_nan(o[2]) || attn::is_nan(o[3]);
    });
    return nan;
  }
};

// Neighbouring floats, moved at once.
template <int Count>
struct alignas(Count * sizeof(float)) Floats {
  float values[Count];
};

// out goes on over the kKeys keys of a step. With Select a masked pair has no term even against infinities and NaN.
template <int Width, bool Select>
__device__ __forceinline__ void multiply_step(const float* weights, const float* rows, Outputs<Width>& out) {
  using C = Columns<Width>;
  const float* own = weights + C::row(0) * C::kPitch;
  const float* columns = rows + C::column(0);
#pragma unroll 2
  for (int key = 0; key < C::kKeys; key += 4) {
    float4 p[C::kOwnRows];
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) p[i] = *reinterpret_cast<const float4*>(own + i * C::kPitch + key);
#pragma unroll
    for (int vector = 0; vector < C::kVectors; ++vector) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const float4 v = *reinterpret_cast<const float4*>(columns + (key + step) * Width + vector * (C::kLanesOfRow * 4));
#pragma unroll
        for (int i = 0; i < C::kOwnRows; ++i) {
          const float weight = step == 0 ? p[i].x : step == 1 ? p[i].y : step == 2 ? p[i].z : p[i].w;
          float (&o)[4] = out.sum[i][vector];
          if (Select && is_masked(weight)) continue;
          o[0] = exact_fma(weight, v.x, o[0]);
          o[1] = exact_fma(weight, v.y, o[1]);
          o[2] = exact_fma(weight, v.z, o[2]);
          o[3] = exact_fma(weight, v.w, o[3]);
        }
      }
    }
  }
}

// Rows of the warp to an array with `width` columns. `offset_of(r)` is the element offset of row r or kNoRow.
template <int Width, typename OffsetOf>
__device__ __forceinline__ void store_rows(Outputs<Width>& out, void* data, int32_t dtype, int32_t width, bool vectors,
                                           OffsetOf offset_of) {
  using C = Columns<Width>;
  out.each([&](float (&o)[4], int i, int vector) {
    const int64_t offset = offset_of(C::row(i));
    if (offset != kNoRow) store_four(data, dtype, offset + C::column(vector), o, width - C::column(vector), vectors);
  });
}

}  // namespace attn_cuda
