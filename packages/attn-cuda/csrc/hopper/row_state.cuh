// State of the two rows of a thread in the segment in work, and what a tile and the end of a segment do to it.
// Source: docs/contracts/sm90-v1.md, section 3.
#pragma once

#include "hopper/row_block.cuh"

namespace attn_cuda::hopper {

constexpr int kScores = kTileKeys / 2;  // of a tile, in a thread
constexpr int kSteps = kTileKeys / kStepColumns;

// The two rows of a thread, as it sees the keys; `inner` and `outer` bound the tiles that all rows of the warp see as a whole.
struct RowPair {
  Visible keys[2];
  int32_t inner, outer;

  // Of thread `thread` of a warpgroup with these rows. An absent row sees all, so that it asks for no mask.
  __device__ __forceinline__ RowPair(const Attention& problem, const Item& item, const Row* rows, int thread) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Row row = rows[row_of_thread(thread, h)];
      keys[h] = row.head < 0 ? Visible{0, item.used} : visible_keys(problem, item, row.query);
    }
    inner = __reduce_max_sync(~0u, max(keys[0].lower, keys[1].lower));
    outer = __reduce_min_sync(~0u, min(keys[0].upper, keys[1].upper));
  }

  // For rows that all see the keys below `upper`: up to a hole, and past it.
  __device__ __forceinline__ void see_below(int32_t upper) { keys[0].upper = keys[1].upper = outer = upper; }

  // Scores of the tile that begins with stored key `first`: -inf for what a row does not see.
  __device__ __forceinline__ void mask(float (&s)[kScores], int32_t first) const {
    if (first >= inner && first + kTileKeys <= outer) return;
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t lower = keys[h].lower - first - column, upper = keys[h].upper - first - column;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < lower || 8 * j + e >= upper) s[4 * j + 2 * h + e] = dead();
      }
    }
  }
};

// Largest score of each row.
__device__ __forceinline__ void row_maxima(const float (&s)[kScores], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int j = 1; j < kScores / 4; ++j) top[h] = fmaxf(top[h], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) top[h] = quad_max(top[h]);
}

struct SegmentState {
  float n[2], l[2][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) n[h] = dead(), l[h][0] = l[h][1] = 0.0f;
  }

  // n after a tile whose largest scores are `top`, the origins of its exponents, and the factor of O.
  __device__ __forceinline__ void advance(const float (&top)[2], float factor, float (&origin)[2], float (&alpha)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float following = fmaxf(n[h], mul(top[h], factor));
      origin[h] = origin_of(following);
      alpha[h] = ex2(sub(n[h], origin[h]));
      n[h] = following;
    }
  }

  // Scores become p; `alpha` is the factor of O.
  __device__ __forceinline__ void weigh(float (&s)[kScores], const float (&top)[2], float factor, float (&alpha)[2]) {
    float origin[2];
    advance(top, factor, origin, alpha);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) s[4 * j + 2 * h + e] = ex2(fma(s[4 * j + 2 * h + e], factor, -origin[h]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) l[h][e] = fma(l[h][e], alpha[h], class_of<kScores / 4>(s, h, e));
    }
  }

  // The same with O, which is scaled, and p as operands. In slices whose sums and conversions follow the exponentials of the next slice:
  // ptxas then keeps them between exponentials, which costs the tensor cores less than runs of additions do.
  template <typename Half>
  __device__ __forceinline__ void weigh_and_scale(float (&s)[kScores], const float (&top)[2], float factor, uint32_t (&p)[kSteps][4],
                                                  float (&o)[kScores]) {
    constexpr int kSlices = 4, kGroups = kScores / 4 / kSlices;  // of a row; the groups of a slice are kSlices apart
    static_assert(kGroups == 4);
    float origin[2], alpha[2], parts[2][2][kSlices];
    advance(top, factor, origin, alpha);
    const auto finish = [&](int h, int slice) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto of_group = [&](int i) { return s[4 * (slice + kSlices * i) + 2 * h + e]; };
        parts[h][e][slice] = add(add(of_group(0), of_group(2)), add(of_group(1), of_group(3)));
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int j = slice + kSlices * i;
        p[j / 2][j % 2 * 2 + h] = pair_of<Half>(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
      }
    };
#pragma unroll
    for (int turn = 0; turn < 2 * kSlices; ++turn) {
      const int h = turn / kSlices, slice = turn % kSlices;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * (slice + kSlices * i) + 2 * h + e];
          x = ex2(fma(x, factor, -origin[h]));
        }
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = o[4 * (slice + kSlices * i) + 2 * h + e];
          x = mul(x, alpha[h]);
        }
      }
      if (turn > 0) finish((turn - 1) / kSlices, (turn - 1) % kSlices);
    }
    finish(1, kSlices - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) l[h][e] = fma(l[h][e], alpha[h], sum_by_halves(parts[h][e]));
    }
  }

  __device__ __forceinline__ float sum(int h) const { return row_sum(l[h][0], l[h][1]); }
};

template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], const float (&alpha)[2]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) o[4 * j + 2 * h + e] = mul(o[4 * j + 2 * h + e], alpha[h]);
    }
  }
}

// The merged state of the segments before the one in work. Its O lies in shared memory, pieces of four floats of one thread each, which no
// other thread touches.
struct MergedState {
  float n[2], l[2];
  Factors factors[2];  // of the last segment
  int segments = 0;

  // Takes n and l of a segment. The first one is copied.
  __device__ __forceinline__ void append(const SegmentState& segment) {
    const float sum[2] = {segment.sum(0), segment.sum(1)};
    if (segments == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) n[h] = segment.n[h], l[h] = sum[h];
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factors[h] = merge_factors(n[h], l[h], segment.n[h], sum[h]);
        n[h] = factors[h].n;
        l[h] = merged(l[h], sum[h], factors[h]);
      }
    }
    ++segments;
  }

  // O of that segment becomes the merged one.
  template <int kCount>
  __device__ __forceinline__ void merge(float (&o)[kCount], const float4* pieces, int threads) const {
    if (segments == 1) return;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float4 before = pieces[j * threads];
      o[4 * j] = merged(before.x, o[4 * j], factors[0]);
      o[4 * j + 1] = merged(before.y, o[4 * j + 1], factors[0]);
      o[4 * j + 2] = merged(before.z, o[4 * j + 2], factors[1]);
      o[4 * j + 3] = merged(before.w, o[4 * j + 3], factors[1]);
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void keep(const float (&o)[kCount], float4* pieces, int threads) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) pieces[j * threads] = make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
  }
};

// o (64 x kColumns) = p (64 x 128, operands of the eight steps) times the tile of v at `tile`, from o or, where `accumulate` is 0, from +0.
template <typename Half, int kCount>
__device__ __forceinline__ void values_product(float (&o)[kCount], const uint32_t (&p)[kSteps][4], const uint8_t* tile, int accumulate) {
  const uint64_t v = row_descriptor(tile, kTileKeys * kPanelRowBytes);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) mma_step<Half, kAlongRows>(o, p[step], v + step * kRowStep, step == 0 ? accumulate : 1);
}

// s (64 x 128) = the warpgroup's queries times the tile of k at `tile`.
template <typename Half, int kColumns>
__device__ __forceinline__ void scores_product(float (&s)[kScores], const uint8_t* queries, const uint8_t* tile) {
#pragma unroll
  for (int panel = 0; panel < kColumns / kPanel; ++panel) {
    const uint64_t q = column_descriptor(queries + panel * (kWarpgroupRows * kPanelRowBytes));
    const uint64_t k = column_descriptor(tile + panel * (kTileKeys * kPanelRowBytes));
#pragma unroll
    for (int step = 0; step < kPanel / kStepColumns; ++step)
      mma_step<Half>(s, q + step * kColumnStep, k + step * kColumnStep, panel + step > 0);
  }
}

}  // namespace attn_cuda::hopper
