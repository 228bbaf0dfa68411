"""Attention backward of contract sm90-v1 on Hopper's tensor cores: delta of every row, dq, and dk with dv, from recomputed P and dS.

A program owns rows, or keys with all query heads of their group, and goes over the other side in ascending order, so that no sum crosses
programs. Nothing of the size of the scores is stored.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._device_function import device_function
from attn_triton._scores_kernel import row_values
from attn_triton._sm90_arithmetic_kernel import LOG2E, add_rn, ex2, tree_sum
from attn_triton._sm90_forward_kernel import find_block, key_block, key_phase, key_tiles, part_of, query_block
from attn_triton._visibility_kernel import again, item_of, rows_at, sizes_of

__all__ = [
    "ROW_PAD",
    "SINK_ROWS",
    "attention_delta",
    "attention_key_gradients",
    "attention_query_gradients",
    "attention_sink_items",
    "attention_sinks",
    "exponent_origin",
    "first_seeing",
    "line_of",
    "own_keys",
    "queries_of_head",
    "row_block",
    "store_block",
    "store_keys",
]

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
SINK_ROWS = 128
TILE = tl.constexpr(SINK_ROWS)
ROW_PAD = 128
"""Row values of a packed segment or batch item begin at a multiple of that."""
PAD = tl.constexpr(ROW_PAD)
FAR = tl.constexpr(1 << 30)


@device_function
def line_of(sizes, item, head, PACKED: tl.constexpr):
    """Where the row values of the item's queries of ``head`` begin in the workspace: at a multiple of PAD.

    The workspace holds the values of no query (+inf and 0) after those of an item, so that blocks of queries are read without a mask.
    """
    heads = sizes.kv_heads.to(tl.int64) * sizes.group
    if PACKED:
        units = (sizes.queries + PAD - 1) // PAD + sizes.batch + 1
        unit = head * units + (item.first_query // PAD + item.batch)
    else:
        unit = (item.batch * heads + head) * ((sizes.queries + PAD - 1) // PAD)
    return unit * PAD


@device_function
def exponent_origin(lse, at, present):
    """``RN(LSE * log2 e)`` [M], what the exponents of a row are taken from; +inf for a dead row."""
    origin = tl.load(lse + at, mask=present, other=0.0) * LOG2E
    return tl.where(origin == NEGATIVE_INFINITY, INFINITY, origin)


@device_function
def row_block(tensor, batch_stride, head_stride, row_stride, item, rows, D: tl.constexpr):
    """[M, D] of a tensor like q with unit stride; absent rows are +0."""
    at = item.batch * batch_stride + rows.head * head_stride + (item.first_query + rows.query) * row_stride
    return tl.load((tensor + at)[:, None] + tl.arange(0, D)[None, :], mask=rows.present[:, None], other=0.0)


@device_function
def store_block(tensor, batch_stride, head_stride, row_stride, item, rows, values, D: tl.constexpr):
    """``values`` [M, D] to a tensor like q with unit stride."""
    at = item.batch * batch_stride + rows.head * head_stride + (item.first_query + rows.query) * row_stride
    tl.store((tensor + at)[:, None] + tl.arange(0, D)[None, :], values.to(tensor.dtype.element_ty), mask=rows.present[:, None])


@triton.jit(do_not_specialize=["per_item"])
def attention_delta(
    arrays,
    sizes,
    plan,
    per_item,
    dout,
    dout_batch,
    dout_head,
    dout_row,
    out,
    out_batch,
    out_head,
    out_row,
    lse,
    dlse,
    delta,
    origin,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PACKED: tl.constexpr,
):
    """delta and ``origin`` (``exponent_origin``), in the workspace."""
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    d = row_block(dout, dout_batch, dout_head, dout_row, item, rows, D).to(tl.float32)
    o = row_block(out, out_batch, out_head, out_row, item, rows, D).to(tl.float32)
    total = tree_sum(d * o, ROWS, D)
    at = row_values(arrays, sizes, item, rows)
    if dlse is not None:
        total = total - tl.load(dlse + at, mask=rows.present, other=0.0)
    reference = exponent_origin(lse, at, rows.present)
    at = line_of(sizes, item, rows.head, PACKED) + rows.query
    tl.store(delta + at, total, mask=rows.present)
    tl.store(origin + at, reference, mask=rows.present)


@device_function
def _query_tile(
    q, do, k_tiles, v_tiles, item, kv_head, rows, phase, tile, origin, delta, acc, c, N: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """The sum for dq after one more key tile: a product of its own, then one rounded addition."""
    first = tile * N - phase
    k = key_block(k_tiles, item, kv_head, first, N, D, PACKED, GARBAGE)
    s = tl.dot(q, k.T)
    v = key_block(v_tiles, item, kv_head, first, N, D, PACKED, False)
    dp = tl.dot(do, v.T)
    p = ex2(tl.fma(s, c, -origin[:, None]))
    ds = p * (dp - delta[:, None])
    if MASKED:
        stored = first + tl.arange(0, N)
        seen = stored[None, :] < rows.upper[:, None]
        if WINDOWED:
            seen = seen & (stored[None, :] >= rows.lower[:, None])
        ds = tl.where(seen, ds, 0.0)
    return add_rn(acc, tl.dot(ds.to(k.dtype), k))


@device_function
def _query_tiles(
    q, do, k_tiles, v_tiles, item, kv_head, rows, phase, origin, delta, acc, c, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """The sum for dq after all tiles that the rows see; those before and after the full ones are masked."""
    begin, full_begin, full_end, end = key_tiles(rows, phase, N)
    if WINDOWED:
        for tile in tl.range(begin, full_begin, num_stages=STAGES):
            acc = _query_tile(
                q, do, k_tiles, v_tiles, item, kv_head, rows, phase, tile, origin, delta, acc, c, N, D, True, True, PACKED, GARBAGE
            )
    for tile in tl.range(full_begin, full_end, num_stages=STAGES):
        acc = _query_tile(
            q, do, k_tiles, v_tiles, item, kv_head, rows, phase, tile, origin, delta, acc, c, N, D, False, False, PACKED, False
        )
    for tile in tl.range(full_end, end, num_stages=STAGES):
        acc = _query_tile(
            q, do, k_tiles, v_tiles, item, kv_head, rows, phase, tile, origin, delta, acc, c, N, D, True, WINDOWED, PACKED, GARBAGE
        )
    return acc


@triton.jit(do_not_specialize=["per_item"])
def attention_query_gradients(
    arrays,
    sizes,
    plan,
    per_item,
    k_tiles,
    v_tiles,
    gap,
    c,
    dout,
    dout_batch,
    dout_head,
    dout_row,
    origins,
    deltas,
    dq,
    dq_batch,
    dq_head,
    dq_row,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    PACKED: tl.constexpr,
    GARBAGE: tl.constexpr,
):
    """dq of a block of rows: tiles of N keys ascending; ``gap`` as in the forward pass."""
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    phase = key_phase(arrays, item)
    at = line_of(sizes, item, rows.head, PACKED) + rows.query
    origin = tl.load(origins + at, mask=rows.present, other=INFINITY)
    delta = tl.load(deltas + at, mask=rows.present, other=0.0)
    q = query_block(arrays, item, rows, D)
    do = row_block(dout, dout_batch, dout_head, dout_row, item, rows, D)
    acc = tl.zeros((ROWS, D), tl.float32)
    if gap is None:
        acc = _query_tiles(
            q, do, k_tiles, v_tiles, item, kv_head, rows, phase, origin, delta, acc, c, N, D, STAGES, WINDOWED, PACKED, GARBAGE
        )
    else:
        for part in range(0, 2):
            seen = part_of(rows, gap, item, part)
            acc = _query_tiles(
                q, do, k_tiles, v_tiles, item, kv_head, seen, phase, origin, delta, acc, c, N, D, STAGES, WINDOWED, PACKED, GARBAGE
            )
    rows = rows_at(arrays, sizes, item, kv_head, again(block, True) * ROWS, ROWS)
    store_block(dq, dq_batch, dq_head, dq_row, item, rows, acc * sizes.scale, D)


@device_function
def own_keys(tensor, batch_stride, head_stride, row_stride, column_stride, item, kv_head, key, D: tl.constexpr):
    """Stored keys ``key`` [N] of a tensor like k, [N, D]; those past the item's end are +0."""
    at = item.batch * batch_stride + kv_head * head_stride + (item.first_key + key) * row_stride
    present = (key < item.keys)[:, None]
    return tl.load((tensor + at)[:, None] + tl.arange(0, D)[None, :] * column_stride, mask=present, other=0.0)


@device_function
def store_keys(tensor, batch_stride, head_stride, row_stride, item, kv_head, key, values, D: tl.constexpr):
    """``values`` [N, D] to the stored keys ``key`` [N] of a tensor like k with unit stride."""
    at = item.batch * batch_stride + kv_head * head_stride + (item.first_key + key) * row_stride
    present = (key < item.keys)[:, None]
    tl.store((tensor + at)[:, None] + tl.arange(0, D)[None, :], values.to(tensor.dtype.element_ty), mask=present)


@device_function
def first_seeing(sizes, item, first_key, KEYS: tl.constexpr):
    """Who sees the keys [first_key, first_key + KEYS) under the right side of the window: the last of them in use, the first query that
    sees any (int64), the first that sees all of these, and ``below``: query i sees key ``first_key + x`` iff ``x - i <= below`` (int32)."""
    queries = item.queries.to(tl.int64)
    last_key = tl.minimum(first_key + KEYS, item.used) - 1
    some = tl.minimum(tl.maximum(first_key - sizes.right - item.offset, 0), queries)
    every = tl.minimum(tl.maximum(last_key - sizes.right - item.offset, 0), queries).to(tl.int32)
    below = tl.minimum(tl.maximum(item.offset + sizes.right - first_key, -FAR), FAR).to(tl.int32)
    return last_key, some, every, below


@device_function
def queries_of_head(
    tiles, tensor, head_stride, row_stride, item, head, first, present, M: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Queries [first, first + M) of q or dout, [M, D], from ``tiles`` or, packed, from ``tensor``; rows past the item's end are +0."""
    if PACKED:
        row = tensor + head * head_stride + item.first_query * row_stride
        at = (first + tl.arange(0, M)).to(tl.int64) * row_stride
        block = tl.load((row + at)[:, None] + tl.arange(0, D)[None, :], mask=present[:, None], other=0.0)
    else:
        block = tl.reshape(tiles.load([item.batch.to(tl.int32), head.to(tl.int32), first, 0]), (M, D))
    return block


@triton.jit(do_not_specialize=["per_item"])
def attention_key_gradients(
    arrays,
    sizes,
    plan,
    per_item,
    q_tiles,
    dout_tiles,
    gap,
    c,
    dout,
    dout_head,
    dout_row,
    origins,
    deltas,
    dk,
    dv,
    d_batch,
    d_head,
    d_row,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dk and dv of KEYS keys: query heads of the group ascending and, within a head, queries ascending, ROWS at a time.

    MASKED: some query may see a part of the keys (causal or a window). Keys in the gap and at or past the end of the item get +0.
    """
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), False)
    if block < 0:
        return
    first_key = (block * KEYS).to(tl.int32)
    key = first_key + tl.arange(0, KEYS)
    k = own_keys(arrays.k, arrays.k_batch, arrays.k_head, arrays.k_row, arrays.k_column, item, kv_head, key, D)
    v = own_keys(arrays.v, arrays.v_batch, arrays.v_head, arrays.v_row, arrays.v_column, item, kv_head, key, D)
    # Queries that see a key of the block are [begin, end), those that see all of them [full_begin, full_end).
    last_key, begin, full_begin, below = first_seeing(sizes, item, first_key, KEYS)
    queries = item.queries.to(tl.int64)
    end = tl.minimum(tl.maximum(last_key + sizes.left - item.offset + 1, 0), queries)
    end = tl.where(last_key < first_key, begin, end)
    full_end = tl.minimum(tl.maximum(first_key + sizes.left - item.offset + 1, 0), queries).to(tl.int32)
    above = tl.minimum(tl.maximum(item.offset - sizes.left - first_key, -FAR), FAR).to(tl.int32)
    low, high = begin.to(tl.int32) // ROWS, (end.to(tl.int32) + ROWS - 1) // ROWS
    if gap is not None:
        gap_begin, gap_end = tl.load(gap + item.batch * 2), tl.load(gap + item.batch * 2 + 1)
        high = tl.where((first_key >= gap_begin) & (first_key + KEYS <= gap_end), low, high)
    dk_sum = tl.zeros((KEYS, D), tl.float32)
    dv_sum = tl.zeros((KEYS, D), tl.float32)
    for member in range(0, sizes.group):
        head = kv_head * sizes.group + member
        line = line_of(sizes, item, head, PACKED)
        for step in tl.range(low, high, num_stages=STAGES):
            first = step * ROWS
            query = first + tl.arange(0, ROWS)
            present = query < item.queries
            q = queries_of_head(q_tiles, arrays.q, arrays.q_head, arrays.q_row, item, head, first, present, ROWS, D, PACKED)
            s = tl.dot(k, q.T)
            origin = tl.load(origins + line + query)
            p = ex2(tl.fma(s, c, -origin[None, :]))
            if MASKED and (first < full_begin) | (first + ROWS > full_end):
                apart = tl.arange(0, KEYS)[:, None] - query[None, :]
                p = tl.where((apart <= below) & (apart >= above), p, 0.0)
            do = queries_of_head(dout_tiles, dout, dout_head, dout_row, item, head, first, present, ROWS, D, PACKED)
            dv_sum = tl.dot(p.to(do.dtype), do, dv_sum)
            dp = tl.dot(v, do.T)
            delta = tl.load(deltas + line + query)
            ds = p * (dp - delta[None, :])
            dk_sum = tl.dot(ds.to(q.dtype), q, dk_sum)
    item = item_of(arrays, sizes, again(item.batch, True))
    key = again(first_key.to(tl.int64), True).to(tl.int32) + tl.arange(0, KEYS)
    used = key < item.used
    if gap is not None:
        gap += item.batch * 2
        used = used & ((key < tl.load(gap)) | (key >= tl.load(gap + 1)))
    used = used[:, None]
    store_keys(dk, d_batch, d_head, d_row, item, kv_head, key, tl.where(used, dk_sum * sizes.scale, 0.0), D)
    store_keys(dv, d_batch, d_head, d_row, item, kv_head, key, tl.where(used, dv_sum, 0.0), D)


@triton.jit
def attention_sink_items(arrays, sizes, origins, deltas, items, PACKED: tl.constexpr):
    """items [batch, H]: for each batch item or segment and head the sum of ``-P_sink * delta`` over queries, in tiles of 128."""
    sizes = sizes_of(sizes)
    heads = sizes.kv_heads.to(tl.int64) * sizes.group
    program = tl.program_id(0).to(tl.int64)
    batch = program // heads
    head = program - batch * heads
    item = item_of(arrays, sizes, batch)
    logit = tl.load(arrays.sinks + head) * LOG2E
    line = line_of(sizes, item, head, PACKED)
    total = tl.full((1,), 0.0, tl.float32)
    for first in range(0, item.queries, TILE):
        query = first + tl.arange(0, TILE)
        origin = tl.load(origins + line + query)
        delta = tl.load(deltas + line + query)
        terms = tl.where(query < item.queries, -(ex2(logit - origin) * delta), 0.0)
        terms = tl.where(logit == NEGATIVE_INFINITY, 0.0, terms)
        total = total + tree_sum(tl.reshape(terms, (1, TILE)), 1, TILE)
    tl.store(items + program + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=["batch", "heads"])
def attention_sinks(items, dsinks, batch, heads, HEADS: tl.constexpr):
    """dsinks [H] from items [batch, H], float32; batch ascending from +0."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    present = head < heads
    total = tl.zeros((HEADS,), tl.float32)
    for item in range(0, batch):
        total = total + tl.load(items + item * heads + head, mask=present, other=0.0)
    tl.store(dsinks + head, total, mask=present)
