"""Where a program's rows and keys lie: batch item or packed segment, positions, the keys that each row sees.

Slots count from the tile boundary at or before stored key 0: logical key l is in slot ``shift + l``. Rows of one kv head are the queries of
the heads of its group one after the other: row r is query ``r % S`` of head ``r // S`` of the group.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

from typing import Any, NamedTuple

import triton.language as tl

from attn_triton._device_function import device_function
from attn_triton._problem import Sizes

__all__ = [
    "Item",
    "Keys",
    "Rows",
    "Work",
    "again",
    "block_of",
    "find_work",
    "item_of",
    "keys_at",
    "logical_before",
    "planned",
    "queries_of_keys",
    "rows_at",
    "rows_of_head",
    "slot_range",
    "visible",
]

TILE = tl.constexpr(256)


class Item(NamedTuple):
    """One batch item or segment, scalars.

    ``batch``, ``first_query`` and ``first_key`` (the packed rows of its first query and key), ``offset`` (q_start - k_start) are int64;
    ``queries``, ``keys`` (its S and T), ``used`` (T_b), ``count`` (logical keys) and ``shift`` (k_start mod 256) int32.
    """

    batch: Any
    first_query: Any
    first_key: Any
    queries: Any
    keys: Any
    used: Any
    count: Any
    shift: Any
    offset: Any


class Work(NamedTuple):
    """What a program does: an item, one kv head (int64) and the number of a block of its rows or keys (int64, -1: nothing to do)."""

    item: Any
    kv_head: Any
    block: Any


class Rows(NamedTuple):
    """Rows of a block, vectors [M]: ``head`` and ``query`` (int64), ``present``, and the stored keys [lower, upper) in its window, int32.

    A row that is absent, or whose query is dropped, has ``lower = upper = 0``.
    """

    head: Any
    query: Any
    present: Any
    lower: Any
    upper: Any


class Keys(NamedTuple):
    """Keys of consecutive slots, vectors [N]: ``stored`` position (int32, of no meaning where there is none) and ``present``.

    Without a padding mask the positions are consecutive for the compiler too: a selection in their place would hide it, and then Triton
    3.6 has the lanes of a warp read one key's columns, each in a cache line of its own.
    """

    stored: Any
    present: Any


@device_function
def again(number, NVIDIA: tl.constexpr):
    """The same int64, of which an NVIDIA compiler does not know it: what is computed from it is computed anew, not kept in registers."""
    if NVIDIA:
        number = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [number], dtype=tl.int64, is_pure=True, pack=1)
    return number


@device_function
def _decoded(number):
    return (number - 3) >> 1


@device_function
def sizes_of(encoded):
    """``Sizes`` from ``Sizes.encoded``: int32, and int64 sides of the window."""
    return Sizes(
        _decoded(encoded.batch).to(tl.int32),
        _decoded(encoded.kv_heads).to(tl.int32),
        _decoded(encoded.group).to(tl.int32),
        _decoded(encoded.queries).to(tl.int32),
        _decoded(encoded.keys).to(tl.int32),
        _decoded(encoded.left).to(tl.int64),
        _decoded(encoded.right).to(tl.int64),
        encoded.scale,
    )


@device_function
def _clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@device_function
def _segment(offsets, used, item, total):
    """First row and length of a packed segment, both inside the array."""
    begin = _clamp(tl.load(offsets + item), 0, total)
    end = _clamp(tl.load(offsets + item + 1), 0, total)
    length = tl.maximum(end - begin, 0)
    if used is not None:
        length = _clamp(tl.load(used + item), 0, length)
    return begin, length.to(tl.int32)


@device_function
def item_of(arrays, sizes, batch):
    """The item number ``batch`` (int64)."""
    if arrays.cu_seqlens_q is not None:
        first_query, queries = _segment(arrays.cu_seqlens_q, arrays.seqlens_q, batch, sizes.queries)
        first_key, keys = _segment(arrays.cu_seqlens_k, arrays.seqlens_k, batch, sizes.keys)
        used = keys
    else:
        first_query = tl.full([], 0, tl.int64)
        first_key = tl.full([], 0, tl.int64)
        queries = tl.full([], 0, tl.int32) + sizes.queries
        keys = tl.full([], 0, tl.int32) + sizes.keys
        used = keys
        if arrays.kv_lengths is not None:
            used = _clamp(tl.load(arrays.kv_lengths + batch), 0, keys).to(tl.int32)
    start = tl.full([], 0, tl.int64)
    if arrays.k_start is not None:
        start = tl.load(arrays.k_start + batch)
    offset = (used - queries).to(tl.int64)
    if arrays.q_start is not None:
        offset = tl.load(arrays.q_start + batch) - start
    shift = (start & (TILE - 1)).to(tl.int32)
    count = keys
    if arrays.key_index is not None:
        count = tl.load(arrays.key_counts + batch)
    return Item(batch, first_query, first_key, queries, keys, used, count, shift, offset)


@device_function
def planned(plan, batch, number):
    """The packed segment (int64) that block ``number`` lies in: ``plan[segment] <= number < plan[segment + 1]``."""
    low = tl.full([], 0, tl.int64)
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(plan + middle) <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@device_function
def find_work(arrays, sizes, plan, per_item):
    """The work of this program of a one-dimensional grid.

    Dense (``plan`` None): every item has ``per_item`` blocks, and the last ones, which see most keys under causality, start first. Packed:
    ``plan`` [segments + 1] counts the blocks before each segment; the grid may have more programs than blocks.
    """
    program = tl.program_id(0).to(tl.int64)
    outer = program // sizes.kv_heads
    kv_head = program - outer * sizes.kv_heads
    if plan is None:
        which = outer // sizes.batch
        batch = outer - which * sizes.batch
        block = per_item - 1 - which
    else:
        batch = planned(plan, sizes.batch, outer)
        through = tl.load(plan + batch + 1)
        block = tl.where(outer < through, through - 1 - outer, -1)
    return Work(item_of(arrays, sizes, batch), kv_head, block)


@device_function
def block_of(arrays, sizes, plan, program):
    """The work of program number ``program`` of a one-dimensional grid; blocks of an item ascend.

    Dense (``plan`` None): the same block of every item and kv head, then the next one. Packed: ``plan`` [segments + 1] counts the blocks
    before each segment; the grid may have more programs than blocks.
    """
    program = program.to(tl.int64)
    outer = program // sizes.kv_heads
    kv_head = program - outer * sizes.kv_heads
    if plan is None:
        block = outer // sizes.batch
        batch = outer - block * sizes.batch
    else:
        low = tl.full([], 0, tl.int64)
        high = low + sizes.batch
        while high - low > 1:  # plan[low] <= outer < plan[high]
            middle = (low + high) // 2
            before = tl.load(plan + middle) <= outer
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        batch = low
        block = tl.where(outer < tl.load(plan + low + 1), outer - tl.load(plan + low), -1)
    return Work(item_of(arrays, sizes, batch), kv_head, block)


@device_function
def _rows_of(arrays, sizes, item, head, query, present):
    """Rows of the queries [M] of ``head``, a vector or one head."""
    diagonal = query + item.offset
    used = item.used.to(tl.int64)
    lower = _clamp(diagonal - sizes.left, 0, used)
    upper = _clamp(diagonal + sizes.right + 1, 0, used)
    sees = present & (lower < upper)
    if arrays.query_mask is not None:
        sees = sees & (tl.load(arrays.query_mask + item.batch * sizes.queries + query, mask=present, other=0) != 0)
    return Rows(head, query, present, tl.where(sees, lower, 0).to(tl.int32), tl.where(sees, upper, 0).to(tl.int32))


@device_function
def rows_at(arrays, sizes, item, kv_head, first, M: tl.constexpr):
    """Rows [first, first + M) of a kv head, all queries of its heads; ``first`` is int64. Rows outside those of the item are absent."""
    row = first + tl.arange(0, M)
    present = (row >= 0) & (row < item.queries.to(tl.int64) * sizes.group)
    row = tl.where(present, row, 0)
    count = tl.maximum(item.queries, 1).to(tl.int64)
    in_group = row // count
    return _rows_of(arrays, sizes, item, kv_head * sizes.group + in_group, row - in_group * count, present)


@device_function
def rows_of_head(arrays, sizes, item, head, first, last, M: tl.constexpr):
    """Queries [first, min(first + M, last)) of one head, int64: no division, so that it may stand in an inner loop."""
    query = first + tl.arange(0, M)
    present = query < last
    return _rows_of(arrays, sizes, item, head, tl.where(present, query, 0), present)


@device_function
def logical_before(arrays, sizes, item, stored):
    """Number of logical keys of the item that are stored before the position ``stored``, a scalar."""
    found = stored
    if arrays.key_index is not None:
        index = arrays.key_index + item.batch * sizes.keys
        low = tl.full([], 0, tl.int32)
        high = low + item.count
        while low < high:
            middle = low + (high - low) // 2
            before = tl.load(index + middle) < stored
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        found = low
    return found


@device_function
def slot_range(arrays, sizes, item, rows):
    """Slots [begin, end) outside which no row of the block sees a key; (0, 0) when none sees any."""
    sees = rows.lower < rows.upper
    lower = tl.min(tl.where(sees, rows.lower, 0x7FFFFFFF), axis=0)
    upper = tl.max(rows.upper, axis=0)
    begin = logical_before(arrays, sizes, item, tl.minimum(lower, upper))
    end = logical_before(arrays, sizes, item, upper)
    some = begin < end
    return tl.where(some, item.shift + begin, 0), tl.where(some, item.shift + end, 0)


@device_function
def keys_at(arrays, sizes, item, first, N: tl.constexpr):
    """Keys of the slots [first, first + N)."""
    logical = first + tl.arange(0, N) - item.shift
    present = (logical >= 0) & (logical < item.count)
    stored = logical
    if arrays.key_index is not None:
        stored = tl.load(arrays.key_index + item.batch * sizes.keys + tl.where(present, logical, 0), mask=present, other=0)
    return Keys(stored, present)


@device_function
def visible(rows, keys, ROWS_FIRST: tl.constexpr):
    """Which rows see which keys: [M, N], or [N, M] when not ROWS_FIRST."""
    if ROWS_FIRST:
        inside = (keys.stored[None, :] >= rows.lower[:, None]) & (keys.stored[None, :] < rows.upper[:, None])
        seen = inside & keys.present[None, :]
    else:
        inside = (keys.stored[:, None] >= rows.lower[None, :]) & (keys.stored[:, None] < rows.upper[None, :])
        seen = inside & keys.present[:, None]
    return seen


@device_function
def queries_of_keys(sizes, item, keys):
    """Queries [begin, end) of each head that may see one of the keys; int64, begin <= end."""
    used = keys.present & (keys.stored < item.used)
    low = tl.min(tl.where(used, keys.stored, 0x7FFFFFFF), axis=0)
    high = tl.max(tl.where(used, keys.stored, -1), axis=0)
    queries = item.queries.to(tl.int64)
    begin = tl.minimum(tl.maximum(low - item.offset - sizes.right, 0), queries)
    end = tl.minimum(high - item.offset + sizes.left + 1, queries)
    return begin, tl.where(high >= 0, tl.maximum(begin, end), begin)
