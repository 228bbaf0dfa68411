"""The products of joint attention, forward and backward: one FMA chain for each output, scaled after the sum.

Rows of a kv head are the queries of its heads, one head after the other: row r is query ``r % count`` of head ``r // count`` of the
group, so "head in its group, then query" is the order of rows. They are outputs, or with DEPTH_IS_ROWS the index of the chains.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_triton._chain_kernel import chain, widened
from attn_triton._device_function import device_function
from attn_triton._softmax_kernel import _store

__all__ = ["Operand", "product"]


class Operand(NamedTuple):
    """A tensor [batch, kv head, rows, columns] by strides in elements; a head has ``count`` rows, heads of a group are ``head`` apart."""

    data: Any
    batch: int
    kv_head: int
    head: int
    row: int
    column: int
    count: int


@device_function
def _of_rows(operand, index, GROUPED: tl.constexpr):
    """Offsets of rows; int64."""
    offset = index * operand.row
    if GROUPED:
        head = index // operand.count
        offset = head * operand.head + (index - head * operand.count) * operand.row
    return offset


@device_function
def _left(a, base, m, k, m_total, depth, DEPTH_IS_ROWS: tl.constexpr, BY_ROWS: tl.constexpr, GROUPED: tl.constexpr, DOT: tl.constexpr):
    """Block [M, K] of the left operand as float32, 0 outside it; read row by row, or column by column and turned."""
    if BY_ROWS:
        at = _of_rows(a, m, GROUPED)[:, None] + (k * a.column)[None, :]
        block = widened(tl.load(a.data + base + at, mask=(m < m_total)[:, None] & (k < depth)[None, :], other=0.0), DOT)
    else:
        if DEPTH_IS_ROWS:
            at = _of_rows(a, k, GROUPED)[:, None] + (m * a.column)[None, :]
        else:
            at = (k * a.column)[:, None] + _of_rows(a, m, GROUPED)[None, :]
        # Turned before it is widened: only so does a block of halves go to shared memory as it is.
        block = widened(tl.trans(tl.load(a.data + base + at, mask=(k < depth)[:, None] & (m < m_total)[None, :], other=0.0)), DOT)
    return block


@device_function
def _right(b, base, k, n, depth, n_total, GROUPED: tl.constexpr, DOT: tl.constexpr):
    """Block [K, N] of the right operand as float32, 0 outside it."""
    at = _of_rows(b, k, GROUPED)[:, None] + (n * b.column)[None, :]
    return widened(tl.load(b.data + base + at, mask=(k < depth)[:, None] & (n < n_total)[None, :], other=0.0), DOT)


@triton.jit(do_not_specialize=["kv_heads"])
def product(
    a,
    b,
    out,
    kv_heads,
    m_total,
    n_total,
    depth,
    scale,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH_IS_ROWS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    DOT: tl.constexpr,
    INTEGER_ROUNDING: tl.constexpr,
):
    """One block [M, N] of ``out`` [batch, kv head, m_total, n_total], contiguous.

    Both operands of a step are read where they are used: the compiler then copies them to shared memory ahead, behind one barrier for the
    two. Blocks that wait in registers for their step are stored one after the other, each between two barriers, and the first one fills
    the registers meanwhile (3,000 bytes of spills).
    """
    n_blocks = (n_total + (N - 1)) // N
    m_blocks = (m_total + (M - 1)) // M
    program = tl.program_id(0).to(tl.int64)
    outer = program // n_blocks
    n_block = program - outer * n_blocks
    item = outer // m_blocks
    m = (outer - item * m_blocks) * M + tl.arange(0, M)
    n = n_block * N + tl.arange(0, N)
    batch = item // kv_heads
    kv_head = item - batch * kv_heads
    a_base = batch * a.batch + kv_head * a.kv_head
    b_base = batch * b.batch + kv_head * b.kv_head
    k = tl.arange(0, CHUNK).to(tl.int64)
    acc = tl.full([M, N], 0, tl.float32)
    for first in range(0, depth, CHUNK):
        left = _left(a, a_base, m, first + k, m_total, depth, DEPTH_IS_ROWS, BY_ROWS, GROUPED, DOT)
        right = _right(b, b_base, first + k, n, depth, n_total, DEPTH_IS_ROWS and GROUPED, DOT)
        acc = chain(acc, left, right, DOT)
    at = (item * m_total + m)[:, None] * n_total + n[None, :]
    _store(out + at, acc * scale + 0.0, (m < m_total)[:, None] & (n < n_total)[None, :], INTEGER_ROUNDING)
