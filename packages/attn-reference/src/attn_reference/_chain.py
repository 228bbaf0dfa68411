"""Sums in one stated order: FMA chains for products of matrices, rounded sums for reductions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_reference._fma import round_sum

__all__ = ["chain", "ordered_sum", "row_blocks"]

_CACHED_OUTPUTS = 1 << 15


def row_blocks(rows: int, row_elements: int, elements: int) -> Iterator[slice]:
    """Slices of ``range(rows)`` with at most ``elements`` elements, or one row; no bit depends on them."""
    step = max(1, elements // max(1, row_elements))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def chain(a: Tensor, b: Tensor, *, terms: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    """``acc = FMA(a[..., r, n], b[..., n, c], acc)`` for n ascending, for every output (r, c) at once.

    Args:
        a: float32 [..., R, N].
        b: float32 [..., N, C], the same leading axes.
        terms: bool [..., R, N]; an index without a term leaves its accumulators as they are, whatever a and b hold there. None: all.
        start: float32 [..., R, C], accumulators of an earlier part of the chain; None is +0.

    Returns:
        float32 [..., R, C].
    """
    outputs = (*a.shape[:-1], b.shape[-1])
    parts = []
    # Blocks of outputs stay in a CPU's cache: half the time of whole arrays for [7401, 16] x [16, 128] on one x86-64 core, the same bits.
    for block in row_blocks(a.shape[-2], math.prod(outputs) // max(1, a.shape[-2]), _CACHED_OUTPUTS):
        acc = b.new_zeros((*a.shape[:-2], block.stop - block.start, b.shape[-1])) if start is None else start[..., block, :]
        parts.append(_block(a[..., block, :], b, None if terms is None else terms[..., block, :], acc.double()))
    return torch.cat(parts, dim=-2) if parts else b.new_zeros(outputs)


def _block(a: Tensor, b: Tensor, terms: Tensor | None, acc: Tensor) -> Tensor:
    columns, rows = a.double().movedim(-1, 0).contiguous(), b.double().movedim(-2, 0).contiguous()
    if terms is None:
        for index in range(columns.shape[0]):
            acc = round_sum(columns[index].unsqueeze(-1) * rows[index].unsqueeze(-2), acc)
        return acc.float()
    kept = terms.movedim(-1, 0).contiguous()
    for index in kept.flatten(1).any(dim=1).nonzero().flatten().tolist():
        following = round_sum(columns[index].unsqueeze(-1) * rows[index].unsqueeze(-2), acc)
        acc = torch.where(kept[index].unsqueeze(-1), following, acc)
    return acc.float()


def ordered_sum(terms: Tensor, start: Tensor) -> Tensor:
    """``acc = RN(acc + term)`` over the axes on which ``start`` has size 1, ascending, the last of them fastest.

    ``terms`` is float32 of any shape, ``start`` float32 of the same rank with each axis equal or 1. Returns the shape of ``start``.
    """
    summed = [axis for axis in range(terms.ndim) if start.shape[axis] == 1]
    kept = [axis for axis in range(terms.ndim) if start.shape[axis] != 1]
    shape = [terms.shape[axis] for axis in kept]
    count = math.prod(terms.shape[axis] for axis in summed)
    acc = start.reshape(shape)
    for term in terms.permute(*summed, *kept).reshape(count, *shape):
        acc = acc + term
    return acc.reshape(start.shape)
