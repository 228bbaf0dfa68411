"""Softmax rows of contract ordered-v2 (docs/contracts/ordered-v2.md), forward and backward.

A program owns ROWS rows and walks their 1024-slot tiles from left to right, twice: the exponentials of a tile are computed again rather
than stored. A tile is held as [32, ROWS, 32], slot = 32 * i + j. The FMAs are those of the contract; every other multiplication and
addition is rounded: compile with ``enable_fp_fusion=False``.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton import _interpreted_chain
from attn_triton._device_function import device_function
from attn_triton._softmax_kernel import (
    INTERPRETED,
    NEGATIVE_INFINITY,
    _apart,
    _load,
    _logical_scores,
    _merged,
    _offsets,
    _slots,
    _store,
    _tiles,
    _tree_max,
    _tree_sum,
)

__all__ = ["softmax_backward", "softmax_forward"]

TILE = tl.constexpr(1024)
HIGH = tl.constexpr(32)
LEVELS = tl.constexpr(5)

LEAST = tl.constexpr(float.fromhex("-0x1.5bf5bap+6"))
LOG2E = tl.constexpr(float.fromhex("0x1.715476p+0"))
MINUS_LN2_HIGH = tl.constexpr(float.fromhex("-0x1.62e430p-1"))
MINUS_LN2_LOW = tl.constexpr(float.fromhex("0x1.05c610p-29"))
ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
EXP6 = tl.constexpr(float.fromhex("0x1.6a244cp-10"))
EXP5 = tl.constexpr(float.fromhex("0x1.1239d4p-7"))
EXP4 = tl.constexpr(float.fromhex("0x1.5558f2p-5"))
EXP3 = tl.constexpr(float.fromhex("0x1.555492p-3"))
EXP2 = tl.constexpr(float.fromhex("0x1.fffffcp-2"))


@device_function
def _fma(a, b, c):
    return tl.fma(a, b, c)


if INTERPRETED:
    _fma = _interpreted_chain.fma


@device_function
def exp_nonpositive(x):
    """exp(x) for x <= 0 or NaN, +0 below LEAST. A NaN is selected, since the sum of its bits and an exponent may be a number."""
    shifted = _fma(x, LOG2E, ROUND_TO_INTEGER)
    n = shifted - ROUND_TO_INTEGER
    r = _fma(n, MINUS_LN2_LOW, _fma(n, MINUS_LN2_HIGH, x))
    p = _fma(r, EXP6, EXP5)
    p = _fma(p, r, EXP4)
    p = _fma(p, r, EXP3)
    p = _fma(p, r, EXP2)
    p = _fma(p, r, 1.0)
    p = _fma(p, r, 1.0)
    result = (p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    return tl.where(x < LEAST, 0.0, tl.where(x != x, x, result))


@device_function
def _exponentials(x):
    """Exponentials of a tile from its maximum, +0 where masked, and the maximum [ROWS]."""
    tile_max = _tree_max(x, LEVELS)
    offset = tl.where(tile_max == NEGATIVE_INFINITY, 0.0, tile_max)[None, :, None]
    return tl.where(x == NEGATIVE_INFINITY, 0.0, exp_nonpositive(x - offset)), tile_max


@device_function
def _merge(row_max, row_sum, tile_max, tile_sum):
    """Row state after one more tile."""
    return _merged(row_max, row_sum, tile_max, tile_sum, exp_nonpositive(_apart(row_max, tile_max)))


@device_function
def _factor(tile_max, row_max, row_sum):
    """What turns the exponentials of a tile into P [ROWS]; +0 for a dead tile or row."""
    dead = tile_max == NEGATIVE_INFINITY
    return tl.div_rn(tl.where(dead, 0.0, exp_nonpositive(tl.where(dead, 0.0, tile_max - row_max))), tl.where(dead, 1.0, row_sum))


@device_function
def _lengths(counts, batch, row, rows, stored, HAS_MASK: tl.constexpr):
    """Logical keys of each row."""
    length = stored
    if HAS_MASK:
        length = tl.load(counts + batch, mask=row < rows, other=0)
    return length


@device_function
def _store_tile(results, row_start, first, place, value, present, HAS_MASK: tl.constexpr, INTEGER_ROUNDING: tl.constexpr):
    """Slots of a logical tile to the positions where their keys are stored."""
    base = row_start if HAS_MASK else row_start + first
    _store((results + base)[None, :, None] + place, value, present, INTEGER_ROUNDING)


@device_function
def _store_dropped(results, keep, row_start, mask_start, stored, slot, INTEGER_ROUNDING: tl.constexpr):
    """+0 at the keys that the mask drops."""
    for tile in range(0, _tiles(stored, TILE)):
        first = tile * TILE
        present = slot < (stored - first)[None, :, None]
        kept = tl.load((keep + (mask_start + first))[None, :, None] + slot, mask=present, other=1)
        zeros = tl.zeros(kept.shape, tl.float32)
        _store((results + (row_start + first))[None, :, None] + slot, zeros, present & (kept == 0), INTEGER_ROUNDING)


@triton.jit(do_not_specialize=["rows", "rows_per_batch"])
def softmax_forward(
    scores,
    keep,
    index,
    counts,
    probs,
    row_max,
    row_sum,
    rows,
    keys,
    rows_per_batch,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """P and the row state (m, s) of scores [rows, keys]; arguments as in ``_softmax_kernel.softmax_forward``."""
    row, batch, stored, row_start, mask_start = _offsets(rows, keys, rows_per_batch, ROWS)
    slot = _slots(HIGH)
    length = _lengths(counts, batch, row, rows, stored, HAS_MASK)
    m = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    for tile in range(0, _tiles(length, TILE)):
        x, _, _ = _logical_scores(scores, index, row_start, mask_start, length, tile * TILE, slot, HAS_MASK)
        e, tile_max = _exponentials(x)
        m, s = _merge(m, s, tile_max, _tree_sum(e, LEVELS))
    tl.store(row_max + row, m + 0.0, mask=row < rows)  # the zero rule: -0 is stored as +0
    tl.store(row_sum + row, s, mask=row < rows)
    for tile in range(0, _tiles(length, TILE)):
        first = tile * TILE
        x, place, present = _logical_scores(scores, index, row_start, mask_start, length, first, slot, HAS_MASK)
        e, tile_max = _exponentials(x)
        p = tl.where(x == NEGATIVE_INFINITY, 0.0, e * _factor(tile_max, m, s)[None, :, None])
        _store_tile(probs, row_start, first, place, p, present, HAS_MASK, INTEGER_ROUNDING)
    if HAS_MASK:
        _store_dropped(probs, keep, row_start, mask_start, stored, slot, INTEGER_ROUNDING)


@triton.jit(do_not_specialize=["rows", "rows_per_batch"])
def softmax_backward(
    dprobs,
    scores,
    keep,
    index,
    counts,
    row_max,
    row_sum,
    dscores,
    rows,
    keys,
    rows_per_batch,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """dscores [rows, keys] from dprobs and the saved row state; P is recomputed.

    delta is summed from +0 over every tile: a dead tile adds +0, and the sign of a zero delta cannot show, since stored zeros are +0.
    """
    row, batch, stored, row_start, mask_start = _offsets(rows, keys, rows_per_batch, ROWS)
    slot = _slots(HIGH)
    length = _lengths(counts, batch, row, rows, stored, HAS_MASK)
    m = tl.load(row_max + row, mask=row < rows, other=NEGATIVE_INFINITY)
    s = tl.load(row_sum + row, mask=row < rows, other=0.0)
    delta = tl.zeros([ROWS], tl.float32)
    for tile in range(0, _tiles(length, TILE)):
        first = tile * TILE
        x, place, present = _logical_scores(scores, index, row_start, mask_start, length, first, slot, HAS_MASK)
        base = row_start if HAS_MASK else row_start + first
        dp = _load((dprobs + base)[None, :, None], place, present)
        e, tile_max = _exponentials(x)
        delta += _tree_sum(tl.where(x == NEGATIVE_INFINITY, 0.0, (e * _factor(tile_max, m, s)[None, :, None]) * dp), LEVELS)
    for tile in range(0, _tiles(length, TILE)):
        first = tile * TILE
        x, place, present = _logical_scores(scores, index, row_start, mask_start, length, first, slot, HAS_MASK)
        e, tile_max = _exponentials(x)
        base = row_start if HAS_MASK else row_start + first
        dp = _load((dprobs + base)[None, :, None], place, present)
        dx = (e * _factor(tile_max, m, s)[None, :, None]) * (dp - delta[None, :, None])
        dx = tl.where(x == NEGATIVE_INFINITY, 0.0, dx + 0.0)
        _store_tile(dscores, row_start, first, place, dx, present, HAS_MASK, INTEGER_ROUNDING)
    if HAS_MASK:
        _store_dropped(dscores, keep, row_start, mask_start, stored, slot, INTEGER_ROUNDING)
