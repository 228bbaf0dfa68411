"""NVFP4 in registers, and the kernels that round Q, K and V to it (docs/contracts/nvfp4-v1.md, sections 1 and 2).

A block's codes and scale stay numbers: an E2M1 value times an E4M3 scale. Compile with ``enable_fp_fusion=False``.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._chain_kernel import chain, read_rows
from attn_triton._device_function import device_function
from attn_triton._scores_kernel import key_rows
from attn_triton._softmax_kernel import _store
from attn_triton._visibility_kernel import find_work, item_of, keys_at, sizes_of

__all__ = ["BLOCK_VALUES", "OUTERS", "fake_quantize", "quantized_along_columns", "quantized_along_rows", "token_means", "token_peaks"]

BLOCK_VALUES = 16
OUTERS = {"constant": 0, "row": 1, "tile": 2}
BLOCK = tl.constexpr(BLOCK_VALUES)
ROW = tl.constexpr(OUTERS["row"])
TILE = tl.constexpr(OUTERS["tile"])
INFINITY = tl.constexpr(float("inf"))
MEAN_ROWS = tl.constexpr(16)


@device_function
def _largest(x, axis: tl.constexpr):
    """Largest magnitude along an axis, NaN if any is: magnitudes order like their bits, NaN on top."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis).to(tl.float32, bitcast=True)


@device_function
def _block_scale(largest, encode):
    """The E4M3 scale of blocks, as a number: nearest even, at most 448, multiples of 2^-9 below 2^-6; NaN where ``largest`` is no finite
    number."""
    t = tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)) * encode
    bits = t.to(tl.int32, bitcast=True)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000).to(tl.float32, bitcast=True)
    small = ((t * 512.0 + 8388608.0) - 8388608.0) * 0.001953125
    scale = tl.where(t < 0.015625, small, tl.where(normal > 448.0, 448.0, normal))
    return tl.where((largest < INFINITY) & (t == t), scale, float("nan"))


@device_function
def _rounded_e2m1(y):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of y, ties to the even code: sums with a power of two round
    to steps of 0.5, 1 and 2."""
    a = tl.minimum(tl.abs(y), 6.0)
    step = tl.where(a < 2.0, 4194304.0, tl.where(a < 4.0, 8388608.0, 16777216.0))
    rounded = (a + step) - step
    return (rounded.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@device_function
def _quantized(x, scale, decode):
    """Values of blocks x whose ``scale`` broadcasts against them."""
    live = (scale == scale) & (scale != 0.0)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(live, scale * decode, 1.0))
    return tl.where(scale == 0.0, 0.0, _rounded_e2m1(x * inverse) * scale * decode)


@device_function
def quantized_along_columns(x, encode, decode):
    """x float32 [R, C] rounded in blocks of 16 columns; ``encode`` and ``decode`` are [R, 1] or [1, 1]."""
    blocks = tl.reshape(x, [x.shape[0], x.shape[1] // BLOCK, BLOCK])
    scale = _block_scale(_largest(blocks, 2), encode)
    return tl.reshape(_quantized(blocks, scale[:, :, None], decode[:, :, None]), x.shape)


@device_function
def quantized_along_rows(x, encode, decode):
    """x float32 [R, C] rounded in blocks of 16 rows; ``encode`` and ``decode`` are [1, C] or [1, 1]."""
    blocks = tl.reshape(x, [x.shape[0] // BLOCK, BLOCK, x.shape[1]])
    scale = _block_scale(_largest(blocks, 1), encode)
    return tl.reshape(_quantized(blocks, scale[:, None, :], decode[:, None, :]), x.shape)


@device_function
def _outer_scales(largest):
    """Encoding and decoding scale of rows or tiles with that largest magnitude."""
    encode = tl.div_rn(tl.full(largest.shape, 2688.0, tl.float32), tl.where(largest > 1e-8, largest, 1e-8))
    encode = tl.where(largest < INFINITY, encode, float("nan"))
    return encode, tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), encode)


@triton.jit(do_not_specialize=["per_item", "encode", "decode"])
def fake_quantize(
    arrays,
    sizes,
    plan,
    per_item,
    means,
    peaks,
    encode,
    decode,
    quantized,
    smoothed,
    out_batch,
    out_head,
    out_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """Tokens of ``arrays.k`` rounded to NVFP4 (``quantized``) and before that (``smoothed``); either may be None.

    ``means`` [items, heads, D] is subtracted first. Blocks lie along the head dim, or along the logical tokens (ALONG_TOKENS), with
    ``peaks`` [items, heads, D], the largest magnitude of each row or tile of the transposed matrix, where OUTER is no constant.
    """
    sizes = sizes_of(sizes)
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    first = work.block * ROWS
    if (work.block >= 0) & (first < item.count):
        keys = keys_at(arrays, sizes, item, first.to(tl.int32), ROWS)
        x = read_rows(
            arrays.k, key_rows(item, work.kv_head, keys, arrays.k_batch, arrays.k_head, arrays.k_row), keys.present, arrays.k_column,
            arrays.head_dim, COLUMNS,
        )  # fmt: skip
        column = tl.arange(0, COLUMNS)
        inside = column < arrays.head_dim
        present = keys.present[:, None] & inside[None, :]
        of_item = (item.batch * sizes.kv_heads + work.kv_head) * arrays.head_dim + column
        if means is not None:
            x = tl.where(present, x - tl.load(means + of_item, mask=inside, other=0.0)[None, :], 0.0)
        into = key_rows(item, work.kv_head, keys, out_batch, out_head, out_row)[:, None] + column[None, :]
        if smoothed is not None:
            _store(smoothed + into, x, present, INTEGER_ROUNDING)
        if quantized is not None:
            if OUTER != ROW and OUTER != TILE:
                up, down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
            elif ALONG_TOKENS:
                up, down = _outer_scales(tl.load(peaks + of_item, mask=inside, other=0.0)[None, :])
            elif OUTER == ROW:
                up, down = _outer_scales(_largest(x, 1)[:, None])
            else:
                up, down = _outer_scales(tl.full([1, 1], 0.0, tl.float32) + _largest(_largest(x, 1), 0))
            if ALONG_TOKENS:
                values = quantized_along_rows(x, up, down)
            else:
                values = quantized_along_columns(x, up, down)
            _store(quantized + into, values, present, INTEGER_ROUNDING)


@triton.jit
def token_means(arrays, sizes, means, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr):
    """means [items, heads, D] of the logical tokens of ``arrays.k``: a sum in their order, then one division; 0 of no token.

    A rounded sum is the chain of its terms with ones; the rows of ``total`` are equal and one of them is stored.
    """
    sizes = sizes_of(sizes)
    program = tl.program_id(0).to(tl.int64)
    batch = program // sizes.kv_heads
    head = program - batch * sizes.kv_heads
    item = item_of(arrays, sizes, batch)
    total = tl.zeros([MEAN_ROWS, COLUMNS], tl.float32)
    ones = tl.full([MEAN_ROWS, CHUNK], 1.0, tl.float32)
    for first in range(0, item.count, CHUNK):
        keys = keys_at(arrays, sizes, item, first, CHUNK)
        rows = key_rows(item, head, keys, arrays.k_batch, arrays.k_head, arrays.k_row)
        total = chain(total, ones, read_rows(arrays.k, rows, keys.present, arrays.k_column, arrays.head_dim, COLUMNS, DOT), DOT)
    count = tl.maximum(item.count, 1).to(tl.float32)
    mean = tl.div_rn(total, tl.zeros([MEAN_ROWS, COLUMNS], tl.float32) + count)
    row, column = tl.arange(0, MEAN_ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(means + program * arrays.head_dim + (row * 0 + column), mean, mask=(row == 0) & (column < arrays.head_dim))


@triton.jit
def token_peaks(arrays, sizes, means, peaks, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """peaks [items, heads, D]: the largest magnitude over the logical tokens of ``arrays.k``, less ``means`` when given; NaN if any is."""
    sizes = sizes_of(sizes)
    program = tl.program_id(0).to(tl.int64)
    batch = program // sizes.kv_heads
    head = program - batch * sizes.kv_heads
    item = item_of(arrays, sizes, batch)
    column = tl.arange(0, COLUMNS)
    inside = column < arrays.head_dim
    mean = tl.zeros([COLUMNS], tl.float32)
    if means is not None:
        mean = tl.load(means + program * arrays.head_dim + column, mask=inside, other=0.0)
    largest = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, item.count, CHUNK):
        keys = keys_at(arrays, sizes, item, first, CHUNK)
        rows = key_rows(item, head, keys, arrays.k_batch, arrays.k_head, arrays.k_row)
        x = read_rows(arrays.k, rows, keys.present, arrays.k_column, arrays.head_dim, COLUMNS)
        x = tl.where(keys.present[:, None], x - mean[None, :], 0.0)
        largest = tl.maximum(largest, _largest(x, 0).to(tl.int32, bitcast=True))
    tl.store(peaks + program * arrays.head_dim + column, largest.to(tl.float32, bitcast=True), mask=inside)
