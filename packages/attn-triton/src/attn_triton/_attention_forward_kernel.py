"""Row states of contract ordered-v1's attention in one kernel, for 4-bit attention, which computes its scores again.

A program owns ROWS rows of one kv head's group and goes over the slots that any of them sees. Nothing of the size of the scores is stored.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._device_function import device_function
from attn_triton._scores_kernel import QUARTER, row_values, scores_of, tree_max, tree_sum
from attn_triton._softmax_kernel import _merge, exp_nonpositive, max_nan
from attn_triton._visibility_kernel import again, find_work, keys_at, rows_at, sizes_of, slot_range

__all__ = ["attention_row_states", "store_states"]

TILE = tl.constexpr(256)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
SQRT2_BITS = tl.constexpr(0x3FB504F3)
LN2_TOP = tl.constexpr(float.fromhex("0x1.63p-1"))
LN2_CORRECTION = tl.constexpr(float.fromhex("-0x1.bd0106p-13"))
LN_FIRST = tl.constexpr(float.fromhex("0x1.204376p-4"))


@device_function
def _ln(z):
    """Natural logarithm of z >= 1, +inf or NaN."""
    bits = z.to(tl.int32, bitcast=True)
    mantissa = (bits & 0x7FFFFF) | 0x3F800000
    halve = mantissa >= SQRT2_BITS
    f = mantissa.to(tl.float32, bitcast=True)
    f = tl.where(halve, f * 0.5, f)
    k = ((bits >> 23) - 127 + halve.to(tl.int32)).to(tl.float32)
    t = f - 1.0
    w = t * t
    p = t * LN_FIRST + -0.11514610052108765
    p = p * t + 0.11676998436450958
    p = p * t + -0.12420140951871872
    p = p * t + 0.14249323308467865
    p = p * t + -0.16668057441711426
    p = p * t + 0.2000071406364441
    p = p * t + -0.24999994039535522
    p = p * t + 0.3333333134651184
    y = (t * w) * p
    y = y + k * LN2_CORRECTION
    y = y - w * 0.5
    y = t + y
    y = y + k * LN2_TOP
    return tl.where((z != z) | (z == float("inf")), z, y)


@device_function
def _log_sum(m, s):
    """LSE of row states; that of a dead row is -inf."""
    dead = m == NEGATIVE_INFINITY
    return tl.where(dead, NEGATIVE_INFINITY, (m + _ln(tl.where(dead, 1.0, s))) + 0.0)


@device_function
def store_states(arrays, sizes, item, rows, m, s, lse, row_max, row_sum):
    """LSE and states of rows: those of their keys, then the sink, a tile whose exponentials sum to 1."""
    if arrays.sinks is not None:
        sink = tl.load(arrays.sinks + rows.head, mask=rows.present, other=NEGATIVE_INFINITY)
        # exp(sink - maximum) is NaN for an infinite sink, which alone in its row is copied.
        total = tl.where((sink == float("inf")) & (m != NEGATIVE_INFINITY), float("nan"), 1.0)
        m, s = _merge(m, s, sink, total)
    at = row_values(arrays, sizes, item, rows)
    tl.store(lse + at, _log_sum(m, s), mask=rows.present)
    tl.store(row_max + at, m, mask=rows.present)
    tl.store(row_sum + at, s, mask=rows.present)


@device_function
def _scores(arrays, sizes, item, kv_head, rows, first, M: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr):
    """Final scores [M, KEYS] of the slots [first, first + KEYS)."""
    keys = keys_at(arrays, sizes, item, first, KEYS)
    return scores_of(arrays, sizes, item, kv_head, rows, keys, M, KEYS, CHUNK, DOT)


@device_function
def _tile_state(arrays, sizes, item, kv_head, rows, first, M: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr):
    """Maximum and sum of exponentials [M] of the tile that begins at slot ``first``, as a whole or in quarters that meet by elements."""
    if KEYS == TILE:
        x = _scores(arrays, sizes, item, kv_head, rows, first, M, TILE, CHUNK, DOT)
        top = tree_max(x)
        total = tree_sum(exp_nonpositive(x - tl.where(top == NEGATIVE_INFINITY, 0.0, top)[:, None]), 8)
    else:
        x0 = tl.full([M, QUARTER], NEGATIVE_INFINITY, tl.float32)
        x1, x2, x3 = x0, x0, x0
        # One copy of the product for all quarters: four would not fit the instruction cache.
        for quarter in range(4):
            x = _scores(arrays, sizes, item, kv_head, rows, first + quarter * QUARTER, M, QUARTER, CHUNK, DOT)
            x0 = tl.where(quarter == 0, x, x0)
            x1 = tl.where(quarter == 1, x, x1)
            x2 = tl.where(quarter == 2, x, x2)
            x3 = tl.where(quarter == 3, x, x3)
        top = tree_max(max_nan(max_nan(x0, x2), max_nan(x1, x3)))
        offset = tl.where(top == NEGATIVE_INFINITY, 0.0, top)[:, None]
        even = exp_nonpositive(x0 - offset) + exp_nonpositive(x2 - offset)
        odd = exp_nonpositive(x1 - offset) + exp_nonpositive(x3 - offset)
        total = tree_sum(even + odd)
    return top, total


@triton.jit(do_not_specialize=["per_item"])
def attention_row_states(
    arrays,
    sizes,
    plan,
    per_item,
    lse,
    row_max,
    row_sum,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """LSE and the row state of one block of rows; a dead row has -inf, -inf and 0."""
    sizes = sizes_of(sizes)
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    rows = rows_at(arrays, sizes, item, work.kv_head, work.block * ROWS, ROWS)
    begin, end = slot_range(arrays, sizes, item, rows)
    m = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
    s = tl.full([ROWS], 0, tl.float32)
    for first in range(begin & -TILE, end, TILE):
        tile_max, tile_sum = _tile_state(arrays, sizes, item, work.kv_head, rows, first, ROWS, KEYS, CHUNK, DOT)
        m, s = _merge(m, s, tile_max, tile_sum)
    rows = rows_at(arrays, sizes, item, work.kv_head, again(work.block, DOT) * ROWS, ROWS)
    store_states(arrays, sizes, item, rows, m, s, lse, row_max, row_sum)
