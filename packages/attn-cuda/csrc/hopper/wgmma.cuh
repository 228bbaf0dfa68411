// Products of a warpgroup on the tensor cores: wgmma with m64n64k16 and m64n128k16, halves, binary32 accumulators.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": "wgmma.mma_async" (register fragments, matrix descriptor, canonical
// layouts, strides), "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group".
//
// Accumulator d of thread t: d[4 j + 2 h + e] is row 16 (t div 32) + (t mod 32) div 4 + 8 h, column 8 j + 2 (t mod 4) + e.
// A in registers for columns 16 s .. 16 s + 15: the pairs d[8 s + 0, 1], d[8 s + 2, 3], d[8 s + 4, 5], d[8 s + 6, 7] of an accumulator as
// halves, the even one low.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attn/float_bits.h"
#include "hopper/barrier.cuh"

namespace attn_cuda::hopper {

constexpr int kWarpgroup = 128;  // threads
constexpr int kWarpgroupRows = 64;
constexpr int kStepColumns = 16;  // of one instruction's inner index

// How an operand lies in shared memory, in panels of 64 columns: the inner index along the columns (K-major), or along the rows (MN-major).
constexpr int kAlongColumns = 0, kAlongRows = 1;

// Matrix descriptor with the 128-byte swizzle: the address, the leading and the stride byte offset, in units of 16 bytes.
__device__ __forceinline__ uint64_t descriptor(const void* shared, uint32_t leading_bytes, uint32_t stride_bytes) {
  const uint64_t address = (shared_address(shared) & 0x3FFFF) >> 4;
  return address | static_cast<uint64_t>(leading_bytes >> 4) << 16 | static_cast<uint64_t>(stride_bytes >> 4) << 32 |
         static_cast<uint64_t>(1) << 62;
}

// Of rows of one panel whose inner index runs along the columns: eight rows are 1024 bytes. Step s of the panel: + s * kColumnStep; the
// next panel is a descriptor of its own.
__device__ __forceinline__ uint64_t column_descriptor(const void* shared) { return descriptor(shared, 16, 1024); }

// Of panels `panel_bytes` apart whose inner index runs along the rows: an output column block of 64 a panel. Step s: + s * kRowStep.
__device__ __forceinline__ uint64_t row_descriptor(const void* shared, uint32_t panel_bytes) {
  return descriptor(shared, panel_bytes, 1024);
}

constexpr uint64_t kColumnStep = kStepColumns * 2 >> 4;
constexpr uint64_t kRowStep = kStepColumns * 128 >> 4;

// Before the first wgmma, and wherever registers of one were touched by other instructions.
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kGroups committed groups are unfinished.
template <int kGroups>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// The compiler must not move what uses these registers across this place, which is before a product and after its wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Accumulators of a thread, 64 x 64 and 64 x 128, as operands and in the text of an instruction.
#define ATTN_OUTPUTS_64                                                                                                                 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),  \
      "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
      "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), \
      "+f"(d[31])
#define ATTN_OUTPUTS_128                                                                                                                \
  ATTN_OUTPUTS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), \
      "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), \
      "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define ATTN_NAMES_64                                                                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31"
#define ATTN_NAMES_128                                                                                                                   \
  ATTN_NAMES_64                                                                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63"

// One step; A, B, MORE and LAYOUT are the places of the inputs that follow them.
#define ATTN_WGMMA(N, TYPE, A, B, MORE, LAYOUT, ...)                                                                                \
  asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " MORE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
               " {" ATTN_NAMES_##N "}, " A ", " B ", more, 1, 1, " LAYOUT ";\n}\n"                                                  \
               : ATTN_OUTPUTS_##N                                                                                                   \
               : __VA_ARGS__)
#define ATTN_SHARED(N, TYPE, A, B, MORE, LAYOUT) \
  ATTN_WGMMA(N, TYPE, A, B, MORE, LAYOUT, "l"(a), "l"(b), "r"(accumulate), "n"(kRowsOfA), "n"(kRowsOfB))
#define ATTN_REGISTERS(N, TYPE, A, B, MORE, LAYOUT) \
  ATTN_WGMMA(N, TYPE, A, B, MORE, LAYOUT, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kRowsOfB))

// d (64 x 64) = chain(a, b; d), or of +0 where `accumulate` is 0: one step, both operands in shared memory.
template <typename Half, int kRowsOfA = kAlongColumns, int kRowsOfB = kAlongColumns>
__device__ __forceinline__ void mma_step(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Half, attn::bfloat16>)
    ATTN_SHARED(64, "bf16", "%32", "%33", "%34", "%35, %36");
  else
    ATTN_SHARED(64, "f16", "%32", "%33", "%34", "%35, %36");
}

// The same, 64 x 128.
template <typename Half, int kRowsOfA = kAlongColumns, int kRowsOfB = kAlongColumns>
__device__ __forceinline__ void mma_step(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Half, attn::bfloat16>)
    ATTN_SHARED(128, "bf16", "%64", "%65", "%66", "%67, %68");
  else
    ATTN_SHARED(128, "f16", "%64", "%65", "%66", "%67, %68");
}

// The same with a in registers.
template <typename Half, int kRowsOfB = kAlongColumns>
__device__ __forceinline__ void mma_step(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Half, attn::bfloat16>)
    ATTN_REGISTERS(64, "bf16", "{%32, %33, %34, %35}", "%36", "%37", "%38");
  else
    ATTN_REGISTERS(64, "f16", "{%32, %33, %34, %35}", "%36", "%37", "%38");
}

template <typename Half, int kRowsOfB = kAlongColumns>
__device__ __forceinline__ void mma_step(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Half, attn::bfloat16>)
    ATTN_REGISTERS(128, "bf16", "{%64, %65, %66, %67}", "%68", "%69", "%70");
  else
    ATTN_REGISTERS(128, "f16", "{%64, %65, %66, %67}", "%68", "%69", "%70");
}

#undef ATTN_OUTPUTS_64
#undef ATTN_OUTPUTS_128
#undef ATTN_NAMES_64
#undef ATTN_NAMES_128
#undef ATTN_WGMMA
#undef ATTN_SHARED
#undef ATTN_REGISTERS

}  // namespace attn_cuda::hopper
