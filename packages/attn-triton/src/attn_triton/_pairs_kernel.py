"""Numbers of pairs of contract ordered-v1's attention in memory: scores, P, dP and dS of the rows in work, and what is summed over tiles.

The rows in work are blocks of BLOCK rows, of consecutive programs of a grid of rows (``block_of``); row i of block b is line
``b * BLOCK + i``. A line holds ``tiles`` tiles of 256 slots, from that tile on in which the block's first visible key lies; of them only
those are written and read that some row of the block sees. ``ranges`` [blocks, 2] int32 are the slots [begin, end) of each block.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._attention_forward_kernel import store_states
from attn_triton._chain_kernel import chain, widened
from attn_triton._device_function import device_function
from attn_triton._scores_kernel import final_scores, key_rows, query_rows, row_values
from attn_triton._softmax_kernel import HIGH, LEVELS, _merge, _probability, _slots, _tree_max, _tree_sum, exp_nonpositive
from attn_triton._visibility_kernel import block_of, keys_at, rows_at, sizes_of, slot_range

__all__ = [
    "MASKED",
    "decode_products",
    "merge_deltas",
    "merge_states",
    "pair_products",
    "tile_deltas",
    "tile_states",
    "to_gradients",
    "to_probabilities",
]

TILE = tl.constexpr(256)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
MASKED = tl.constexpr(-0x80000000)
"""Bits of -0, which no P and no dS is, in the place of a masked pair."""


@device_function
def _marked(value, masked):
    return tl.where(masked, tl.full(value.shape, MASKED, tl.int32).to(tl.float32, bitcast=True), value)


@device_function
def _work(arrays, sizes, plan, first, ranges, BLOCK: tl.constexpr):
    """Item, kv head, rows and the slots [begin, end) of this program's block; the programs of the first keys note the slots."""
    work = block_of(arrays, sizes, plan, first + tl.program_id(0))
    rows = rows_at(arrays, sizes, work.item, work.kv_head, work.block * BLOCK, BLOCK)
    begin, end = slot_range(arrays, sizes, work.item, rows)
    if tl.program_id(1) == 0:
        tl.store(ranges + 2 * tl.program_id(0), begin)
        tl.store(ranges + 2 * tl.program_id(0) + 1, end)
    return work, rows, begin, end


@triton.jit(do_not_specialize=["first", "tiles"])
def pair_products(
    arrays,
    sizes,
    plan,
    first,
    by_row,
    row_batch,
    row_head,
    row_column,
    by_key,
    key_batch,
    key_head,
    key_column,
    depth,
    found,
    ranges,
    tiles,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    FINAL: tl.constexpr,
    DOT: tl.constexpr,
):
    """Chains over columns of a block of rows with KEYS slots; with FINAL, scores: scaled, biased, -inf where masked.

    ``by_row`` and ``by_key`` are float32 copies with columns first (``_workspace``): ``depth`` columns that CHUNK divides, and memory for
    every slot that a block may ask for, so that nothing is read under a mask.
    """
    sizes = sizes_of(sizes)
    work, rows, begin, end = _work(arrays, sizes, plan, first, ranges, BLOCK)
    item = work.item
    origin = begin // TILE * TILE
    slot = origin + tl.program_id(1) * KEYS
    if slot < (end + (TILE - 1)) // TILE * TILE:
        acc = tl.full([BLOCK, KEYS], 0, tl.float32)
        if (slot < end) & (slot + KEYS > begin):
            if plan is None:
                row_at = work.block * BLOCK + tl.arange(0, BLOCK)
                left = by_row + (item.batch * row_batch + work.kv_head * row_head)
            else:
                row_at = rows.head * row_head + (item.first_query + rows.query)
                left = by_row
            right = by_key + (item.batch * key_batch + work.kv_head * key_head + (item.first_key + TILE + slot - item.shift))
            column = tl.arange(0, CHUNK).to(tl.int64)
            for start in range(0, depth, CHUNK):
                a = tl.load(left + row_at[None, :] + ((start + column) * row_column)[:, None])
                b = tl.load(right + tl.arange(0, KEYS)[None, :] + ((start + column) * key_column)[:, None])
                acc = chain(acc, tl.trans(a), b, DOT)
        if FINAL:
            acc = final_scores(acc, arrays, sizes, item, rows, keys_at(arrays, sizes, item, slot, KEYS), True)
        line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(found + (line * (tiles * TILE))[:, None] + (slot - origin + tl.arange(0, KEYS))[None, :], acc)


@triton.jit(do_not_specialize=["first", "tiles"])
def decode_products(arrays, sizes, first, found, ranges, tiles, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr):
    """Scores as of ``pair_products`` for few rows: one tile of k, read as it is, so that it is read once."""
    sizes = sizes_of(sizes)
    work, rows, begin, end = _work(arrays, sizes, None, first, ranges, BLOCK)
    item = work.item
    origin = begin // TILE * TILE
    slot = origin + tl.program_id(1) * TILE
    if slot < end:
        keys = keys_at(arrays, sizes, item, slot, TILE)
        k_rows = key_rows(item, work.kv_head, keys, arrays.k_batch, arrays.k_head, arrays.k_row)
        q_rows = query_rows(item, rows, arrays.q_batch, arrays.q_head, arrays.q_row)
        # Keys first: rows of k are then the left operand, whose columns may lie side by side in shared memory, turned before it is widened.
        products = tl.full([TILE, BLOCK], 0, tl.float32)
        for start in range(0, arrays.head_dim, CHUNK):
            column = start + tl.arange(0, CHUNK)
            there = (column < arrays.head_dim)[:, None]
            k_at = k_rows[None, :] + (column.to(tl.int64) * arrays.k_column)[:, None]
            q_at = q_rows[None, :] + (column.to(tl.int64) * arrays.q_column)[:, None]
            k = widened(tl.trans(tl.load(arrays.k + k_at, mask=there & keys.present[None, :], other=0.0)), DOT)
            q = widened(tl.load(arrays.q + q_at, mask=there & rows.present[None, :], other=0.0), DOT)
            products = chain(products, k, q, DOT)
        x = tl.trans(final_scores(products, arrays, sizes, item, rows, keys, False))
        line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(found + (line * (tiles * TILE))[:, None] + (slot - origin + tl.arange(0, TILE))[None, :], x)


@device_function
def _part(ranges, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Lines [ROWS] (int64) of this program, a part of a block, and the number of tiles that they hold."""
    block = tl.program_id(0) // (BLOCK // ROWS)
    begin, end = tl.load(ranges + 2 * block), tl.load(ranges + 2 * block + 1)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return line, (end + (TILE - 1)) // TILE - begin // TILE


@device_function
def _tile_at(line, tiles, tile):
    """Offsets [8, ROWS, 32] of a tile of the lines."""
    return ((line * tiles + tile) * TILE)[None, :, None] + _slots(HIGH)


@triton.jit(do_not_specialize=["tiles"])
def tile_states(scores, ranges, tile_max, tile_sum, tiles, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Maximum and sum of exponentials [lines, tiles] of tiles of scores."""
    line, count = _part(ranges, BLOCK, ROWS)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        x = tl.load(scores + _tile_at(line, tiles, tile))
        top = _tree_max(x, LEVELS)
        total = _tree_sum(exp_nonpositive(x - tl.where(top == NEGATIVE_INFINITY, 0.0, top)[None, :, None]), LEVELS)
        tl.store(tile_max + (line * tiles + tile), top)
        tl.store(tile_sum + (line * tiles + tile), total)


@triton.jit(do_not_specialize=["first", "tiles"])
def merge_states(arrays, sizes, plan, first, ranges, tile_max, tile_sum, lse, row_max, row_sum, tiles, BLOCK: tl.constexpr):
    """LSE and states of a block of rows from those of their tiles, ascending, then the sink; a dead row has -inf, -inf and 0."""
    sizes = sizes_of(sizes)
    work = block_of(arrays, sizes, plan, first + tl.program_id(0))
    rows = rows_at(arrays, sizes, work.item, work.kv_head, work.block * BLOCK, BLOCK)
    line, count = _part(ranges, BLOCK, BLOCK)
    m = tl.full([BLOCK], NEGATIVE_INFINITY, tl.float32)
    s = tl.full([BLOCK], 0, tl.float32)
    for tile in range(count):
        m, s = _merge(m, s, tl.load(tile_max + (line * tiles + tile)), tl.load(tile_sum + (line * tiles + tile)))
    store_states(arrays, sizes, work.item, rows, m, s, lse, row_max, row_sum)


@device_function
def _row_numbers(arrays, sizes, plan, first, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows of this program, a part of a block, their item, and where their values lie in the order of LSE."""
    block = tl.program_id(0) // (BLOCK // ROWS)
    part = tl.program_id(0) - block * (BLOCK // ROWS)
    work = block_of(arrays, sizes, plan, first + block)
    rows = rows_at(arrays, sizes, work.item, work.kv_head, work.block * BLOCK + part * ROWS, ROWS)
    return rows, row_values(arrays, sizes, work.item, rows)


@triton.jit(do_not_specialize=["first", "tiles"])
def to_probabilities(arrays, sizes, plan, first, ranges, pairs, row_max, row_sum, tiles, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Scores to P, in place; MASKED where the pair is masked."""
    sizes = sizes_of(sizes)
    rows, at = _row_numbers(arrays, sizes, plan, first, BLOCK, ROWS)
    m = tl.load(row_max + at, mask=rows.present, other=NEGATIVE_INFINITY)
    s = tl.load(row_sum + at, mask=rows.present, other=0.0)
    line, count = _part(ranges, BLOCK, ROWS)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        here = pairs + _tile_at(line, tiles, tile)
        x = tl.load(here)
        masked = x == NEGATIVE_INFINITY
        tl.store(here, _marked(_probability(x, masked, m, s), masked))


@triton.jit(do_not_specialize=["tiles"])
def tile_deltas(probs, upstream, ranges, tile_sum, tiles, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Tree sums [lines, tiles] of P * dP, +0 where masked."""
    line, count = _part(ranges, BLOCK, ROWS)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        at = _tile_at(line, tiles, tile)
        p = tl.load(probs + at)
        dp = tl.load(upstream + at)
        terms = tl.where(p.to(tl.int32, bitcast=True) == MASKED, 0.0, p * dp)
        tl.store(tile_sum + (line * tiles + tile), _tree_sum(terms, LEVELS))


@triton.jit(do_not_specialize=["first", "tiles"])
def merge_deltas(arrays, sizes, plan, first, ranges, tile_sum, row_max, row_sum, dlse, delta, dsink, tiles, BLOCK: tl.constexpr):
    """delta of a block of rows, and with ``dsink`` the gradient of the row's sink; float32, laid out like LSE.

    delta is summed from +0: a dead tile adds +0, and the sign of a zero delta cannot show, since stored zeros are +0.
    """
    sizes = sizes_of(sizes)
    work = block_of(arrays, sizes, plan, first + tl.program_id(0))
    rows = rows_at(arrays, sizes, work.item, work.kv_head, work.block * BLOCK, BLOCK)
    at = row_values(arrays, sizes, work.item, rows)
    line, count = _part(ranges, BLOCK, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(count):
        total += tl.load(tile_sum + (line * tiles + tile))
    if dlse is not None:
        total -= tl.load(dlse + at, mask=rows.present, other=0.0)
    tl.store(delta + at, total, mask=rows.present)
    if dsink is not None:
        m = tl.load(row_max + at, mask=rows.present, other=NEGATIVE_INFINITY)
        s = tl.load(row_sum + at, mask=rows.present, other=0.0)
        sink = tl.load(arrays.sinks + rows.head, mask=rows.present, other=NEGATIVE_INFINITY)
        absent = sink == NEGATIVE_INFINITY
        p = tl.div_rn(exp_nonpositive(tl.where(absent, 0.0, sink - m)), tl.where(absent, 1.0, s))
        tl.store(dsink + at, tl.where(absent, 0.0, -p * total), mask=rows.present)


@triton.jit(do_not_specialize=["first", "tiles"])
def to_gradients(arrays, sizes, plan, first, ranges, probs, pairs, delta, tiles, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """dP to dS, in place; MASKED where the pair is masked."""
    sizes = sizes_of(sizes)
    rows, at = _row_numbers(arrays, sizes, plan, first, BLOCK, ROWS)
    d = tl.load(delta + at, mask=rows.present, other=0.0)
    line, count = _part(ranges, BLOCK, ROWS)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        here = _tile_at(line, tiles, tile)
        p = tl.load(probs + here)
        dp = tl.load(pairs + here)
        tl.store(pairs + here, _marked(p * (dp - d[None, :, None]) + 0.0, p.to(tl.int32, bitcast=True) == MASKED))
