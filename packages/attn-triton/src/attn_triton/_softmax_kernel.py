"""Softmax rows of contract ordered-v1 (docs/contracts/ordered-v1.md, sections 1 and 2), forward and backward.

A program owns ROWS rows and walks their 256-slot tiles from left to right. A tile is held as [8, ROWS, 32], slot = 32 * i + j, so that
the upper levels of the halves tree meet inside a thread and the lower ones inside a warp. Every multiplication and addition is rounded:
compile with ``enable_fp_fusion=False``. Offsets are 64-bit per row and per tile, 32-bit inside a tile.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._device_function import device_function

__all__ = ["INTERPRETED", "softmax_backward", "softmax_forward"]

TILE = tl.constexpr(256)
HIGH = tl.constexpr(8)
LOW = tl.constexpr(32)
LEVELS = tl.constexpr(3)

LOG2E = tl.constexpr(float.fromhex("0x1.715476p+0"))
LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e4p-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.7f7d1cp-20"))
TWO_TO_MINUS_64 = tl.constexpr(2.0**-64)
ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@device_function
def exp_nonpositive(x):
    """exp(x) for x <= 0 or NaN. Every n is scaled as (p * 2^(n+64)) * 2^-64: the first product is exact, so that one rounding remains."""
    y = x * LOG2E + 0.5
    biased = y + ROUND_TO_INTEGER
    nearest = biased - ROUND_TO_INTEGER
    above = nearest > y
    n = nearest - tl.where(above, 1.0, 0.0)
    exponent = biased.to(tl.int32, bitcast=True) - above.to(tl.int32)  # n in the low bits; the others leave in the shift
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = r * (1 / 5040) + (1 / 720)
    p = p * r + (1 / 120)
    p = p * r + (1 / 24)
    p = p * r + (1 / 6)
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale = ((exponent + (64 + 127)) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -104.0, 0.0, (p * scale) * TWO_TO_MINUS_64)


@device_function
def max_nan(a, b):
    """Maximum that propagates NaN."""
    return tl.where((a > b) | (a != a), a, b)


@device_function
def _ordered_key(x):
    """Bits that order as integers like x as numbers, NaN above +inf. Its own inverse on the bits, NaN apart."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@device_function
def _tree_max(x, LEVELS: tl.constexpr):
    """[2^LEVELS, ROWS, 32] -> [ROWS]. A maximum has no order: slots of different threads meet as integers in one reduction."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0)))
        x = max_nan(a, b)
    key = tl.max(_ordered_key(tl.reshape(x, [x.shape[1], x.shape[2]])), axis=1)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@device_function
def _tree_sum(x, LEVELS: tl.constexpr):
    """[2^LEVELS, ROWS, 32] -> [ROWS] by the halves tree. Every sum here has two terms, so no compiler can choose an order."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0)))
        x = a + b
    x = tl.reshape(x, [x.shape[1], x.shape[2]])
    for _ in tl.static_range(5):
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@device_function
def _apart(row_max, tile_max):
    """The smaller of two maxima less the larger one, NaN if either is."""
    return tl.where(tile_max > row_max, row_max, tile_max) - max_nan(row_max, tile_max)


@device_function
def _merged(row_max, row_sum, tile_max, tile_sum, ratio):
    """Row state after one more tile; ``ratio``, the exp of ``_apart``, does for both: that of the new maximum is multiplied by 1."""
    newer = tile_max > row_max
    merged = tl.where(newer, row_sum * ratio, row_sum) + tl.where(newer, tile_sum, tile_sum * ratio)
    first = row_max == NEGATIVE_INFINITY
    dead = tile_max == NEGATIVE_INFINITY
    state_max = tl.where(dead, row_max, tl.where(first, tile_max, max_nan(row_max, tile_max)))
    state_sum = tl.where(dead, row_sum, tl.where(first, tile_sum, merged))
    return state_max, state_sum


@device_function
def _merge(row_max, row_sum, tile_max, tile_sum):
    """Row state after one more tile."""
    return _merged(row_max, row_sum, tile_max, tile_sum, exp_nonpositive(_apart(row_max, tile_max)))


@device_function
def _probability(x, masked, row_max, row_sum):
    """P of scores x [8, ROWS, 32], +0 where masked; a dead row divides by 1."""
    dead = row_max == NEGATIVE_INFINITY
    offset = tl.where(dead, 0.0, row_max)[None, :, None]
    divisor = tl.where(dead, 1.0, row_sum)[None, :, None]
    return tl.where(masked, 0.0, tl.div_rn(exp_nonpositive(x - offset), tl.broadcast_to(divisor, x.shape)))


@device_function
def _slots(HIGH: tl.constexpr):
    high = tl.arange(0, HIGH)[:, None, None]
    return high * LOW + tl.arange(0, LOW)[None, None, :]


@device_function
def _tiles(length, TILE: tl.constexpr):
    """Number of tiles of the longest row; written so that lengths up to 2^31 - 1 do not overflow."""
    longest = tl.max(length, axis=0)
    return longest // TILE + (longest % TILE != 0).to(tl.int32)


@device_function
def _offsets(rows, keys, rows_per_batch, ROWS: tl.constexpr):
    """Row numbers, the number of keys of each row (0 past the end), first element of each row, first element of its mask; all [ROWS]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    batch = tl.where(valid, row // rows_per_batch, 0)
    stored = tl.where(valid, keys, 0)
    return row, batch, stored, row * keys, batch * keys


@device_function
def _load(pointer, offset, present):
    return tl.load(pointer + offset, mask=present, other=0.0).to(tl.float32)


@device_function
def _logical_scores(scores, index, row_start, mask_start, length, first, slot, HAS_MASK: tl.constexpr):
    """Scores of one logical tile (-inf where there is none) and the offsets they lie at, relative to the row."""
    present = slot < (length - first)[None, :, None]
    if HAS_MASK:
        place = tl.load((index + (mask_start + first))[None, :, None] + slot, mask=present, other=0)
        x = tl.load((scores + row_start)[None, :, None] + place, mask=present, other=NEGATIVE_INFINITY).to(tl.float32)
    else:
        place = slot
        x = tl.load((scores + (row_start + first))[None, :, None] + slot, mask=present, other=NEGATIVE_INFINITY).to(tl.float32)
    return x, place, present


@device_function
def _stored_scores(scores, keep, row_start, mask_start, stored, first, slot, HAS_MASK: tl.constexpr):
    """Scores of 256 stored positions, -inf where the key is dropped or there is none."""
    present = slot < (stored - first)[None, :, None]
    x = tl.load((scores + (row_start + first))[None, :, None] + slot, mask=present, other=NEGATIVE_INFINITY).to(tl.float32)
    if HAS_MASK:
        kept = tl.load((keep + (mask_start + first))[None, :, None] + slot, mask=present, other=0)
        x = tl.where(kept != 0, x, NEGATIVE_INFINITY)
    return x, present


@device_function
def _store(pointer, value, present, INTEGER_ROUNDING: tl.constexpr):
    """One conversion to nearest even. INTEGER_ROUNDING replaces the conversion to bfloat16 where it truncates (Triton's interpreter)."""
    if INTEGER_ROUNDING and pointer.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        converted = tl.where(value != value, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        converted = value.to(pointer.dtype.element_ty)
    tl.store(pointer, converted, mask=present)


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
    """P and the row state (m, s) of scores [rows, keys].

    With HAS_MASK: keep [batch, keys], nonzero keeps; index [batch, keys], the stored position of each logical key; counts [batch].
    A dead row has m = -inf and s = 0.
    """
    row, batch, stored, row_start, mask_start = _offsets(rows, keys, rows_per_batch, ROWS)
    slot = _slots(HIGH)
    length = stored
    if HAS_MASK:
        length = tl.load(counts + batch, mask=row < rows, other=0)
    m = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    for tile in range(0, _tiles(length, TILE)):
        x, _, _ = _logical_scores(scores, index, row_start, mask_start, length, tile * TILE, slot, HAS_MASK)
        tile_max = _tree_max(x, LEVELS)
        offset = tl.where(tile_max == NEGATIVE_INFINITY, 0.0, tile_max)[None, :, None]
        m, s = _merge(m, s, tile_max, _tree_sum(exp_nonpositive(x - offset), LEVELS))
    tl.store(row_max + row, m + 0.0, mask=row < rows)  # the zero rule: -0 is stored as +0
    tl.store(row_sum + row, s, mask=row < rows)
    for tile in range(0, _tiles(stored, TILE)):
        first = tile * TILE
        x, present = _stored_scores(scores, keep, row_start, mask_start, stored, first, slot, HAS_MASK)
        p = _probability(x, x == NEGATIVE_INFINITY, m, s)
        _store((probs + (row_start + first))[None, :, None] + slot, p, present, INTEGER_ROUNDING)


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
    length = stored
    if HAS_MASK:
        length = tl.load(counts + batch, mask=row < rows, other=0)
    m = tl.load(row_max + row, mask=row < rows, other=NEGATIVE_INFINITY)
    s = tl.load(row_sum + row, mask=row < rows, other=0.0)
    delta = tl.zeros([ROWS], tl.float32)
    for tile in range(0, _tiles(length, TILE)):
        first = tile * TILE
        x, place, present = _logical_scores(scores, index, row_start, mask_start, length, first, slot, HAS_MASK)
        if HAS_MASK:
            dp = _load((dprobs + row_start)[None, :, None], place, present)
        else:
            dp = _load((dprobs + (row_start + first))[None, :, None], place, present)
        masked = x == NEGATIVE_INFINITY
        delta += _tree_sum(tl.where(masked, 0.0, _probability(x, masked, m, s) * dp), LEVELS)
    for tile in range(0, _tiles(stored, TILE)):
        first = tile * TILE
        x, present = _stored_scores(scores, keep, row_start, mask_start, stored, first, slot, HAS_MASK)
        dp = _load((dprobs + (row_start + first))[None, :, None], slot, present)
        masked = x == NEGATIVE_INFINITY
        dx = _probability(x, masked, m, s) * (dp - delta[None, :, None])
        _store((dscores + (row_start + first))[None, :, None] + slot, tl.where(masked, 0.0, dx + 0.0), present, INTEGER_ROUNDING)


INTERPRETED = not isinstance(softmax_forward, triton.JITFunction)
"""Whether TRITON_INTERPRET=1 was set when this module was imported: the kernels then run on the CPU, with numpy."""
