"""Softmax rows of contract ordered-v2 (docs/contracts/ordered-v2.md), forward and backward.

A program owns ROWS rows, or one row of which it takes GROUP tiles of 1024 slots a step, each in a warp of its own. The tiles of a step are
held as [n * tiles, LANES * VECTOR], tiles in the low bits, slot = LANES * VECTOR * i + j: a thread reads VECTOR slots at once, and the
upper levels of the trees meet inside it. States of one tile or row are numbers, so that they have no layout.

A row that fits is KEPT steps, FULL of them whole and, where TAIL is not 0, one of tiles whose first TAIL slots alone may have keys. Its
exponentials stay in registers from the sums to the results, and masked scores get no care, as theirs are +0. Where that does not do, beside
NaN and what may overflow, and in other rows, the tiles are walked twice and their exponentials computed twice.

The FMAs are those of the contract; every other multiplication and addition is rounded: compile with ``enable_fp_fusion=False``.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton import _interpreted_chain
from attn_triton._device_function import device_function
from attn_triton._softmax_kernel import INTERPRETED, NEGATIVE_INFINITY, _apart, _merged, _store

__all__ = ["softmax_backward", "softmax_forward"]

TILE = tl.constexpr(1024)

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
INFINITY = tl.constexpr(float("inf"))
TAME = tl.constexpr(2.0**100)
"""A finite dP less a delta below this does not overflow."""


@device_function
def _fma(a, b, c):
    return tl.fma(a, b, c)


if INTERPRETED:
    _fma = _interpreted_chain.fma


@device_function
def _exp_number(x):
    """exp(x) for x <= 0, +0 below LEAST; of NaN any number or NaN."""
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
    return tl.where(x < LEAST, 0.0, result)


@device_function
def exp_nonpositive(x):
    """exp(x) for x <= 0 or NaN, +0 below LEAST."""
    return tl.where(x != x, x, _exp_number(x))


@device_function
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@device_function
def _tree_max(x, TILES: tl.constexpr, LANES: tl.constexpr):
    """[n * TILES, columns] -> [TILES], or a number of one tile. A maximum has no order: slots of different threads meet as integers in one
    reduction."""
    if x.shape[0] > TILES:
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))
        return _tree_max(_max(a, b), TILES, LANES)
    elif x.shape[1] > LANES:
        a, b = tl.split(tl.reshape(x, [TILES, x.shape[1] // 2, 2]))
        return _tree_max(_max(a, b), TILES, LANES)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = _of_tiles(tl.max(tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)), axis=1), TILES)
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@device_function
def _tree_sum(x, TILES: tl.constexpr):
    """[n * TILES, columns] -> [TILES], or a number of one tile, by the halves tree. Every sum here has two terms, so no compiler can choose
    an order."""
    if x.shape[0] > TILES:
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))
        return _tree_sum(a + b, TILES)
    elif x.shape[1] > 1:
        return _tree_sum(tl.sum(tl.reshape(x, [TILES, 2, x.shape[1] // 2]), axis=1), TILES)
    else:
        return _of_tiles(tl.reshape(x, [TILES]), TILES)


@device_function
def _of_tiles(x, TILES: tl.constexpr):
    """[TILES], or the only element as a number."""
    if TILES == 1:
        return tl.max(x, axis=0)
    else:
        return x


@device_function
def _exponentials(x, TILES: tl.constexpr, LANES: tl.constexpr):
    """Exponentials of tiles from their maxima, +0 where masked, and the maxima; any numbers beside a maximum that is none."""
    tile_max = _tree_max(x, TILES, LANES)
    return _exp_number(x - _over(tl.where(tile_max == NEGATIVE_INFINITY, 0.0, tile_max), x.shape[0], TILES)), tile_max


@device_function
def _over(x, SIDE: tl.constexpr, COUNT: tl.constexpr):
    """[COUNT] -> [SIDE, 1], in the low bits; a number remains one."""
    if COUNT == 1:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[None, :], [SIDE // COUNT, COUNT]), [SIDE, 1])


@device_function
def _columns(x, GROUP: tl.constexpr):
    """Members of [GROUP] in order, as numbers; the states of rows as they are."""
    if GROUP == 1:
        return (x,)
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, [2, GROUP // 2]), (1, 0))) if GROUP > 2 else tl.split(x)
        return _columns(a, GROUP // 2) + _columns(b, GROUP // 2)


@device_function
def _merge(row_max, row_sum, tile_max, tile_sum, GROUP: tl.constexpr):
    """Row state after the tiles of one step."""
    maxima = _columns(tile_max, GROUP)
    sums = _columns(tl.where(tile_max < INFINITY, tile_sum, float("nan")), GROUP)
    for g in tl.static_range(GROUP):
        row_max, row_sum = _merged(row_max, row_sum, maxima[g], sums[g], exp_nonpositive(_apart(row_max, maxima[g])))
    return row_max, row_sum


@device_function
def _add(delta, sums, GROUP: tl.constexpr):
    """delta and the sums of the tiles of one step, in order."""
    columns = _columns(sums, GROUP)
    for g in tl.static_range(GROUP):
        delta += columns[g]
    return delta


@device_function
def _factor(tile_max, row_max, row_sum, SIDE: tl.constexpr, TILES: tl.constexpr):
    """What turns the exponentials of tiles into P; +0 for a dead tile or row."""
    dead = tile_max == NEGATIVE_INFINITY
    ratio = tl.where(dead, 0.0, exp_nonpositive(tl.where(dead, 0.0, tile_max - row_max)))
    return _over(tl.div_rn(ratio, tl.where(dead, 1.0, row_sum)), SIDE, TILES)


@device_function
def _slots(SLOTS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """[SLOTS / (LANES * VECTOR) * ROWS * GROUP, LANES * VECTOR]: the first SLOTS slots of each tile of a step."""
    side = tl.arange(0, SLOTS // (LANES * VECTOR) * ROWS * GROUP)[:, None]
    return (side // (ROWS * GROUP) * (LANES * VECTOR) + side % GROUP * TILE) + tl.arange(0, LANES * VECTOR)[None, :]


@device_function
def _steps(length, STEP: tl.constexpr, ROWS: tl.constexpr):
    """Number of steps of the longest row; written so that lengths up to 2^31 - 1 do not overflow."""
    longest = length if ROWS == 1 else tl.max(length, axis=0)
    return longest // STEP + (longest % STEP != 0).to(tl.int32)


@device_function
def _offsets(rows, keys, rows_per_batch, ROWS: tl.constexpr):
    """Row numbers, whether there is such a row, its batch item, its first element and that of its mask; past the end those of row 0."""
    row = tl.program_id(0).to(tl.int64)
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    real = tl.where(valid, row, 0)
    batch = real // rows_per_batch
    return row, valid, batch, real * keys, batch * keys


@device_function
def _of_rows(value, ROWS: tl.constexpr):
    """``value`` [ROWS], or as a number of one row."""
    if ROWS == 1:
        return tl.full([], value, tl.float32)
    else:
        return tl.full([ROWS], value, tl.float32)


@device_function
def _all(condition, ROWS: tl.constexpr):
    if ROWS == 1:
        return condition
    else:
        return tl.min(condition.to(tl.int32), axis=0) > 0


@device_function
def _pointers(array, start, place, ROWS: tl.constexpr):
    return _over(array + start, place.shape[0], ROWS) + place


@device_function
def _present(length, first, slot, ROWS: tl.constexpr):
    return slot < _over(length - first, slot.shape[0], ROWS)


@device_function
def _read(array, start, place, present, fill, ROWS: tl.constexpr):
    return tl.load(_pointers(array, start, place, ROWS), mask=present, other=fill).to(tl.float32)


@device_function
def _step(index, row_start, mask_start, length, step, slot, ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_MASK: tl.constexpr):
    """Where the keys of a step lie, as the first element of an array and the offsets from it, and which of them there are."""
    first = step * (TILE * GROUP)
    present = _present(length, first, slot, ROWS)
    if HAS_MASK:
        return row_start, tl.load(_pointers(index, mask_start + first, slot, ROWS), mask=present, other=0), present
    else:
        return row_start + first, slot, present


@device_function
def _read_part(
    array,
    row_start,
    stored,
    fill,
    PART: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Elements of step PART of a row that fits, in their own format."""
    first = PART * TILE * GROUP
    slot = _slots(TILE if PART < FULL else TAIL, ROWS, GROUP, LANES, VECTOR)
    pointers = _pointers(array, row_start + first, slot, ROWS)
    if PART < FULL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=_present(stored, first, slot, ROWS), other=fill)


@device_function
def _store_part(
    array,
    row_start,
    stored,
    valid,
    value,
    PART: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """Results of step PART."""
    first = PART * TILE * GROUP
    slot = _slots(TILE if PART < FULL else TAIL, ROWS, GROUP, LANES, VECTOR)
    pointers = _pointers(array, row_start + first, slot, ROWS)
    if PART >= FULL:
        _store(pointers, value, _present(stored, first, slot, ROWS), INTEGER_ROUNDING)
    elif ROWS == 1:
        _store(pointers, value, None, INTEGER_ROUNDING)
    else:
        _store(pointers, value, _over(valid, slot.shape[0], ROWS), INTEGER_ROUNDING)


@device_function
def _store_dropped(
    results, keep, row_start, mask_start, stored, slot, ROWS: tl.constexpr, GROUP: tl.constexpr, INTEGER_ROUNDING: tl.constexpr
):
    """+0 at the keys that the mask drops."""
    for step in range(0, _steps(stored, TILE * GROUP, ROWS)):
        first = step * (TILE * GROUP)
        present = _present(stored, first, slot, ROWS)
        kept = tl.load(_pointers(keep, mask_start + first, slot, ROWS), mask=present, other=1)
        zeros = tl.zeros(kept.shape, tl.float32)
        _store(_pointers(results, row_start + first, slot, ROWS), zeros, present & (kept == 0), INTEGER_ROUNDING)


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
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """P and the row state (m, s) of scores [rows, keys]; arguments as in ``_softmax_kernel.softmax_forward``."""
    row, valid, batch, row_start, mask_start = _offsets(rows, keys, rows_per_batch, ROWS)
    KEPT: tl.constexpr = FULL + (TAIL > 0)
    TILES: tl.constexpr = ROWS * GROUP
    stored = tl.where(valid, keys, 0)
    length = stored
    if HAS_MASK:
        length = tl.load(counts + batch, mask=valid, other=0)
    steps = _steps(length, TILE * GROUP, ROWS)
    slot = _slots(TILE, ROWS, GROUP, LANES, VECTOR)
    m = _of_rows(NEGATIVE_INFINITY, ROWS)
    s = _of_rows(0.0, ROWS)
    kept = ()
    maxima = ()
    for part in tl.static_range(KEPT):
        part_x = _read_part(scores, row_start, stored, NEGATIVE_INFINITY, part, FULL, TAIL, ROWS, GROUP, LANES, VECTOR)
        part_e, part_max = _exponentials(part_x.to(tl.float32), TILES, LANES)
        m, s = _merge(m, s, part_max, _tree_sum(part_e, TILES), GROUP)
        kept = kept + (part_e,)
        maxima = maxima + (part_max,)
    if KEPT == 0:
        for step in range(0, steps):
            start, place, present = _step(index, row_start, mask_start, length, step, slot, ROWS, GROUP, HAS_MASK)
            e, tile_max = _exponentials(_read(scores, start, place, present, NEGATIVE_INFINITY, ROWS), TILES, LANES)
            m, s = _merge(m, s, tile_max, _tree_sum(e, TILES), GROUP)
    tl.store(row_max + row, m + 0.0, mask=valid)  # the zero rule: -0 is stored as +0
    tl.store(row_sum + row, s, mask=valid)
    begin = 0
    if KEPT > 0:
        proper = _all(s == s, ROWS)  # P of a masked key is then +0 times a number
        if proper:
            begin = steps
            for part in tl.static_range(KEPT):
                part_p = kept[part] * _factor(maxima[part], m, s, kept[part].shape[0], TILES)
                _store_part(probs, row_start, stored, valid, part_p, part, FULL, TAIL, ROWS, GROUP, LANES, VECTOR, INTEGER_ROUNDING)
    for step in range(begin, steps):
        start, place, present = _step(index, row_start, mask_start, length, step, slot, ROWS, GROUP, HAS_MASK)
        x = _read(scores, start, place, present, NEGATIVE_INFINITY, ROWS)
        e, tile_max = _exponentials(x, TILES, LANES)
        p = tl.where(x == NEGATIVE_INFINITY, 0.0, e * _factor(tile_max, m, s, slot.shape[0], TILES))
        _store(_pointers(probs, start, place, ROWS), p, present, INTEGER_ROUNDING)
    if HAS_MASK:
        _store_dropped(probs, keep, row_start, mask_start, stored, slot, ROWS, GROUP, INTEGER_ROUNDING)


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
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """dscores [rows, keys] from dprobs and the saved row state; P is recomputed.

    delta is summed from +0 over every tile: a dead tile adds +0, and the sign of a zero delta cannot show, since stored zeros are +0.
    """
    row, valid, batch, row_start, mask_start = _offsets(rows, keys, rows_per_batch, ROWS)
    KEPT: tl.constexpr = FULL + (TAIL > 0)
    TILES: tl.constexpr = ROWS * GROUP
    stored = tl.where(valid, keys, 0)
    length = stored
    if HAS_MASK:
        length = tl.load(counts + batch, mask=valid, other=0)
    steps = _steps(length, TILE * GROUP, ROWS)
    slot = _slots(TILE, ROWS, GROUP, LANES, VECTOR)
    m = tl.load(row_max + row, mask=valid, other=NEGATIVE_INFINITY)
    s = tl.load(row_sum + row, mask=valid, other=0.0)
    delta = _of_rows(0.0, ROWS)
    inputs = ()
    upstream = ()
    kept = ()
    for part in tl.static_range(KEPT):
        inputs = inputs + (_read_part(scores, row_start, stored, NEGATIVE_INFINITY, part, FULL, TAIL, ROWS, GROUP, LANES, VECTOR),)
        upstream = upstream + (_read_part(dprobs, row_start, stored, 0.0, part, FULL, TAIL, ROWS, GROUP, LANES, VECTOR),)
    for part in tl.static_range(KEPT):
        part_e, part_max = _exponentials(inputs[part].to(tl.float32), TILES, LANES)
        part_p = part_e * _factor(part_max, m, s, part_e.shape[0], TILES)
        delta = _add(delta, _tree_sum(part_p * upstream[part].to(tl.float32), TILES), GROUP)
        kept = kept + (part_p,)
    begin = 0
    if KEPT > 0:
        # a delta far from overflow: all of dP is finite, also less delta, and gives +0 where a masked key has P = +0
        if _all(tl.abs(delta) < TAME, ROWS):
            begin = steps
            for part in tl.static_range(KEPT):
                part_dx = kept[part] * (upstream[part].to(tl.float32) - _over(delta, kept[part].shape[0], ROWS)) + 0.0
                _store_part(dscores, row_start, stored, valid, part_dx, part, FULL, TAIL, ROWS, GROUP, LANES, VECTOR, INTEGER_ROUNDING)
        delta = _of_rows(0.0, ROWS)
    for step in range(begin, steps):
        start, place, present = _step(index, row_start, mask_start, length, step, slot, ROWS, GROUP, HAS_MASK)
        x = _read(scores, start, place, present, NEGATIVE_INFINITY, ROWS)
        dp = _read(dprobs, start, place, present, 0.0, ROWS)
        e, tile_max = _exponentials(x, TILES, LANES)
        p = e * _factor(tile_max, m, s, slot.shape[0], TILES)
        delta = _add(delta, _tree_sum(tl.where(x == NEGATIVE_INFINITY, 0.0, p * dp), TILES), GROUP)
    for step in range(begin, steps):
        start, place, present = _step(index, row_start, mask_start, length, step, slot, ROWS, GROUP, HAS_MASK)
        x = _read(scores, start, place, present, NEGATIVE_INFINITY, ROWS)
        dp = _read(dprobs, start, place, present, 0.0, ROWS)
        e, tile_max = _exponentials(x, TILES, LANES)
        dx = (e * _factor(tile_max, m, s, slot.shape[0], TILES)) * (dp - _over(delta, slot.shape[0], ROWS))
        dx = tl.where(x == NEGATIVE_INFINITY, 0.0, dx + 0.0)
        _store(_pointers(dscores, start, place, ROWS), dx, present, INTEGER_ROUNDING)
    if HAS_MASK:
        _store_dropped(dscores, keep, row_start, mask_start, stored, slot, ROWS, GROUP, INTEGER_ROUNDING)
