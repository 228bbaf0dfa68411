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

  __device__ __forceinline__ void multiply(float factor) {
    each([&](float (&o)[4], int, int) {
#pragma unroll
      for (float& value : o) value = mul(value, factor);
    });
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

// Count neighbours of every row of the warp, kept from one pass to the next, Pitch floats from row to row.
template <int Pitch, int Count, int Slots>
__device__ __forceinline__ void hold(Floats<Count>* to, const float (&x)[kWarpRows][Slots], int first) {
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    Floats<Count> some;
#pragma unroll
    for (int i = 0; i < Count; ++i) some.values[i] = x[r][first + i];
    to[r * Pitch / Count] = some;
  }
}

template <int Pitch, int Count>
__device__ __forceinline__ void recall(const Floats<Count>* from, float (&x)[kWarpRows][Count]) {
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const Floats<Count> some = from[r * Pitch / Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) x[r][i] = some.values[i];
  }
}

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

// Shared memory of the chains: rows of a step as they are stored and as binary32, and the warp's weights.
template <int Width, int Warps>
struct ChainStage {
  using C = Columns<Width>;
  using Copy = RowCopy<Warps * kLanes, C::kKeys, Width>;
  char* raw;
  float* rows;
  float* weights;

  // out goes on over [first, end), kKeys at a time: weights of the warp times the rows of `array` at `offset_of(i)`. Where the warp has
  // pairs at a step, `active(step)`, `load` reads what it kept of them while rows arrive, and `finish` makes weights of it. Called by all
  // threads.
  template <typename OffsetOf, typename Active, typename Load, typename Finish>
  __device__ __forceinline__ void multiply(const Array& array, int32_t first, int32_t end, bool select, Outputs<Width>& out,
                                           OffsetOf offset_of, Active active, Load load, Finish finish) const {
    const auto start = [&](int32_t step) { Copy::start(array, 0, raw, [&](int i) { return offset_of(step + i); }); };
    if (first < end) start(first);
#pragma unroll 1
    for (int32_t step = first; step < end; step += C::kKeys) {
      const bool has_pairs = active(step);
      float x[kWarpRows][C::kStepSlots];
      if (has_pairs) load(step, x);
      wait_for_copies();
      __syncthreads();
      Copy::finish(array.dtype, raw, rows, Width);
      if (step + C::kKeys < end) start(step + C::kKeys);
      if (has_pairs) {
        finish(x);
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
          for (int j = 0; j < C::kStepSlots; ++j) weights[r * C::kPitch + j * kLanes + lane_id()] = x[r][j];
      }
      __syncthreads();
      if (!has_pairs) continue;
      if (select) {
        multiply_step<Width, true>(weights, rows, out);
      } else {
        multiply_step<Width, false>(weights, rows, out);
      }
    }
  }
};

// Chains over all slots that a block of rows sees, a wave of tiles after the other. `find(wave, wave_end, initial)` fills `held` with the
// pairs of [wave, wave_end), the first time by a pass over all slots; false: no chains are wanted. `sum(wave, wave_end, select,
// out)` goes on over a wave, and `store(out)` ends. `held` has room for `held_tiles` tiles of WarpTile floats a warp, and one more to park
// sums.
template <int Width, int Warps, int WarpTile, typename Find, typename Sum, typename Store>
__device__ __forceinline__ void sum_in_waves(const BlockRows<Warps>& block, float* held, int32_t held_tiles, Find find, Sum sum,
                                             Store store) {
  const int32_t first = block.first_tile(), end = block.any.end;
  float* parked = held + (static_cast<int64_t>(held_tiles) * Warps + warp_id()) * WarpTile;
  bool select = false;
  int32_t wave = first, in_workspace = -1;
#pragma unroll 1
  while (true) {
    const int32_t wave_end = min(static_cast<int64_t>(end), wave + static_cast<int64_t>(held_tiles) * attn::kTile);
    if (wave != in_workspace) {
      __syncthreads();
      if (!find(wave, wave_end, in_workspace < 0)) return;
      in_workspace = wave;
    }
    Outputs<Width> out;
    if (wave == first) {
      out.clear();
    } else {
      out.unpark(parked);
    }
    sum(wave, wave_end, select, out);
    if (wave_end < end) {
      out.park(parked);
      wave = wave_end;
      continue;
    }
    // A NaN may come from a masked pair's zero product with an infinity or a NaN: then sum again without those terms.
    if (!__syncthreads_or(out.has_nan()) || select) {
      store(out);
      return;
    }
    select = true;
    wave = first;
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
