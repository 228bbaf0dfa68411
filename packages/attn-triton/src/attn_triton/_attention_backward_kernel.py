"""delta, dq and dk of contract ordered-v1's attention from recomputed P and dS, for 4-bit attention; dS of pairs for dbias.

A program owns rows or keys and goes over the other side in ascending order; each kernel keeps one accumulator, since a second one makes
LLVM hold the operands of both products at once. Nothing of the size of the scores is stored. The chains of scores and dP read copies of q,
k, v and dout with columns first (``Columns``), whose rows lie side by side in shared memory.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._chain_kernel import read_rows, row_products, spoils, weighted_chain
from attn_triton._device_function import device_function
from attn_triton._scores_kernel import QUARTER, final_scores, key_rows, probabilities, query_rows, row_values, tree_sum
from attn_triton._softmax_kernel import _store, exp_nonpositive
from attn_triton._visibility_kernel import Keys, find_work, keys_at, queries_of_keys, rows_at, rows_of_head, sizes_of, slot_range

__all__ = ["attention_delta", "attention_key_sums", "attention_query_sums", "pair_gradients", "row_state"]

TILE = tl.constexpr(256)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@device_function
def _along(values, ROWS_FIRST: tl.constexpr):
    """Values of rows, to broadcast against pairs [rows, keys], or [keys, rows] when not ROWS_FIRST."""
    if ROWS_FIRST:
        along = values[:, None]
    else:
        along = values[None, :]
    return along


@device_function
def _products(
    by_row,
    row_at,
    rows,
    row_column,
    by_key,
    key_at,
    keys,
    key_column,
    depth,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """Chains of rows [M] and keys [N]: [M, N], or [N, M] when not ROWS_FIRST, as its own product and not as a transposed result."""
    if ROWS_FIRST:
        found = row_products(by_row, row_at, rows.present, row_column, by_key, key_at, keys.present, key_column, depth, M, N, CHUNK, DOT)
    else:
        found = row_products(by_key, key_at, keys.present, key_column, by_row, row_at, rows.present, row_column, depth, N, M, CHUNK, DOT)
    return found


@device_function
def pair_probabilities(
    arrays,
    sizes,
    columns,
    item,
    kv_head,
    rows,
    keys,
    m,
    s,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """P of the pairs, +0 where masked, and which are masked; ``m`` and ``s`` [M] are the row states."""
    q_at = query_rows(item, rows, columns.q_batch, columns.q_head, 1)
    k_at = key_rows(item, kv_head, keys, columns.k_batch, columns.k_head, 1)
    products = _products(
        columns.q, q_at, rows, columns.q_column, columns.k, k_at, keys, columns.k_column, arrays.head_dim, M, N, CHUNK, DOT, ROWS_FIRST
    )
    x = final_scores(products, arrays, sizes, item, rows, keys, ROWS_FIRST)
    return probabilities(x, _along(m, ROWS_FIRST), _along(s, ROWS_FIRST)), x == NEGATIVE_INFINITY


@device_function
def _pair_upstream(
    arrays,
    columns,
    item,
    kv_head,
    rows,
    keys,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """dP of the pairs."""
    d_at = query_rows(item, rows, columns.d_batch, columns.d_head, 1)
    v_at = key_rows(item, kv_head, keys, columns.v_batch, columns.v_head, 1)
    return _products(
        columns.d, d_at, rows, columns.d_column, columns.v, v_at, keys, columns.v_column, arrays.value_dim, M, N, CHUNK, DOT, ROWS_FIRST
    )


@device_function
def pair_gradients(
    arrays,
    sizes,
    columns,
    item,
    kv_head,
    rows,
    keys,
    m,
    s,
    delta,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """dS of the pairs, +0 where masked, and which are masked."""
    p, masked = pair_probabilities(arrays, sizes, columns, item, kv_head, rows, keys, m, s, M, N, CHUNK, DOT, ROWS_FIRST)
    dp = _pair_upstream(arrays, columns, item, kv_head, rows, keys, M, N, CHUNK, DOT, ROWS_FIRST)
    return tl.where(masked, 0.0, p * (dp - _along(delta, ROWS_FIRST))), masked


@device_function
def row_state(row_max, row_sum, at, present):
    return tl.load(row_max + at, mask=present, other=NEGATIVE_INFINITY), tl.load(row_sum + at, mask=present, other=0.0)


@device_function
def _quarter_terms(
    arrays, sizes, columns, item, kv_head, rows, m, s, first, begin, end, M: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr
):
    """P * dP [M, 64] of a quarter of a tile, +0 where masked; a quarter outside [begin, end) is not computed."""
    terms = tl.zeros([M, QUARTER], tl.float32)
    if (first < end) & (first + QUARTER > begin):
        keys = keys_at(arrays, sizes, item, first, QUARTER)
        p, masked = pair_probabilities(arrays, sizes, columns, item, kv_head, rows, keys, m, s, M, QUARTER, CHUNK, DOT, True)
        dp = _pair_upstream(arrays, columns, item, kv_head, rows, keys, M, QUARTER, CHUNK, DOT, True)
        terms = tl.where(masked, 0.0, p * dp)
    return terms


@triton.jit(do_not_specialize=["per_item"])
def attention_delta(
    arrays,
    sizes,
    columns,
    plan,
    per_item,
    row_max,
    row_sum,
    dlse,
    delta,
    dsink,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """delta of every row, and with ``dsink`` the gradient of the row's sink; float32, laid out like LSE.

    delta is summed from +0: a dead tile adds +0, and the sign of a zero delta cannot show, since stored zeros are +0.
    """
    sizes = sizes_of(sizes)
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    if work.block >= 0:
        rows = rows_at(arrays, sizes, item, work.kv_head, work.block * ROWS, ROWS)
        at = row_values(arrays, sizes, item, rows)
        m, s = row_state(row_max, row_sum, at, rows.present)
        begin, end = slot_range(arrays, sizes, item, rows)
        total = tl.zeros([ROWS], tl.float32)
        for first in range(begin & -TILE, end, TILE):
            sums = tl.full([ROWS, QUARTER], 0.0, tl.float32)
            for parity in range(2):  # the halves tree adds the quarters 0 and 2, 1 and 3, then both sums; one copy of the code does
                pair = tl.full([ROWS, QUARTER], 0.0, tl.float32)
                for half in range(2):
                    here = first + (parity + 2 * half) * QUARTER
                    pair += _quarter_terms(arrays, sizes, columns, item, work.kv_head, rows, m, s, here, begin, end, ROWS, CHUNK, DOT)
                sums += pair
            total += tree_sum(sums)
        if dlse is not None:
            total -= tl.load(dlse + at, mask=rows.present, other=0.0)
        tl.store(delta + at, total, mask=rows.present)
        if dsink is not None:
            sink = tl.load(arrays.sinks + rows.head, mask=rows.present, other=NEGATIVE_INFINITY)
            absent = sink == NEGATIVE_INFINITY
            p = tl.div_rn(exp_nonpositive(tl.where(absent, 0.0, sink - m)), tl.where(absent, 1.0, s))
            tl.store(dsink + at, tl.where(absent, 0.0, -p * total), mask=rows.present)


@triton.jit(do_not_specialize=["per_item"])
def attention_query_sums(
    arrays,
    sizes,
    columns,
    plan,
    per_item,
    row_max,
    row_sum,
    delta,
    dq,
    dq_batch,
    dq_head,
    dq_row,
    spoiled,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SELECT: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """dq of one block of rows. A launch with SELECT sums the blocks again that the one before it marked in ``spoiled`` [programs] int32."""
    sizes = sizes_of(sizes)
    if SELECT:
        marked = tl.load(spoiled + tl.program_id(0))
        if marked == 0:
            return
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    if work.block >= 0:
        rows = rows_at(arrays, sizes, item, work.kv_head, work.block * ROWS, ROWS)
        at = row_values(arrays, sizes, item, rows)
        m, s = row_state(row_max, row_sum, at, rows.present)
        d = tl.load(delta + at, mask=rows.present, other=0.0)
        begin, end = slot_range(arrays, sizes, item, rows)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(begin, end, KEYS):
            keys = keys_at(arrays, sizes, item, first, KEYS)
            k_rows = key_rows(item, work.kv_head, keys, arrays.k_batch, arrays.k_head, arrays.k_row)
            used = keys.present & (keys.stored < item.used)
            right = read_rows(arrays.k, k_rows, used, arrays.k_column, arrays.head_dim, COLUMNS, DOT)
            ds, masked = pair_gradients(arrays, sizes, columns, item, work.kv_head, rows, keys, m, s, d, ROWS, KEYS, CHUNK, DOT, True)
            acc = weighted_chain(acc, ds, masked, right, SELECT, DOT)
        if not SELECT:
            tl.store(spoiled + tl.program_id(0), spoils(acc))
        column = tl.arange(0, COLUMNS)
        into = item.batch * dq_batch + rows.head * dq_head + (item.first_query + rows.query) * dq_row
        present = rows.present[:, None] & (column < arrays.head_dim)[None, :]
        _store((dq + into)[:, None] + column[None, :], acc * sizes.scale + 0.0, present, INTEGER_ROUNDING)


@triton.jit(do_not_specialize=["per_item"])
def attention_key_sums(
    arrays,
    sizes,
    columns,
    plan,
    per_item,
    row_max,
    row_sum,
    delta,
    q,
    q_batch,
    q_head,
    q_row,
    q_column,
    dk,
    dk_batch,
    dk_head,
    dk_row,
    spoiled,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SELECT: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """dk of one block of keys, from the rows of ``q``; ``spoiled``, zeros at first, and SELECT are as in ``attention_query_sums``."""
    sizes = sizes_of(sizes)
    if SELECT:
        marked = tl.load(spoiled + tl.program_id(0))
        if marked == 0:
            return
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    block = work.block
    if plan is None:
        block = per_item - 1 - block  # under causality the first keys are seen by most rows
    first_key = block * KEYS
    if (block >= 0) & (first_key < item.count):
        keys = keys_at(arrays, sizes, item, item.shift + first_key.to(tl.int32), KEYS)
        keys = Keys(tl.where(keys.present, keys.stored, 0), keys.present)  # known neighbours would cost sm_90 a few spills here
        begin, end = queries_of_keys(sizes, item, keys)
        acc = tl.zeros([KEYS, COLUMNS], tl.float32)
        first_head = work.kv_head * sizes.group
        for head in range(first_head, first_head + sizes.group):
            for first in range(begin, end, ROWS):
                rows = rows_of_head(arrays, sizes, item, head, first, end, ROWS)
                at = row_values(arrays, sizes, item, rows)
                m, s = row_state(row_max, row_sum, at, rows.present)
                q_rows = query_rows(item, rows, q_batch, q_head, q_row)
                seeing = rows.present & (rows.lower < rows.upper)
                right = read_rows(q, q_rows, seeing, q_column, arrays.head_dim, COLUMNS, DOT)
                d = tl.load(delta + at, mask=rows.present, other=0.0)
                ds, masked = pair_gradients(arrays, sizes, columns, item, work.kv_head, rows, keys, m, s, d, ROWS, KEYS, CHUNK, DOT, False)
                acc = weighted_chain(acc, ds, masked, right, SELECT, DOT)
        if not SELECT:
            tl.store(spoiled + tl.program_id(0), spoils(acc))
        column = tl.arange(0, COLUMNS)
        into = key_rows(item, work.kv_head, keys, dk_batch, dk_head, dk_row)
        present = keys.present[:, None] & (column < arrays.head_dim)[None, :]
        _store((dk + into)[:, None] + column[None, :], acc * sizes.scale + 0.0, present, INTEGER_ROUNDING)
