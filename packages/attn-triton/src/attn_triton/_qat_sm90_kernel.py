"""4-bit attention of contract nvfp4-sm90-v1 on Hopper's tensor cores (docs/contracts/nvfp4-v1.md section 3).

The forward goes over the keys twice: first for the row maximum, then for P, which is quantized in registers from that maximum. The backward
computes P and the quantized P again from it. Nothing of the size of the scores is stored.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._attention_forward_kernel import _ln
from attn_triton._device_function import device_function
from attn_triton._nvfp4_sm90_kernel import p_along_columns, p_along_rows
from attn_triton._scores_kernel import row_values
from attn_triton._sm90_arithmetic_kernel import LN2, LOG2E, add_rn, class_sums, ex2, row_sum, tree_sum, zero_if_dead
from attn_triton._sm90_backward_kernel import (
    exponent_origin,
    first_seeing,
    line_of,
    own_keys,
    queries_of_head,
    row_block,
    store_block,
    store_keys,
)
from attn_triton._sm90_forward_kernel import find_block, key_block, key_tiles, query_block, sinks_of
from attn_triton._visibility_kernel import again, rows_at, sizes_of

__all__ = ["qat_forward", "qat_key_gradients", "qat_query_gradients", "qat_row_values"]

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
N = tl.constexpr(128)
CLASSES = tl.constexpr(8)


@device_function
def _seen(rows, tile):
    """Which rows see which keys of a tile, [M, N]."""
    return (tile * N + tl.arange(0, N))[None, :] < rows.upper[:, None]


@device_function
def _scores(q, k_tiles, item, kv_head, rows, tile, MASKED: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr):
    """Unscaled scores [M, N] of a key tile, -inf where masked."""
    s = tl.dot(q, key_block(k_tiles, item, kv_head, tile * N, N, D, PACKED, False).T)
    if MASKED:
        s = tl.where(_seen(rows, tile), s, NEGATIVE_INFINITY)
    return s


@device_function
def _output_tile(
    q, k_tiles, v_tiles, item, kv_head, rows, tile, z, classes, o, c, encode, decode, M: tl.constexpr, D: tl.constexpr,
    QUANTIZE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """Class sums and O after one more tile."""
    s = _scores(q, k_tiles, item, kv_head, rows, tile, MASKED, D, PACKED)
    p = ex2(tl.fma(s, c, -z[:, None]))
    classes = classes + class_sums(p, M, N)
    if QUANTIZE:
        p = p_along_columns(p, encode, decode, q.dtype)
        if MASKED:
            p = tl.where(_seen(rows, tile), p, 0.0)
    v = key_block(v_tiles, item, kv_head, tile * N, N, D, PACKED, GARBAGE)
    return classes, tl.dot(p.to(v.dtype), v, o)


@triton.jit(do_not_specialize=["per_item", "encode", "decode"])
def qat_forward(
    arrays,
    sizes,
    plan,
    per_item,
    k_tiles,
    v_tiles,
    c,
    encode,
    decode,
    out,
    out_batch,
    out_head,
    out_row,
    lse,
    row_max,
    row_total,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PACKED: tl.constexpr,
    GARBAGE: tl.constexpr,
):
    """out, LSE, and n and l with the sink, of a block of rows. GARBAGE: tiles may hold rows at or past the end of the item's keys."""
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    _, begin, full_end, end = key_tiles(rows, tl.full([], 0, tl.int32), N)
    q = query_block(arrays, item, rows, D)
    top = tl.full((ROWS,), NEGATIVE_INFINITY, tl.float32)
    for tile in tl.range(begin, full_end, num_stages=STAGES):
        s = _scores(q, k_tiles, item, kv_head, rows, tile, False, D, PACKED)
        top = tl.maximum(top, tl.max(s, axis=1))
    for tile in tl.range(full_end, end, num_stages=STAGES):
        s = _scores(q, k_tiles, item, kv_head, rows, tile, True, D, PACKED)
        top = tl.maximum(top, tl.max(s, axis=1))
    n = top * c
    sink = sinks_of(arrays, rows)
    if sink is not None:
        n = tl.maximum(n, sink * LOG2E)
    z = zero_if_dead(n)
    scale_up, scale_down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
    classes = tl.zeros((ROWS, CLASSES), tl.float32)
    o = tl.zeros((ROWS, D), tl.float32)
    for tile in tl.range(begin, full_end, num_stages=STAGES):
        classes, o = _output_tile(
            q, k_tiles, v_tiles, item, kv_head, rows, tile, z, classes, o, c, scale_up, scale_down, ROWS, D, QUANTIZE, False, PACKED, False
        )
    for tile in tl.range(full_end, end, num_stages=STAGES):
        classes, o = _output_tile(
            q, k_tiles, v_tiles, item, kv_head, rows, tile, z, classes, o, c, scale_up, scale_down, ROWS, D, QUANTIZE, True, PACKED, GARBAGE
        )
    total = row_sum(classes, ROWS)
    dead = (top == NEGATIVE_INFINITY) & (total == 0.0)
    empty = tl.full((ROWS,), NEGATIVE_INFINITY, tl.float32)
    rows = rows_at(arrays, sizes, item, kv_head, again(block, True) * ROWS, ROWS)
    if sink is not None:
        total = total + ex2(sink * LOG2E - z)
        empty = sink
    divisor = tl.where(dead, 1.0, total)
    values = tl.where(dead[:, None], 0.0, o * tl.div_rn(tl.full((ROWS,), decode, tl.float32), divisor)[:, None])
    store_block(out, out_batch, out_head, out_row, item, rows, values, D)
    at = row_values(arrays, sizes, item, rows)
    tl.store(lse + at, tl.where(dead, empty, tl.fma(n, LN2, _ln(divisor))), mask=rows.present)
    tl.store(row_max + at, n, mask=rows.present)
    tl.store(row_total + at, total, mask=rows.present)


@device_function
def _delta_tile(
    q, do, k_tiles, v_tiles, item, kv_head, rows, tile, z, inverse, classes, c, M: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """Class sums of P * dP after one more tile."""
    s = _scores(q, k_tiles, item, kv_head, rows, tile, MASKED, D, PACKED)
    v = key_block(v_tiles, item, kv_head, tile * N, N, D, PACKED, GARBAGE)
    terms = (ex2(tl.fma(s, c, -z[:, None])) * inverse[:, None]) * tl.dot(do, v.T)
    if MASKED:
        terms = tl.where(_seen(rows, tile), terms, 0.0)
    return classes + class_sums(terms, M, N)


@triton.jit(do_not_specialize=["per_item", "decode"])
def qat_row_values(
    arrays,
    sizes,
    plan,
    per_item,
    k_tiles,
    v_tiles,
    c,
    decode,
    dout,
    dout_batch,
    dout_head,
    dout_row,
    out,
    out_batch,
    out_head,
    out_row,
    lse,
    row_max,
    row_total,
    dlse,
    maxima,
    inverses,
    decoders,
    deltas,
    origins,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    HIGH: tl.constexpr,
    PACKED: tl.constexpr,
    GARBAGE: tl.constexpr,
):
    """The values of rows that the backward reads: n (+inf where dead), 1 / l, dec / l, delta and ``exponent_origin``.

    HIGH: delta is the sum of P * dP; otherwise that of dO * out.
    """
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    at = row_values(arrays, sizes, item, rows)
    n = tl.load(row_max + at, mask=rows.present, other=NEGATIVE_INFINITY)
    total = tl.load(row_total + at, mask=rows.present, other=0.0)
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    inverse = tl.where(empty, 0.0, tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), divisor))
    decoder = tl.where(empty, 0.0, tl.div_rn(tl.full((ROWS,), decode, tl.float32), divisor))
    z = tl.where(n == NEGATIVE_INFINITY, INFINITY, n)
    do = row_block(dout, dout_batch, dout_head, dout_row, item, rows, D)
    if HIGH:
        _, begin, full_end, end = key_tiles(rows, tl.full([], 0, tl.int32), N)
        q = query_block(arrays, item, rows, D)
        classes = tl.zeros((ROWS, CLASSES), tl.float32)
        for tile in tl.range(begin, full_end, num_stages=STAGES):
            classes = _delta_tile(q, do, k_tiles, v_tiles, item, kv_head, rows, tile, z, inverse, classes, c, ROWS, D, False, PACKED, False)
        for tile in tl.range(full_end, end, num_stages=STAGES):
            classes = _delta_tile(
                q, do, k_tiles, v_tiles, item, kv_head, rows, tile, z, inverse, classes, c, ROWS, D, True, PACKED, GARBAGE
            )
        delta = row_sum(classes, ROWS)
    else:
        o = row_block(out, out_batch, out_head, out_row, item, rows, D)
        delta = tree_sum(do.to(tl.float32) * o.to(tl.float32), ROWS, D)
    if dlse is not None:
        delta = delta - tl.load(dlse + at, mask=rows.present, other=0.0)
    origin = exponent_origin(lse, at, rows.present)
    into = line_of(sizes, item, rows.head, PACKED) + rows.query
    tl.store(maxima + into, z, mask=rows.present)
    tl.store(inverses + into, inverse, mask=rows.present)
    tl.store(decoders + into, decoder, mask=rows.present)
    tl.store(deltas + into, delta, mask=rows.present)
    tl.store(origins + into, origin, mask=rows.present)


@device_function
def _query_tile(
    q, do, k_tiles, b_tiles, v_tiles, item, kv_head, rows, tile, z, inverse, delta, acc, c, M: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, SAME: tl.constexpr, PACKED: tl.constexpr, GARBAGE: tl.constexpr
):  # fmt: skip
    """The sum for dq after one more key tile: a product of its own, then one rounded addition."""
    k = key_block(k_tiles, item, kv_head, tile * N, N, D, PACKED, GARBAGE)
    s = tl.dot(q, k.T)
    v = key_block(v_tiles, item, kv_head, tile * N, N, D, PACKED, False)
    dp = tl.dot(do, v.T)
    ds = (ex2(tl.fma(s, c, -z[:, None])) * inverse[:, None]) * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(_seen(rows, tile), ds, 0.0)
    if SAME:
        b = k
    else:
        b = key_block(b_tiles, item, kv_head, tile * N, N, D, PACKED, GARBAGE)
    return add_rn(acc, tl.dot(ds.to(b.dtype), b))


@triton.jit(do_not_specialize=["per_item"])
def qat_query_gradients(
    arrays,
    sizes,
    plan,
    per_item,
    k_tiles,
    b_tiles,
    v_tiles,
    c,
    dout,
    dout_batch,
    dout_head,
    dout_row,
    maxima,
    inverses,
    deltas,
    dq,
    dq_batch,
    dq_head,
    dq_row,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    SAME: tl.constexpr,
    PACKED: tl.constexpr,
    GARBAGE: tl.constexpr,
):
    """dq of a block of rows: key tiles ascending. ``b_tiles`` are the keys of the product with dS; SAME: those of the scores."""
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), True)
    if block < 0:
        return
    rows = rows_at(arrays, sizes, item, kv_head, block * ROWS, ROWS)
    _, begin, full_end, end = key_tiles(rows, tl.full([], 0, tl.int32), N)
    at = line_of(sizes, item, rows.head, PACKED) + rows.query
    z = tl.load(maxima + at, mask=rows.present, other=INFINITY)
    inverse = tl.load(inverses + at, mask=rows.present, other=0.0)
    delta = tl.load(deltas + at, mask=rows.present, other=0.0)
    q = query_block(arrays, item, rows, D)
    do = row_block(dout, dout_batch, dout_head, dout_row, item, rows, D)
    acc = tl.zeros((ROWS, D), tl.float32)
    for tile in tl.range(begin, full_end, num_stages=STAGES):
        acc = _query_tile(
            q, do, k_tiles, b_tiles, v_tiles, item, kv_head, rows, tile, z, inverse, delta, acc, c, ROWS, D, False, SAME, PACKED, False
        )
    for tile in tl.range(full_end, end, num_stages=STAGES):
        acc = _query_tile(
            q, do, k_tiles, b_tiles, v_tiles, item, kv_head, rows, tile, z, inverse, delta, acc, c, ROWS, D, True, SAME, PACKED, GARBAGE
        )
    rows = rows_at(arrays, sizes, item, kv_head, again(block, True) * ROWS, ROWS)
    store_block(dq, dq_batch, dq_head, dq_row, item, rows, acc * sizes.scale, D)


@triton.jit(do_not_specialize=["per_item", "encode", "decode"])
def qat_key_gradients(
    arrays,
    sizes,
    plan,
    per_item,
    q_tiles,
    b_tiles,
    dout_tiles,
    b,
    c,
    encode,
    decode,
    dout,
    dout_head,
    dout_row,
    maxima,
    inverses,
    decoders,
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
    QUANTIZE: tl.constexpr,
    SAME: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dk and dv of KEYS keys: query heads of the group ascending and, within a head, queries ascending, ROWS at a time.

    ``b`` (contiguous like q; SAME: it is q) are the queries of the product with dS. MASKED: some query may see a part of the keys.
    """
    sizes = sizes_of(sizes)
    item, kv_head, block = find_block(arrays, sizes, plan, per_item, tl.program_id(0), False)
    if block < 0:
        return
    first_key = (block * KEYS).to(tl.int32)
    key = first_key + tl.arange(0, KEYS)
    k = own_keys(arrays.k, arrays.k_batch, arrays.k_head, arrays.k_row, arrays.k_column, item, kv_head, key, D)
    v = own_keys(arrays.v, arrays.v_batch, arrays.v_head, arrays.v_row, arrays.v_column, item, kv_head, key, D)
    last_key, begin, full_begin, below = first_seeing(sizes, item, first_key, KEYS)
    end = tl.where(last_key < first_key, begin, item.queries.to(tl.int64))
    partial = first_key + KEYS > item.keys
    low, high = begin.to(tl.int32) // ROWS, (end.to(tl.int32) + ROWS - 1) // ROWS
    scale_up, scale_down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
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
            e = ex2(tl.fma(s, c, -tl.load(maxima + line + query)[None, :]))
            if MASKED and first < full_begin:
                e = tl.where(tl.arange(0, KEYS)[:, None] - query[None, :] <= below, e, 0.0)
            if partial:
                e = tl.where((key < item.keys)[:, None], e, 0.0)
            w = e
            if QUANTIZE:
                w = p_along_rows(e, scale_up, scale_down)
            else:
                w = e.to(q.dtype).to(tl.float32)
            w = w * tl.load(decoders + line + query)[None, :]
            if QUANTIZE and MASKED and first < full_begin:
                w = tl.where(tl.arange(0, KEYS)[:, None] - query[None, :] <= below, w, 0.0)
            do = queries_of_head(dout_tiles, dout, dout_head, dout_row, item, head, first, present, ROWS, D, PACKED)
            dv_sum = tl.dot(w.to(do.dtype), do, dv_sum)
            dp = tl.dot(v, do.T)
            p = e * tl.load(inverses + line + query)[None, :]
            ds = p * (dp - tl.load(deltas + line + query)[None, :])
            right = q
            if not SAME:
                right = queries_of_head(b_tiles, b, arrays.q_head, arrays.q_row, item, head, first, present, ROWS, D, PACKED)
            dk_sum = tl.dot(ds.to(q.dtype), right, dk_sum)
    key = (again(block, True) * KEYS).to(tl.int32) + tl.arange(0, KEYS)
    store_keys(dk, d_batch, d_head, d_row, item, kv_head, key, dk_sum * sizes.scale, D)
    store_keys(dv, d_batch, d_head, d_row, item, kv_head, key, dv_sum, D)
