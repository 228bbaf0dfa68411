"""FMA chains of contract ordered-v1 on blocks in registers: one accumulator for each output, the index ascending, never split.

On NVIDIA a chain is ``tl.dot`` with the accumulator passed in and IEEE precision, which compiles to FFMA instructions, k ascending.
Elsewhere it is a loop of ``tl.fma``: AMD's matrix instructions have another order. The interpreter runs ``_interpreted_chain``.
Operands of 16 bits are ``widened`` first.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton.language as tl

from attn_triton import _interpreted_chain
from attn_triton._device_function import device_function
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["chain", "chain_of_terms", "read_rows", "row_products", "spoils", "weighted_chain", "widened"]


COMPILED = tl.constexpr(not INTERPRETED)


@device_function
def _column(x, index):
    """Column ``index`` of x [M, K]: a sum with one term, which is exact; -0 becomes +0, as a zero product may."""
    return tl.sum(tl.where(tl.arange(0, x.shape[1])[None, :] == index, x, 0.0), axis=1)


@device_function
def _row(x, index):
    """Row ``index`` of x [K, N]."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == index, x, 0.0), axis=0)


@device_function
def widened(x, DOT: tl.constexpr):
    """x as float32, exactly, in a form of which ``tl.dot`` makes a chain.

    For sm_100 Triton 3.6 follows an operand through every operation without effects, back to its loads, and where one reads fewer than 32
    bits the dot becomes a tcgen05 product of tf32 numbers, whatever its input precision says (``computeOrigBitWidth`` in its
    lib/Dialect/TritonGPU/Transforms/AccelerateMatmul.cpp; 3.9 does not). A move that claims to have effects ends the search. The conversion
    still goes past it, so halves wait in shared memory as they are, and ptxas drops the move.
    """
    wide = x.to(tl.float32)
    if DOT and COMPILED and x.dtype != tl.float32:
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=tl.float32, is_pure=False, pack=1)
    return wide


@device_function
def chain(acc, a, b, DOT: tl.constexpr):
    """``acc[m, n] = FMA(a[m, k], b[k, n], acc[m, n])`` for k ascending; float32 acc [M, N], a [M, K], b [K, N]."""
    if DOT:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        for k in range(a.shape[1]):
            acc = tl.fma(tl.broadcast_to(_column(a, k)[:, None], acc.shape), tl.broadcast_to(_row(b, k)[None, :], acc.shape), acc)
    return acc


@device_function
def chain_of_terms(acc, a, b, masked):
    """``chain`` without the terms of masked pairs [M, K], whatever a and b hold there."""
    for k in range(a.shape[1]):
        following = tl.fma(tl.broadcast_to(_column(a, k)[:, None], acc.shape), tl.broadcast_to(_row(b, k)[None, :], acc.shape), acc)
        left_out = tl.sum(tl.where(tl.arange(0, a.shape[1])[None, :] == k, masked.to(tl.int32), 0), axis=1) != 0
        acc = tl.where(left_out[:, None], acc, following)
    return acc


if INTERPRETED:
    chain = _interpreted_chain.chain
    chain_of_terms = _interpreted_chain.chain_of_terms


@device_function
def _columns(a, rows, present, stride, first, depth, CHUNK: tl.constexpr):
    """Columns [first, first + CHUNK) of rows of a, [CHUNK, M], 0 where there is none."""
    column = first + tl.arange(0, CHUNK)
    at = (a + rows)[None, :] + (column.to(tl.int64) * stride)[:, None]
    return tl.load(at, mask=(column < depth)[:, None] & present[None, :], other=0.0)


@device_function
def row_products(
    a,
    a_rows,
    a_present,
    a_column,
    b,
    b_rows,
    b_present,
    b_column,
    depth,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """float32 [M, N]: for each row of a and each row of b the chain over their ``depth`` columns.

    ``a_rows`` [M] and ``b_rows`` [N] are int64 element offsets of the rows, ``a_column`` and ``b_column`` the column strides. An absent row
    is read as zeros. Columns are read CHUNK at a time, straight from memory; with DOT, those of 16 bits
    one step ahead of their use (wider ones would not fit the registers).
    """
    acc = tl.full([M, N], 0.0, tl.float32)
    AHEAD: tl.constexpr = DOT and a.dtype.element_ty != tl.float32
    if AHEAD:
        left = _columns(a, a_rows, a_present, a_column, 0, depth, CHUNK)
        right = _columns(b, b_rows, b_present, b_column, 0, depth, CHUNK)
        for first in range(0, depth, CHUNK):
            left_now = widened(left, DOT)
            right_now = widened(right, DOT)
            left = _columns(a, a_rows, a_present, a_column, first + CHUNK, depth, CHUNK)
            right = _columns(b, b_rows, b_present, b_column, first + CHUNK, depth, CHUNK)
            acc = chain(acc, tl.trans(left_now), right_now, DOT)
    else:
        for first in range(0, depth, CHUNK):
            left_now = widened(_columns(a, a_rows, a_present, a_column, first, depth, CHUNK), DOT)
            right_now = widened(_columns(b, b_rows, b_present, b_column, first, depth, CHUNK), DOT)
            acc = chain(acc, tl.trans(left_now), right_now, DOT)
    return acc


@device_function
def read_rows(b, b_rows, b_present, b_column, width, C: tl.constexpr, DOT: tl.constexpr = False):
    """Rows of b as float32 [N, C], 0 where there is none: int64 element offsets ``b_rows`` [N], and ``width`` <= C columns.

    DOT is that of the chain which they enter.
    """
    column = tl.arange(0, C)
    at = (b + b_rows)[:, None] + (column.to(tl.int64) * b_column)[None, :]
    return widened(tl.load(at, mask=b_present[:, None] & (column < width)[None, :], other=0.0), DOT)


@device_function
def weighted_chain(acc, weights, masked, b, SELECT: tl.constexpr, DOT: tl.constexpr):
    """acc [M, C] after the chain over the N rows of b [N, C] with weights [M, N], which are 0 where ``masked`` [M, N].

    Without SELECT a masked pair has a zero product, which is no term as long as b is finite there; else it leaves a NaN. With SELECT it
    has no term at all. Read b before computing the weights: both then wait in shared memory for one barrier, and no compiler holds all of
    the weights in registers.
    """
    if SELECT:
        acc = chain_of_terms(acc, weights, b, masked)
    else:
        acc = chain(acc, weights, b, DOT)
    return acc


@device_function
def spoils(acc):
    """1 when an accumulator is NaN, which may come from the zero product of a masked pair with an infinity or a NaN; else 0."""
    return tl.max(tl.max((acc != acc).to(tl.int32), axis=1), axis=0)
