"""Attention forward of contract sm90-v1 on Hopper's tensor cores: one kernel for all keys of a row, or for one segment and a merge.

A program owns ROWS rows of one kv head's group and goes over the key tiles that any of them sees, segment by segment. Slots count from
the segment boundary at or before stored key 0. Nothing of the size of the scores is stored.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._device_function import device_function
from attn_triton._scores_kernel import row_values
from attn_triton._sm90_arithmetic_kernel import class_sums, empty_state, ex2, finish, merge, row_sum, zero_if_dead
from attn_triton._visibility_kernel import Rows, again, item_of, planned, rows_at, sizes_of

__all__ = [
    "SEGMENT_KEYS",
    "attention_forward",
    "attention_merge",
    "attention_segments",
    "find_block",
    "key_block",
    "key_phase",
    "key_tiles",
    "part_of",
    "query_block",
    "sinks_of",
]

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
SEGMENT_KEYS = 1024
SEGMENT = tl.constexpr(SEGMENT_KEYS)
FAR = tl.constexpr(0x7FFFFFFF)


@device_function
def find_block(arrays, sizes, plan, per_item, program, LAST_FIRST: tl.constexpr):
    """What program number ``program`` does: item, kv head and block of rows or keys (int64; -1: nothing).

    Blocks of one head lie side by side in the grid, so that its other side is read from the cache. Under causality the last rows and the
    first keys have most work, and start first. Packed: ``plan`` [segments + 1] counts the blocks before each segment.
    """
    program = program.to(tl.int64)
    if plan is None:
        outer = program // per_item
        block = program - outer * per_item
        if LAST_FIRST:
            block = per_item - 1 - block
        batch = outer // sizes.kv_heads
        kv_head = outer - batch * sizes.kv_heads
    else:
        blocks = tl.load(plan + sizes.batch)
        most = tl.maximum(blocks, 1)
        kv_head = program // most
        outer = program - kv_head * most
        batch = planned(plan, sizes.batch, outer)
        through = tl.load(plan + batch + 1)
        block = outer - tl.load(plan + batch)
        if LAST_FIRST:
            block = through - 1 - outer
        block = tl.where((kv_head < sizes.kv_heads) & (outer < through), block, -1)
        kv_head = tl.minimum(kv_head.to(tl.int32), sizes.kv_heads - 1).to(tl.int64)
    return item_of(arrays, sizes, batch), kv_head, block


@device_function
def key_phase(arrays, item):
    """Slot of stored key 0, int32."""
    phase = tl.full([], 0, tl.int32)
    if arrays.k_start is not None:
        phase = (tl.load(arrays.k_start + item.batch) & (SEGMENT - 1)).to(tl.int32)
    return phase


@device_function
def part_of(rows, gap, item, part):
    """Rows as they see the keys before the gap (part 0) or after it (part 1). ``gap`` [B, 2]: the masked keys."""
    edge = tl.load(gap + item.batch * 2 + part).to(tl.int32)
    lower = tl.where(part == 0, rows.lower, tl.maximum(rows.lower, edge))
    upper = tl.where(part == 0, tl.minimum(rows.upper, edge), rows.upper)
    sees = lower < upper
    return Rows(rows.head, rows.query, rows.present, tl.where(sees, lower, 0), tl.where(sees, upper, 0))


@device_function
def segments_of(item):
    """Segments of a packed item's keys, at least one."""
    return tl.maximum((item.keys + (SEGMENT - 1)) // SEGMENT, 1)


@device_function
def key_tiles(rows, phase, N: tl.constexpr):
    """Tiles [begin, end) that some row sees, and [full_begin, full_end) of them that every present row sees as a whole."""
    sees = rows.lower < rows.upper
    first = tl.min(tl.where(sees, rows.lower, FAR), axis=0)
    last = tl.max(rows.upper, axis=0)
    some = first < last
    begin = tl.where(some, (phase + tl.minimum(first, last)) // N, 0)
    end = tl.where(some, (phase + last + N - 1) // N, 0)
    inner = tl.max(tl.where(rows.present, rows.lower, 0), axis=0)
    outer = tl.min(tl.where(rows.present, rows.upper, last), axis=0)
    full_begin = tl.minimum(tl.maximum((phase + inner + N - 1) // N, begin), end)
    full_end = tl.minimum(tl.maximum((phase + outer) // N, full_begin), end)
    return begin, full_begin, full_end, end


@device_function
def key_block(tiles, item, kv_head, first, N: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr):
    """Stored keys [first, first + N) of an item, [N, D], from a descriptor; keys outside the array are +0.

    GARBAGE: rows at or past the end of the item's keys may hold anything, and become +0.
    """
    if PACKED:
        block = tiles.load([0, kv_head.to(tl.int32), item.first_key.to(tl.int32) + first, 0])
    else:
        block = tiles.load([item.batch.to(tl.int32), kv_head.to(tl.int32), first, 0])
    block = tl.reshape(block, (N, D))
    if GARBAGE:
        block = tl.where(((first + tl.arange(0, N)) < item.used)[:, None], block, 0.0)
    return block


@device_function
def query_block(arrays, item, rows, D: tl.constexpr):
    """q [M, D]; absent rows are +0."""
    at = item.batch * arrays.q_batch + rows.head * arrays.q_head + (item.first_query + rows.query) * arrays.q_row
    return tl.load((arrays.q + at)[:, None] + tl.arange(0, D)[None, :] * arrays.q_column, mask=rows.present[:, None], other=0.0)


@device_function
def _tile(
    q, k_tiles, v_tiles, item, kv_head, rows, phase, tile, n, classes, o, c, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """A segment's state after one more tile."""
    first = tile * N - phase
    s = tl.dot(q, key_block(k_tiles, item, kv_head, first, N, D, PACKED, False).T)
    if MASKED:
        stored = first + tl.arange(0, N)
        seen = stored[None, :] < rows.upper[:, None]
        if WINDOWED:
            seen = seen & (stored[None, :] >= rows.lower[:, None])
        s = tl.where(seen, s, NEGATIVE_INFINITY)
    top = tl.maximum(n, tl.max(s, axis=1) * c)
    reference = zero_if_dead(top)
    alpha = ex2(n - reference)
    p = ex2(tl.fma(s, c, -reference[:, None]))
    classes = tl.fma(classes, alpha[:, None], class_sums(p, M, N))
    v = key_block(v_tiles, item, kv_head, first, N, D, PACKED, GARBAGE)
    o = tl.dot(p.to(v.dtype), v, o * alpha[:, None])
    return top, classes, o


@device_function
def _tiles(
    q, k_tiles, v_tiles, item, kv_head, rows, phase, begin, end, n, classes, o, merged_n, merged_sum, merged_o, c,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PACKED: tl.constexpr, GARBAGE: tl.constexpr, MERGES: tl.constexpr
):  # fmt: skip
    """The states of the segment in work and of those before it, after the tiles [begin, end)."""
    TILES: tl.constexpr = SEGMENT // N
    for tile in tl.range(begin, end, num_stages=STAGES):
        n, classes, o = _tile(
            q, k_tiles, v_tiles, item, kv_head, rows, phase, tile, n, classes, o, c, M, N, D, MASKED, WINDOWED, PACKED, GARBAGE
        )
        if MERGES and tile % TILES == TILES - 1:
            merged_n, merged_sum, merged_o = merge(merged_n, merged_sum, merged_o, n, row_sum(classes, M), o)
            n, classes, o = empty_state(M, D)
    return n, classes, o, merged_n, merged_sum, merged_o


@device_function
def _keys(
    q, k_tiles, v_tiles, item, kv_head, rows, phase, low, merged_n, merged_sum, merged_o, c, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr, MERGES: tl.constexpr
):  # fmt: skip
    """MERGES: the merged state of all keys that the rows see, after that of others before them. Else that of the segment from tile ``low``
    on. Tiles that some row sees only a part of are masked; they lie before and after the others."""
    TILES: tl.constexpr = SEGMENT // N
    begin, full_begin, full_end, end = key_tiles(rows, phase, N)
    if not MERGES:
        high = low + TILES
        begin, full_begin = tl.minimum(tl.maximum(begin, low), high), tl.minimum(tl.maximum(full_begin, low), high)
        full_end, end = tl.minimum(tl.maximum(full_end, low), high), tl.minimum(tl.maximum(end, low), high)
    n, classes, o = empty_state(M, D)
    if WINDOWED:
        n, classes, o, merged_n, merged_sum, merged_o = _tiles(
            q, k_tiles, v_tiles, item, kv_head, rows, phase, begin, full_begin, n, classes, o, merged_n, merged_sum, merged_o, c,
            M, N, D, STAGES, True, True, PACKED, GARBAGE, MERGES
        )  # fmt: skip
    n, classes, o, merged_n, merged_sum, merged_o = _tiles(
        q, k_tiles, v_tiles, item, kv_head, rows, phase, full_begin, full_end, n, classes, o, merged_n, merged_sum, merged_o, c,
        M, N, D, STAGES, False, False, PACKED, False, MERGES
    )  # fmt: skip
    n, classes, o, merged_n, merged_sum, merged_o = _tiles(
        q, k_tiles, v_tiles, item, kv_head, rows, phase, full_end, end, n, classes, o, merged_n, merged_sum, merged_o, c,
        M, N, D, STAGES, True, WINDOWED, PACKED, GARBAGE, MERGES
    )  # fmt: skip
    if not MERGES:
        merged_n, merged_sum, merged_o = n, row_sum(classes, M), o
    elif end % TILES != 0:
        merged_n, merged_sum, merged_o = merge(merged_n, merged_sum, merged_o, n, row_sum(classes, M), o)
    return merged_n, merged_sum, merged_o


@device_function
def sinks_of(arrays, rows):
    """The sink of each row [M], None without sinks."""
    sink = None
    if arrays.sinks is not None:
        sink = tl.load(arrays.sinks + rows.head, mask=rows.present, other=NEGATIVE_INFINITY)
    return sink


@device_function
def _store_rows(out, out_batch, out_head, out_row, lse, arrays, sizes, item, rows, values, logs, D: tl.constexpr):
    into = item.batch * out_batch + rows.head * out_head + (item.first_query + rows.query) * out_row
    tl.store((out + into)[:, None] + tl.arange(0, D)[None, :], values.to(out.dtype.element_ty), mask=rows.present[:, None])
    tl.store(lse + row_values(arrays, sizes, item, rows), logs, mask=rows.present)


@triton.jit(do_not_specialize=["per_item"])
def attention_forward(
    arrays,
    sizes,
    plan,
    per_item,
    k_tiles,
    v_tiles,
    gap,
    c,
    out,
    out_batch,
    out_head,
    out_row,
    lse,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    PACKED: tl.constexpr,
    GARBAGE: tl.constexpr,
):
    """out and LSE of a block of rows.

    ``k_tiles`` and ``v_tiles`` describe [batch or 1, K, T or total, D] in blocks of one tile of N keys. ``gap``: [B, 2] or None, keys from
    the first to before the second number are masked; that one begins a segment. WINDOWED: rows may begin to see keys in the middle of a
    tile; GARBAGE: tiles may hold rows at or past the end of the item's keys.
    """
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    phase = key_phase(arrays, item)
    q = query_block(arrays, item, rows, D)
    n, _, o = empty_state(ROWS, D)
    total = tl.zeros((ROWS,), tl.float32)
    if gap is None:
        n, total, o = _keys(
            q, k_tiles, v_tiles, item, kv_head, rows, phase, 0, n, total, o, c, ROWS, N, D, STAGES, WINDOWED, PACKED, GARBAGE, True
        )
    else:
        for part in range(0, 2):
            seen = part_of(rows, gap, item, part)
            n, total, o = _keys(
                q, k_tiles, v_tiles, item, kv_head, seen, phase, 0, n, total, o, c, ROWS, N, D, STAGES, WINDOWED, PACKED, GARBAGE, True
            )
    rows = rows_at(arrays, sizes, item, kv_head, again(block, True) * ROWS, ROWS)
    values, logs = finish(n, total, o, sinks_of(arrays, rows))
    _store_rows(out, out_batch, out_head, out_row, lse, arrays, sizes, item, rows, values, logs, D)


@device_function
def _rows_of_segment(sizes, PACKED: tl.constexpr):
    """How many row values the states of one segment have."""
    rows = sizes.kv_heads.to(tl.int64) * sizes.group * sizes.queries
    return rows if PACKED else rows * sizes.batch


@device_function
def _store_segment(
    arrays, sizes, item, kv_head, block, segment, k_tiles, v_tiles, c, parts_n, parts_sum, parts_o, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """The state of one block of rows in one segment, to its place."""
    rows = rows_at(arrays, sizes, item, kv_head, block * M, M)
    phase = key_phase(arrays, item)
    q = query_block(arrays, item, rows, D)
    n, _, o = empty_state(M, D)
    total = tl.zeros((M,), tl.float32)
    n, total, o = _keys(
        q, k_tiles, v_tiles, item, kv_head, rows, phase, segment * (SEGMENT // N), n, total, o, c, M, N, D, STAGES, WINDOWED, PACKED,
        GARBAGE, False
    )  # fmt: skip
    rows = rows_at(arrays, sizes, item, kv_head, again(block, True) * M, M)
    at = segment * _rows_of_segment(sizes, PACKED) + row_values(arrays, sizes, item, rows)
    tl.store(parts_n + at, n, mask=rows.present)
    tl.store(parts_sum + at, total, mask=rows.present)
    tl.store((parts_o + at * D)[:, None] + tl.arange(0, D)[None, :], o, mask=rows.present[:, None])


@triton.jit(do_not_specialize=["per_item", "segments"])
def attention_segments(
    arrays,
    sizes,
    plan,
    per_item,
    segments,
    k_tiles,
    v_tiles,
    c,
    parts_n,
    parts_sum,
    parts_o,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    PACKED: tl.constexpr,
    GARBAGE: tl.constexpr,
):
    """The states of blocks of rows in one segment each: n and l [segments, rows], O [segments, rows, D], rows as in LSE.

    Segment 0 is the one of stored key 0. The segments of a block of rows lie side by side. Packed: ``plan`` counts blocks times segments,
    and programs take more than one when there are more than programs.
    """
    sizes = sizes_of(sizes)
    if PACKED:
        every = tl.load(plan + sizes.batch) * sizes.kv_heads
        for number in range(tl.program_id(0).to(tl.int64), every, tl.num_programs(0)):
            item, kv_head, place = find_block(arrays, sizes, plan, per_item, number, True)
            own = segments_of(item)
            block = place // own
            _store_segment(
                arrays, sizes, item, kv_head, block, (place - block * own).to(tl.int32), k_tiles, v_tiles, c, parts_n, parts_sum, parts_o,
                ROWS, N, D, STAGES, WINDOWED, True, GARBAGE
            )  # fmt: skip
    else:
        program = tl.program_id(0)
        item, kv_head, block = find_block(arrays, sizes, None, per_item, program // segments, True)
        _store_segment(
            arrays, sizes, item, kv_head, block, program % segments, k_tiles, v_tiles, c, parts_n, parts_sum, parts_o,
            ROWS, N, D, STAGES, WINDOWED, False, GARBAGE
        )  # fmt: skip


@triton.jit(do_not_specialize=["per_item", "segments"])
def attention_merge(
    arrays,
    sizes,
    plan,
    per_item,
    segments,
    parts_n,
    parts_sum,
    parts_o,
    out,
    out_batch,
    out_head,
    out_row,
    lse,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """out and LSE of a block of rows from the states of its segments, ascending."""
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    phase = key_phase(arrays, item)
    begin, _, _, end = key_tiles(rows, phase, N)
    TILES: tl.constexpr = SEGMENT // N
    every = _rows_of_segment(sizes, PACKED)
    at = row_values(arrays, sizes, item, rows)
    n, _, o = empty_state(ROWS, D)
    total = tl.zeros((ROWS,), tl.float32)
    for segment in tl.range(begin // TILES, (end + TILES - 1) // TILES, num_stages=STAGES):
        part = segment * every + at
        n_s = tl.load(parts_n + part, mask=rows.present, other=NEGATIVE_INFINITY)
        total_s = tl.load(parts_sum + part, mask=rows.present, other=0.0)
        o_s = tl.load((parts_o + part * D)[:, None] + tl.arange(0, D)[None, :], mask=rows.present[:, None], other=0.0)
        n, total, o = merge(n, total, o, n_s, total_s, o_s)
    values, logs = finish(n, total, o, sinks_of(arrays, rows))
    _store_rows(out, out_batch, out_head, out_row, lse, arrays, sizes, item, rows, values, logs, D)
