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
    _load,
    _logical_scores,
    _offsets,
    _ordered_key,
    _store,
    max_nan,
)

__all__ = ["softmax_backward", "softmax_forward"]

TILE = tl.constexpr(1024)
HIGH = tl.constexpr(32)
LOW = tl.constexpr(32)
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
def _tree_max(x):
    """[32, ROWS, 32] -> [ROWS]. A maximum does not depend on its order, so slots of different threads meet as integers in one reduction."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0)))
        x = max_nan(a, b)
    key = tl.max(_ordered_key(tl.reshape(x, [x.shape[1], x.shape[2]])), axis=1)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@device_function
def _tree_sum(x):
    """[32, ROWS, 32] -> [ROWS] by the halves tree. Every sum here has two terms, so no compiler can choose an order."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0)))
        x = a + b
    x = tl.reshape(x, [x.shape[1], x.shape[2]])
    for _ in tl.static_range(5):
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@device_function
def _exponentials(x):
    """Exponentials of a tile from its maximum, +0 where masked, and the maximum [ROWS]."""
    tile_max = _tree_max(x)
    offset = tl.where(tile_max == NEGATIVE_INFINITY, 0.0, tile_max)[None, :, None]
    return tl.where(x == NEGATIVE_INFINITY, 0.0, exp_nonpositive(x - offset)), tile_max


@device_function
def _merge(row_max, row_sum, tile_max, tile_sum):
    """Row state after one more tile. One exp does for both: the state that holds the new maximum is multiplied by exp(0) = 1."""
    maximum = max_nan(row_max, tile_max)
    newer = tile_max > row_max
    ratio = exp_nonpositive(tl.where(newer, row_max, tile_max) - maximum)
    merged = tl.where(newer, row_sum * ratio, row_sum) + tl.where(newer, tile_sum, tile_sum * ratio)
    first = row_max == NEGATIVE_INFINITY
    dead = tile_max == NEGATIVE_INFINITY
    state_max = tl.where(dead, row_max, tl.where(first, tile_max, maximum))
    state_sum = tl.where(dead, row_sum, tl.where(first, tile_sum, merged))
    return state_max, state_sum


@device_function
def _factor(tile_max, row_max, row_sum):
    """What turns the exponentials of a tile into P [ROWS]; +0 for a dead tile or row."""
    dead = tile_max == NEGATIVE_INFINITY
    return tl.div_rn(tl.where(dead, 0.0, exp_nonpositive(tl.where(dead, 0.0, tile_max - row_max))), tl.where(dead, 1.0, row_sum))


@device_function
def _slots():
    high = tl.arange(0, HIGH)[:, None, None]
    return high * LOW + tl.arange(0, LOW)[None, None, :]


@device_function
def _tiles(length):
    """Number of tiles of the longest row; written so that lengths up to 2^31 - 1 do not overflow."""
    longest = tl.max(length, axis=0)
    return longest // TILE + (longest % TILE != 0).to(tl.int32)


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
    for tile in range(0, _tiles(stored)):
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
    slot = _slots()
    length = _lengths(counts, batch, row, rows, stored, HAS_MASK)
    m = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    for tile in range(0, _tiles(length)):
        x, _, _ = _logical_scores(scores, index, row_start, mask_start, length, tile * TILE, slot, HAS_MASK)
        e, tile_max = _exponentials(x)
        m, s = _merge(m, s, tile_max, _tree_sum(e))
    tl.store(row_max + row, m + 0.0, mask=row < rows)  # the zero rule: -0 is stored as +0
    tl.store(row_sum + row, s, mask=row < rows)
    for tile in range(0, _tiles(length)):
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
    slot = _slots()
    length = _lengths(counts, batch, row, rows, stored, HAS_MASK)
    m = tl.load(row_max + row, mask=row < rows, other=NEGATIVE_INFINITY)
    s = tl.load(row_sum + row, mask=row < rows, other=0.0)
    delta = tl.zeros([ROWS], tl.float32)
    for tile in range(0, _tiles(length)):
        first = tile * TILE
        x, place, present = _logical_scores(scores, index, row_start, mask_start, length, first, slot, HAS_MASK)
        base = row_start if HAS_MASK else row_start + first
        dp = _load((dprobs + base)[None, :, None], place, present)
        e, tile_max = _exponentials(x)
        delta += _tree_sum(tl.where(x == NEGATIVE_INFINITY, 0.0, (e * _factor(tile_max, m, s)[None, :, None]) * dp))
    for tile in range(0, _tiles(length)):
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
