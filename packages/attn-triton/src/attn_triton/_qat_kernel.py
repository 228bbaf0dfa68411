"""4-bit attention of contract nvfp4-ordered-v1: out, dv, and delta of the quantized P. Row states, dq, dk and dsinks are ordered-v1's.

P is quantized in registers from the row's final maximum: blocks of 16 slots, which begin at multiples of 16 in every block of keys.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._attention_backward_kernel import _pair_upstream, _products, row_state
from attn_triton._chain_kernel import read_rows, spoils, weighted_chain
from attn_triton._device_function import device_function
from attn_triton._nvfp4_kernel import quantized_along_columns, quantized_along_rows
from attn_triton._scores_kernel import QUARTER, final_scores, key_rows, query_rows, row_values, scores_of, tree_sum
from attn_triton._softmax_kernel import _store, exp_nonpositive
from attn_triton._visibility_kernel import Keys, find_work, keys_at, queries_of_keys, rows_at, rows_of_head, sizes_of, slot_range

__all__ = ["qat_delta", "qat_outputs", "qat_value_sums"]

TILE = tl.constexpr(256)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@device_function
def _weights(x, m, encode, decode, QUANTIZE: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """Quantized exponentials of final scores x [rows, keys], or [keys, rows] when not ROWS_FIRST; +0 where masked. ``m`` broadcasts."""
    masked = x == NEGATIVE_INFINITY
    e = tl.where(masked, 0.0, exp_nonpositive(x - tl.where(m == NEGATIVE_INFINITY, 0.0, m)))
    if QUANTIZE:
        up, down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
        if ROWS_FIRST:
            e = quantized_along_columns(e, up, down)
        else:
            e = quantized_along_rows(e, up, down)
        e = tl.where(masked, 0.0, e)
    return e, masked


@device_function
def _over_sum(values, total):
    """``RN_div(values, total)``, +0 where a row has no term; ``total`` broadcasts."""
    empty = total == 0.0
    return tl.where(empty, 0.0, tl.div_rn(values, tl.broadcast_to(tl.where(empty, 1.0, total), values.shape)))


@triton.jit(do_not_specialize=["per_item", "encode", "decode"])
def qat_outputs(
    arrays,
    sizes,
    plan,
    per_item,
    row_max,
    row_sum,
    encode,
    decode,
    out,
    out_batch,
    out_head,
    out_row,
    spoiled,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SELECT: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """out of one block of rows; ``spoiled`` and SELECT are as in ``attention_query_sums``."""
    sizes = sizes_of(sizes)
    due = True
    if SELECT:
        due = tl.load(spoiled + tl.program_id(0)) != 0
    if not due:
        return
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    rows = rows_at(arrays, sizes, item, work.kv_head, work.block * ROWS, ROWS)
    _, end = slot_range(arrays, sizes, item, rows)
    m, s = row_state(row_max, row_sum, row_values(arrays, sizes, item, rows), rows.present)
    acc = tl.full([ROWS, COLUMNS], 0, tl.float32)
    for first in range(0, end, KEYS):
        keys = keys_at(arrays, sizes, item, first, KEYS)
        v_rows = key_rows(item, work.kv_head, keys, arrays.v_batch, arrays.v_head, arrays.v_row)
        values = read_rows(arrays.v, v_rows, keys.present, arrays.v_column, arrays.value_dim, COLUMNS, DOT)
        x = scores_of(arrays, sizes, item, work.kv_head, rows, keys, ROWS, KEYS, CHUNK, DOT)
        p, masked = _weights(x, m[:, None], encode, decode, QUANTIZE, True)
        acc = weighted_chain(acc, p, masked, values, SELECT, DOT)
    if not SELECT:
        tl.store(spoiled + tl.program_id(0), spoils(acc))
    into = item.batch * out_batch + rows.head * out_head + (item.first_query + rows.query) * out_row
    column = tl.arange(0, COLUMNS)
    present = rows.present[:, None] & (column < arrays.value_dim)[None, :]
    _store((out + into)[:, None] + column[None, :], _over_sum(acc, s[:, None]) + 0.0, present, INTEGER_ROUNDING)


@device_function
def _pair_scores(
    arrays, sizes, columns, item, kv_head, rows, keys, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr,
    ROWS_FIRST: tl.constexpr
):  # fmt: skip
    """Final scores of the pairs."""
    q_at = query_rows(item, rows, columns.q_batch, columns.q_head, 1)
    k_at = key_rows(item, kv_head, keys, columns.k_batch, columns.k_head, 1)
    products = _products(
        columns.q, q_at, rows, columns.q_column, columns.k, k_at, keys, columns.k_column, arrays.head_dim, M, N, CHUNK, DOT, ROWS_FIRST
    )
    return final_scores(products, arrays, sizes, item, rows, keys, ROWS_FIRST)


@triton.jit(do_not_specialize=["per_item", "encode", "decode"])
def qat_value_sums(
    arrays,
    sizes,
    columns,
    plan,
    per_item,
    row_max,
    row_sum,
    encode,
    decode,
    dout,
    dout_batch,
    dout_head,
    dout_row,
    dout_column,
    dv,
    dv_batch,
    dv_head,
    dv_row,
    spoiled,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SELECT: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """dv of one block of keys: the chains of the quantized P over its row's sum; ``spoiled``, zeros at first, and SELECT as elsewhere."""
    sizes = sizes_of(sizes)
    if SELECT:
        marked = tl.load(spoiled + tl.program_id(0))
        if marked == 0:
            return
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    first_key = work.block * KEYS
    if (work.block >= 0) & (first_key < item.count):
        keys = keys_at(arrays, sizes, item, first_key.to(tl.int32), KEYS)
        keys = Keys(tl.where(keys.present, keys.stored, 0), keys.present)
        begin, end = queries_of_keys(sizes, item, keys)
        acc = tl.zeros([KEYS, COLUMNS], tl.float32)
        first_head = work.kv_head * sizes.group
        for head in range(first_head, first_head + sizes.group):
            for first in range(begin, end, ROWS):
                rows = rows_of_head(arrays, sizes, item, head, first, end, ROWS)
                m, s = row_state(row_max, row_sum, row_values(arrays, sizes, item, rows), rows.present)
                at = query_rows(item, rows, dout_batch, dout_head, dout_row)
                right = read_rows(dout, at, rows.present & (rows.lower < rows.upper), dout_column, arrays.value_dim, COLUMNS, DOT)
                x = _pair_scores(arrays, sizes, columns, item, work.kv_head, rows, keys, ROWS, KEYS, CHUNK, DOT, False)
                p, masked = _weights(x, m[None, :], encode, decode, QUANTIZE, False)
                acc = weighted_chain(acc, _over_sum(p, s[None, :]), masked, right, SELECT, DOT)
        if not SELECT:
            tl.store(spoiled + tl.program_id(0), spoils(acc))
        column = tl.arange(0, COLUMNS)
        into = key_rows(item, work.kv_head, keys, dv_batch, dv_head, dv_row)
        present = keys.present[:, None] & (column < arrays.value_dim)[None, :]
        _store((dv + into)[:, None] + column[None, :], acc + 0.0, present, INTEGER_ROUNDING)


@triton.jit(do_not_specialize=["per_item", "encode", "decode"])
def qat_delta(
    arrays,
    sizes,
    columns,
    plan,
    per_item,
    row_max,
    row_sum,
    encode,
    decode,
    dlse,
    delta,
    dsink,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``attention_delta`` of the quantized P: delta of every row, and with ``dsink`` the gradient of the row's sink."""
    sizes = sizes_of(sizes)
    work = find_work(arrays, sizes, plan, per_item)
    item = work.item
    if work.block >= 0:
        rows = rows_at(arrays, sizes, item, work.kv_head, work.block * ROWS, ROWS)
        at = row_values(arrays, sizes, item, rows)
        m, s = row_state(row_max, row_sum, at, rows.present)
        _, end = slot_range(arrays, sizes, item, rows)
        total = tl.zeros([ROWS], tl.float32)
        for first in range(0, end, TILE):
            sums = tl.full([ROWS, QUARTER], 0.0, tl.float32)
            for parity in range(2):
                pair = tl.full([ROWS, QUARTER], 0.0, tl.float32)
                for half in range(2):
                    here = first + (parity + 2 * half) * QUARTER
                    if here < end:
                        keys = keys_at(arrays, sizes, item, here, QUARTER)
                        x = _pair_scores(arrays, sizes, columns, item, work.kv_head, rows, keys, ROWS, QUARTER, CHUNK, DOT, True)
                        p, masked = _weights(x, m[:, None], encode, decode, QUANTIZE, True)
                        dp = _pair_upstream(arrays, columns, item, work.kv_head, rows, keys, ROWS, QUARTER, CHUNK, DOT, True)
                        pair += tl.where(masked, 0.0, _over_sum(p, s[:, None]) * dp)
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
