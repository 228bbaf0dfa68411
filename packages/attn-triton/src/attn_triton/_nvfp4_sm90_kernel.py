"""P rounded to NVFP4 in registers on Hopper (docs/contracts/nvfp4-v1.md, sections 1 and 3): the bits of ``_nvfp4_kernel``, no branches.

P is not negative, so no sign is kept, and where it is NaN its block is. An IEEE division compiles to a call for operands at the ends of the
range; the quotients here stay away from them. Compile with ``enable_fp_fusion=False``.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton.language as tl

from attn_triton._device_function import device_function
from attn_triton._nvfp4_kernel import BLOCK_VALUES

__all__ = ["p_along_columns", "p_along_rows", "reciprocal"]

BLOCK = tl.constexpr(BLOCK_VALUES)
SIXTH = tl.constexpr(float.fromhex("0x1.555556p-3"))
LEAST = tl.constexpr(2.0**-60)
E4M3 = tl.constexpr(
    """{
    .reg .b16 codes, low, high;
    .reg .b32 halves;
    cvt.rn.satfinite.e4m3x2.f32 codes, $3, $2;
    cvt.rn.f16x2.e4m3x2 halves, codes;
    mov.b32 {low, high}, halves;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
    }"""
)
"""Two scales: nearest even, at most 448, NaN kept."""
E2M1 = """
    .reg .f32 {y};
    .reg .b32 {power};
    mul.rn.f32 {y}, {x}, {inverse};
    max.f32 {power}, {y}, 0f3F800000;
    and.b32 {power}, {power}, 0x7F800000;
    fma.rn.f32 {y}, {power}, 0f4A800000, {y};
    fma.rn.f32 {y}, {power}, 0fCA800000, {y};
"""
"""y = x * inverse to steps of 0.5, 1, 2, ...: the sum with 2^22 times the power of two at or below max(y, 1) rounds it so. The largest
code is left to a minimum with 6."""
ONE = tl.constexpr("{" + E2M1.format(y="y", power="p", x="$1", inverse="$2") + "min.f32 $0, y, 0f40C00000; }")
TWO = E2M1.format(y="y", power="p", x="$1", inverse="$3") + E2M1.format(y="z", power="r", x="$2", inverse="$4")
PACKED = """
    .reg .b32 pair, six;
    mov.b32 six, {six};
    cvt.rn.{type}.f32 pair, z, y;
    min.{type} pair, pair, six;
    mul.rn.{type} $0, pair, $5;
"""
TWO_BF16 = tl.constexpr("{" + TWO + PACKED.format(type="bf16x2", six="0x40C040C0") + "}")
TWO_FP16 = tl.constexpr("{" + TWO + PACKED.format(type="f16x2", six="0x46004600") + "}")
"""Code times scale, which is exact in halves, of two values."""


@device_function
def reciprocal(x):
    """``RN(1 / x)`` of x between 2^-100 and 2^100: one Newton step from the hardware's estimate, as in CUDA's ``rcp.rn``."""
    estimate = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(estimate, tl.fma(-x, estimate, 1.0), estimate)


@device_function
def _scales(largest, encode, decode):
    """E4M3 scales (float32) of blocks with that largest value (bits), and what their values are multiplied by: any number if that is 0.

    The quotient by 6 is IEEE from 1e-30; a smaller one has scale 0.
    """
    largest = largest.to(tl.float32, bitcast=True)
    quotient = largest * SIXTH
    quotient = tl.fma(tl.fma(quotient, -6.0, largest), SIXTH, quotient)
    scale = tl.inline_asm_elementwise(E4M3, "=f,=f,f,f", [quotient * encode], dtype=tl.float32, is_pure=True, pack=2)
    return scale, reciprocal(tl.maximum(scale * decode, LEAST))


@device_function
def p_along_columns(x, encode, decode, HALF: tl.constexpr):
    """x float32 [R, C] rounded in blocks of 16 columns, before the product with ``decode`` ([1, 1] like ``encode``), in dtype HALF."""
    blocks = tl.reshape(x, [x.shape[0], x.shape[1] // BLOCK, BLOCK])
    scale, inverse = _scales(tl.max(blocks.to(tl.int32, bitcast=True), axis=2), encode, decode)
    inverse = tl.broadcast_to(inverse[:, :, None], blocks.shape)
    scale = tl.broadcast_to(scale[:, :, None], blocks.shape)
    if HALF == tl.bfloat16:  # noqa: SIM300
        inputs = [blocks, inverse, scale.to(tl.bfloat16)]
        values = tl.inline_asm_elementwise(TWO_BF16, "=r,f,f,f,f,r", inputs, dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        inputs = [blocks, inverse, scale.to(tl.float16)]
        values = tl.inline_asm_elementwise(TWO_FP16, "=r,f,f,f,f,r", inputs, dtype=tl.float16, is_pure=True, pack=2)
    return tl.reshape(values, x.shape)


@device_function
def p_along_rows(x, encode, decode):
    """x float32 [R, C] rounded in blocks of 16 rows, before the product with ``decode``, float32."""
    blocks = tl.reshape(x, [x.shape[0] // BLOCK, BLOCK, x.shape[1]])
    scale, inverse = _scales(tl.max(blocks.to(tl.int32, bitcast=True), axis=1), encode, decode)
    inputs = [blocks, tl.broadcast_to(inverse[:, None, :], blocks.shape)]
    codes = tl.inline_asm_elementwise(ONE, "=f,f,f", inputs, dtype=tl.float32, is_pure=True, pack=1)
    return tl.reshape(codes * scale[:, None, :], x.shape)
