"""Final scores and probabilities of a block of rows against keys of consecutive slots, and the tile tree over quarters of a tile.

A tile of 256 slots is four quarters of 64, so that the upper two levels of the halves tree meet as whole blocks, element by element.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton.language as tl

from attn_triton._chain_kernel import row_products
from attn_triton._device_function import device_function
from attn_triton._softmax_kernel import exp_nonpositive
from attn_triton._visibility_kernel import visible

__all__ = ["QUARTER", "final_scores", "key_rows", "probabilities", "query_rows", "row_values", "scores_of", "tree_max", "tree_sum"]

QUARTER = tl.constexpr(64)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@device_function
def query_rows(item, rows, batch_stride, head_stride, row_stride):
    """int64 element offsets [M] of the block's rows in a tensor laid out like q."""
    return item.batch * batch_stride + rows.head * head_stride + (item.first_query + rows.query) * row_stride


@device_function
def key_rows(item, kv_head, keys, batch_stride, head_stride, row_stride):
    """int64 element offsets [N] of keys in a tensor laid out like k."""
    return item.batch * batch_stride + kv_head * head_stride + (item.first_key + keys.stored) * row_stride


@device_function
def row_values(arrays, sizes, item, rows):
    """Offsets [M] of the block's rows in LSE, row maximum and row sum: [B, H, S], packed [H, total]."""
    heads = sizes.kv_heads.to(tl.int64) * sizes.group
    line = rows.head
    if arrays.cu_seqlens_q is None:
        line = item.batch * heads + rows.head
    return line * sizes.queries + item.first_query + rows.query


@device_function
def final_scores(products, arrays, sizes, item, rows, keys, ROWS_FIRST: tl.constexpr):
    """Scores after scale and bias, -inf where the pair is masked; products and result [M, N], or [N, M] when not ROWS_FIRST."""
    x = products * sizes.scale
    seen = visible(rows, keys, ROWS_FIRST)
    if arrays.bias is not None:
        row = item.batch * arrays.bias_batch + rows.head * arrays.bias_head + rows.query * arrays.bias_query
        key = keys.stored.to(tl.int64) * arrays.bias_key
        if ROWS_FIRST:
            at = row[:, None] + key[None, :]
        else:
            at = row[None, :] + key[:, None]
        x = x + tl.load(arrays.bias + at, mask=seen, other=0.0)
    return tl.where(seen, x, NEGATIVE_INFINITY)


@device_function
def scores_of(arrays, sizes, item, kv_head, rows, keys, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr):
    """Final scores [M, N] of the block's rows against keys."""
    q_rows = query_rows(item, rows, arrays.q_batch, arrays.q_head, arrays.q_row)
    k_rows = key_rows(item, kv_head, keys, arrays.k_batch, arrays.k_head, arrays.k_row)
    products = row_products(
        arrays.q, q_rows, rows.present, arrays.q_column, arrays.k, k_rows, keys.present, arrays.k_column, arrays.head_dim, M, N, CHUNK, DOT
    )
    return final_scores(products, arrays, sizes, item, rows, keys, True)


@device_function
def probabilities(x, row_max, row_sum):
    """P of final scores x [..., M rows broadcast]: +0 where masked (-inf). ``row_max`` and ``row_sum`` broadcast against x."""
    masked = x == NEGATIVE_INFINITY
    offset = tl.where(row_max == NEGATIVE_INFINITY, 0.0, row_max)
    # A selection of the quotient would become a branch around every division.
    divisor = tl.where(masked, 1.0, tl.broadcast_to(row_sum, x.shape))
    return tl.div_rn(tl.where(masked, 0.0, exp_nonpositive(x - offset)), divisor)


@device_function
def tree_sum(x, LEVELS: tl.constexpr = 6):
    """[M, 2^LEVELS] -> [M], the lower levels of the halves tree. Every sum has two terms, so no compiler can choose an order."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@device_function
def tree_max(x):
    """[M, N] -> [M], NaN if any is. A maximum does not depend on its order: integers that order like the numbers, NaN on top."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.max(tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)), axis=1)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
