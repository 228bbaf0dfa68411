"""Attention backward of contract ordered-v1: dsinks and dbias, rounded sums in the order batch, head, query, key.

A rounded sum is the chain of its terms with ones: ``FMA(1, x, acc) = RN(acc + x)``.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._attention_backward_kernel import pair_gradients, row_state
from attn_triton._chain_kernel import chain
from attn_triton._device_function import device_function
from attn_triton._scores_kernel import row_values
from attn_triton._visibility_kernel import Keys, Rows, item_of, rows_of_head, sizes_of

__all__ = ["SINK_HEADS", "attention_bias_sums", "attention_sink_items", "attention_sink_rows"]

SINK_HEADS = 16
"""Heads of a program of the sums for the sinks."""

HEADS = tl.constexpr(SINK_HEADS)
TERMS = tl.constexpr(64)
WIDTH = tl.constexpr(16)


@device_function
def _store_heads(into, head, present, sums):
    """The rows of ``sums`` [16, heads] are equal; one of them is stored."""
    row = tl.arange(0, WIDTH)[:, None]
    tl.store(into + (head[None, :] + row * 0), sums, mask=(row == 0) & present[None, :])


@triton.jit
def attention_sink_rows(arrays, sizes, dsink, items, DOT: tl.constexpr):
    """items [batch, H]: for each batch item or segment and head the sum of the rows' ``dsink`` over queries ascending."""
    sizes = sizes_of(sizes)
    heads = sizes.kv_heads.to(tl.int64) * sizes.group
    blocks = (heads + HEADS - 1) // HEADS
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    head = (program - batch * blocks) * HEADS + tl.arange(0, HEADS)
    present = head < heads
    item = item_of(arrays, sizes, batch)
    first_at = row_values(arrays, sizes, item, Rows(head, tl.zeros([HEADS], tl.int64), present, None, None))
    sums = tl.zeros([WIDTH, HEADS], tl.float32)
    ones = tl.full([WIDTH, TERMS], 1.0, tl.float32)
    for first in range(0, item.queries, TERMS):
        query = first + tl.arange(0, TERMS)
        inside = (query < item.queries)[:, None] & present[None, :]
        terms = tl.load((dsink + first_at)[None, :] + query[:, None], mask=inside, other=0.0)
        sums = chain(sums, ones, terms, DOT)
    _store_heads(items + batch * heads, head, present, sums)


@triton.jit(do_not_specialize=["batch", "heads"])
def attention_sink_items(items, dsinks, batch, heads, DOT: tl.constexpr):
    """dsinks [H] from items [batch, H], float32; batch ascending."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    present = head < heads
    sums = tl.zeros([WIDTH, HEADS], tl.float32)
    ones = tl.full([WIDTH, TERMS], 1.0, tl.float32)
    for first in range(0, batch, TERMS):
        item = first + tl.arange(0, TERMS).to(tl.int64)
        inside = (item < batch)[:, None] & present[None, :]
        terms = tl.load(items + (item[:, None] * heads + head[None, :]), mask=inside, other=0.0)
        sums = chain(sums, ones, terms, DOT)
    _store_heads(dsinks, head, present, sums + 0.0)


@device_function
def _stored_keys(sizes, keep, batch, first, N: tl.constexpr):
    """Stored keys [first, first + N) of an item, those that its mask drops absent: items may be compacted differently."""
    stored = first + tl.arange(0, N)
    present = stored < sizes.keys
    if keep is not None:
        present = present & (tl.load(keep + batch * sizes.keys + stored, mask=present, other=0) != 0)
    return Keys(tl.where(present, stored, 0), present)


@triton.jit(do_not_specialize=["bias_batch", "bias_heads", "query_blocks", "key_blocks"])
def attention_bias_sums(
    arrays,
    sizes,
    columns,
    row_max,
    row_sum,
    delta,
    keep,
    dbias,
    bias_batch,
    bias_heads,
    query_blocks,
    key_blocks,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVER_QUERIES: tl.constexpr,
    OVER_KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One block of dbias [bias_batch, bias_heads, S or 1, T or 1], float32: the sum of dS on the axes that the bias broadcasts.

    ``keep`` [B, T] uint8 is the key padding mask. A sum over queries and keys takes all keys of a query before the next query.
    """
    sizes = sizes_of(sizes)
    program = tl.program_id(0).to(tl.int64)
    outer = program // key_blocks
    first_key = (program - outer * key_blocks).to(tl.int32) * KEYS
    above = outer // query_blocks
    first_query = (outer - above * query_blocks) * ROWS
    first_batch = above // bias_heads
    first_head = above - first_batch * bias_heads
    heads = sizes.kv_heads.to(tl.int64) * sizes.group
    last_batch = tl.where(bias_batch == 1, sizes.batch, first_batch + 1)
    last_head = tl.where(bias_heads == 1, heads, first_head + 1)
    queries = sizes.queries
    last_key = sizes.keys
    if not OVER_KEYS:
        last_key = tl.minimum(last_key, first_key + KEYS)
    last_query = queries.to(tl.int64)
    if not OVER_QUERIES:
        last_query = tl.minimum(last_query, first_query + ROWS)
    if OVER_KEYS:
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        ones = tl.full([KEYS, WIDTH], 1.0, tl.float32)
    elif OVER_QUERIES:
        sums = tl.zeros([KEYS, WIDTH], tl.float32)
        ones = tl.full([ROWS, WIDTH], 1.0, tl.float32)
    else:
        sums = tl.zeros([ROWS, KEYS], tl.float32)
    STEP: tl.constexpr = 1 if OVER_QUERIES and OVER_KEYS else ROWS
    for batch in range(first_batch, last_batch):
        item = item_of(arrays, sizes, batch)
        for head in range(first_head, last_head):
            kv_head = head // sizes.group
            for query in range(first_query, last_query, STEP):
                rows = rows_of_head(arrays, sizes, item, head, query, tl.minimum(last_query, query + STEP), ROWS)
                at = row_values(arrays, sizes, item, rows)
                m, s = row_state(row_max, row_sum, at, rows.present)
                d = tl.load(delta + at, mask=rows.present, other=0.0)
                lower = tl.min(tl.where(rows.lower < rows.upper, rows.lower, 0x7FFFFFFF), axis=0)
                upper = tl.max(rows.upper, axis=0)
                for key in range(first_key, last_key, KEYS):
                    if (key < upper) & (key + KEYS > lower):
                        keys = _stored_keys(sizes, keep, batch, key, KEYS)
                        if OVER_KEYS:
                            ds, _ = pair_gradients(arrays, sizes, columns, item, kv_head, rows, keys, m, s, d, ROWS, KEYS, CHUNK, DOT, True)
                            sums = chain(sums, ds, ones, DOT)
                        elif OVER_QUERIES:
                            ds, _ = pair_gradients(
                                arrays, sizes, columns, item, kv_head, rows, keys, m, s, d, ROWS, KEYS, CHUNK, DOT, False
                            )
                            sums = chain(sums, ds, ones, DOT)
                        else:
                            ds, _ = pair_gradients(arrays, sizes, columns, item, kv_head, rows, keys, m, s, d, ROWS, KEYS, CHUNK, DOT, True)
                            sums += ds
    line = first_batch * bias_heads + first_head
    if not OVER_QUERIES:
        line *= queries
    row = first_query + tl.arange(0, ROWS)
    column = first_key + tl.arange(0, KEYS)
    one = tl.arange(0, WIDTH)
    if OVER_KEYS:
        inside = row < last_query
        if OVER_QUERIES:
            inside = tl.arange(0, ROWS) == 0
        tl.store((dbias + line) + (row[:, None] + one[None, :] * 0), sums + 0.0, mask=inside[:, None] & (one == 0)[None, :])
    elif OVER_QUERIES:
        into = dbias + line * sizes.keys
        tl.store(into + (column[:, None] + one[None, :] * 0), sums + 0.0, mask=(column < last_key)[:, None] & (one == 0)[None, :])
    else:
        into = dbias + (line + row[:, None]) * sizes.keys
        tl.store(into + column[None, :], sums + 0.0, mask=(row < last_query)[:, None] & (column < last_key)[None, :])
