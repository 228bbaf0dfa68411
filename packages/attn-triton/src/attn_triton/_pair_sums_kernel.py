"""Chains over keys or over rows of contract ordered-v1's attention, with weights P or dS from memory (``_pairs_kernel``): out, dq, dk, dv.

A masked pair has the weight -0, whose product is no term as long as the other operand is finite there. Else it leaves a NaN: such a block
is marked in ``spoiled``, and a second launch, with SELECT, sums it again with no term for a masked pair.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._chain_kernel import spoils, weighted_chain, widened
from attn_triton._device_function import device_function
from attn_triton._pairs_kernel import MASKED, TILE
from attn_triton._scores_kernel import key_rows
from attn_triton._softmax_kernel import _store
from attn_triton._visibility_kernel import block_of, keys_at, queries_of_keys, rows_at, sizes_of

__all__ = ["key_sums", "row_sums"]


@device_function
def _step(acc, weights, right, SELECT: tl.constexpr, DOT: tl.constexpr):
    return weighted_chain(acc, weights, weights.to(tl.int32, bitcast=True) == MASKED, right, SELECT, DOT)


@triton.jit(do_not_specialize=["first", "tiles"])
def row_sums(
    arrays,
    sizes,
    plan,
    first,
    ranges,
    weights,
    tiles,
    values,
    values_batch,
    values_head,
    values_row,
    width,
    out,
    out_batch,
    out_head,
    out_row,
    factor,
    spoiled,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COMPACT: tl.constexpr,
    SELECT: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """``factor`` times the chains over keys of a block of rows and COLUMNS columns of ``values``, whose columns lie side by side.

    ``values`` are rows of keys: v or k, or with COMPACT their copy by logical key, +0 where there is none.
    """
    sizes = sizes_of(sizes)
    own = spoiled + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    if SELECT:
        marked = tl.load(own)
        if marked == 0:
            return
    # Under causality the last rows see most keys: they start first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    work = block_of(arrays, sizes, plan, first + program)
    item = work.item
    begin, end = tl.load(ranges + 2 * program), tl.load(ranges + 2 * program + 1)
    line = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    left = weights + (line * (tiles * TILE))[:, None] + tl.arange(0, KEYS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    right = values + (item.batch * values_batch + work.kv_head * values_head + item.first_key * values_row)
    inside = (column < width)[None, :]
    used = item.used
    if COMPACT:
        used = item.keys
    origin = begin // TILE * TILE
    acc = tl.full([BLOCK, COLUMNS], 0, tl.float32)
    for slot in range(begin // KEYS * KEYS, end, KEYS):
        key = slot - item.shift + tl.arange(0, KEYS)
        present = ((key >= 0) & (key < used))[:, None] & inside
        b = tl.load(right + (key.to(tl.int64) * values_row)[:, None] + column[None, :], mask=present, other=0.0)
        acc = _step(acc, tl.load(left + (slot - origin)), widened(b, DOT), SELECT, DOT)
    if not SELECT:
        tl.store(own, spoils(acc))
    rows = rows_at(arrays, sizes, item, work.kv_head, work.block * BLOCK, BLOCK)
    into = item.batch * out_batch + rows.head * out_head + (item.first_query + rows.query) * out_row
    _store((out + into)[:, None] + column[None, :], acc * factor + 0.0, rows.present[:, None] & inside, INTEGER_ROUNDING)


@triton.jit(do_not_specialize=["first", "count", "tiles"])
def key_sums(
    arrays,
    sizes,
    plan,
    key_plan,
    first,
    count,
    ranges,
    weights,
    tiles,
    values,
    values_batch,
    values_head,
    values_row,
    width,
    carry,
    gradient,
    gradient_batch,
    gradient_head,
    gradient_row,
    factor,
    spoiled,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
    SELECT: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """``factor`` times the chains over the rows of a group with KEYS slots and COLUMNS columns of ``values`` (q or dout).

    Columns of ``values`` lie side by side. The rows in work are those of ``count`` programs from ``first`` on; ``plan`` is theirs. A chain
    that goes on from the rows before (not STARTS), or will go on with those after them (not ENDS), waits in ``carry``
    [key programs * KEYS, column programs * COLUMNS].
    """
    sizes = sizes_of(sizes)
    own = spoiled + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    if SELECT:
        marked = tl.load(own)
        if marked == 0:
            return
    work = block_of(arrays, sizes, key_plan, tl.program_id(0))
    item = work.item
    if work.block < 0:
        return
    slot = work.block.to(tl.int32) * KEYS
    keys = keys_at(arrays, sizes, item, slot, KEYS)
    begin, end = queries_of_keys(sizes, item, keys)
    # Program of block j of the item's rows: before + j * step, counted from ``first``.
    if plan is None:
        step = sizes.batch.to(tl.int64) * sizes.kv_heads
        before = item.batch * sizes.kv_heads + work.kv_head - first
    else:
        step = sizes.kv_heads.to(tl.int64)
        before = tl.load(plan + item.batch) * step + work.kv_head - first
    low = tl.maximum((step - 1 - before) // step, 0) * BLOCK
    high = tl.maximum((step - 1 + count - before) // step, 0) * BLOCK
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    slots = tl.arange(0, KEYS)
    place = (tl.program_id(0).to(tl.int64) * KEYS + slots)[:, None] * (tl.num_programs(1) * COLUMNS) + column[None, :]
    if STARTS:
        acc = tl.full([KEYS, COLUMNS], 0, tl.float32)
    else:
        acc = tl.load(carry + place)
    for member in range(0, sizes.group):
        right = values + (item.batch * values_batch + (work.kv_head * sizes.group + member) * values_head + item.first_query * values_row)
        ahead = member * item.queries.to(tl.int64)
        for row in range(tl.maximum(ahead + begin, low), tl.minimum(ahead + end, high), ROWS):
            r = row + tl.arange(0, ROWS)
            present = r < tl.minimum(ahead + end, high)
            block = tl.where(present, r // BLOCK, row // BLOCK) * step + before
            origin = tl.load(ranges + 2 * block) // TILE * TILE
            present = present & (slot >= origin) & (slot < tl.load(ranges + 2 * block + 1))
            line = block * BLOCK + (r & (BLOCK - 1))
            at = (line * (tiles * TILE) + (slot - origin))[:, None] + slots[None, :]
            w = tl.load(weights + at, mask=present[:, None], other=0.0)
            b = tl.load(right + ((r - ahead) * values_row)[:, None] + column[None, :], mask=present[:, None] & inside, other=0.0)
            acc = _step(acc, tl.trans(w), widened(b, DOT), SELECT, DOT)
    marks = spoils(acc)
    if not SELECT:
        tl.store(own, marks)
    if ENDS:
        into = key_rows(item, work.kv_head, keys, gradient_batch, gradient_head, gradient_row)
        _store((gradient + into)[:, None] + column[None, :], acc * factor + 0.0, keys.present[:, None] & inside, INTEGER_ROUNDING)
    elif SELECT:
        tl.store(carry + place, acc)
    else:
        tl.store(carry + place, acc, mask=tl.full(acc.shape, 0, tl.int32) + marks == 0)
