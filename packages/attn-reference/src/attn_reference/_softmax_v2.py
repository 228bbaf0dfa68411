"""``joint_attn_softmax`` of ``ordered-v2``: one exponential an element, taken from the maximum of its tile."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_reference._fma import fma
from attn_reference._rounding import stored
from attn_reference._row import RowState
from attn_reference._softmax import row_groups
from attn_reference._tile import TileLayout, add, maximum, tree

__all__ = ["TILE", "exp", "softmax_backward", "softmax_forward"]

TILE = 1024


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


_LEAST = _float(0xC2ADFADD)
_LOG2_E, _ROUND = _float(0x3FB8AA3B), _float(0x4B400000)
_LN2_HIGH, _LN2_LOW = _float(0x3F317218), _float(0xB102E308)
_FIRST = _float(0x3AB51226)
_REST = tuple(_float(bits) for bits in (0x3C091CEA, 0x3D2AAC79, 0x3E2AAA49, 0x3EFFFFFE, 0x3F800000, 0x3F800000))


def exp(x: Tensor) -> Tensor:
    """exp(x) for float32 x <= 0 or NaN: at most 0.9 ulp off, never above 1, +0 where it would lie below 2^-125.5."""
    none = x < _LEAST
    argument = torch.where(none | torch.isnan(x), 0.0, x)
    rounded = fma(argument, _constant(argument, _LOG2_E), _constant(argument, _ROUND))
    n = rounded - _ROUND
    r = fma(n, _constant(n, -_LN2_LOW), fma(n, _constant(n, -_LN2_HIGH), argument))
    p = _constant(r, _FIRST)
    for coefficient in _REST:
        p = fma(p, r, _constant(r, coefficient))
    # The result is a normal number, so adding n to the exponent is exact.
    result = (p.expand_as(n).contiguous().view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)
    return torch.where(torch.isnan(x), x, torch.where(none, 0.0, result))


def _constant(like: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


class _State(RowState):
    """The row state of ``ordered-v1`` with this contract's exp."""

    @staticmethod
    def exponential(x: Tensor) -> Tensor:
        return exp(x)


@dataclass(frozen=True)
class _Tiles:
    """Rows in tiles. ``masked`` bool and ``exponentials`` float32 are [R, tiles, TILE], maximum and sum of each tile [R, tiles]."""

    masked: Tensor
    exponentials: Tensor
    max: Tensor
    sum: Tensor

    @classmethod
    def of(cls, scores: Tensor, layout: TileLayout) -> _Tiles:
        tiles = layout.cut(scores, -torch.inf)
        masked = tiles == -torch.inf
        top = tree(maximum, tiles)
        exponentials = torch.where(masked, 0.0, exp(tiles - top.unsqueeze(-1)))
        return cls(masked, exponentials, top, tree(add, exponentials))

    def state(self) -> RowState:
        """Live tiles merged left to right."""
        rows = self.max.shape[:-1]
        state: RowState = _State(self.max.new_full(rows, -torch.inf), self.max.new_zeros(rows))
        for index in range(self.max.shape[-1]):
            state = state.merge(_State(self.max[..., index], self.sum[..., index]))
        return state

    def probabilities(self, state: RowState) -> Tensor:
        """P in tiles: one factor for each tile, ``RN(exp(RN(m_t - m)) / s)``."""
        factor = exp(self.max - state.max.unsqueeze(-1)) / state.sum.unsqueeze(-1)
        return torch.where(self.masked, 0.0, self.exponentials * factor.unsqueeze(-1))


def softmax_forward(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scores [..., T], mask bool [B, T] or None -> probs of ``out_dtype``, row maximum and row sum (float32, scores.shape[:-1])."""
    rows = scores.reshape(-1, scores.shape[-1])
    probs = rows.new_empty(rows.shape, dtype=out_dtype)
    row_max, row_sum = (rows.new_empty(rows.shape[:1], dtype=torch.float32) for _ in range(2))
    for block, layout, _ in row_groups(scores, mask, TILE):
        tiles = _Tiles.of(rows[block].float(), layout)
        state = tiles.state()
        probs[block] = stored(layout.join(tiles.probabilities(state), rows.shape[-1]), out_dtype)
        row_max[block], row_sum[block] = state.max, state.sum
    return probs.reshape(scores.shape), row_max.reshape(scores.shape[:-1]), row_sum.reshape(scores.shape[:-1])


def softmax_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """dprobs [..., T] of any float dtype -> dscores in the dtype of scores."""
    rows, upstream = scores.reshape(-1, scores.shape[-1]), dprobs.reshape(-1, scores.shape[-1])
    gradient = torch.empty(rows.shape, dtype=scores.dtype, device=scores.device)
    top, total = row_max.reshape(-1), row_sum.reshape(-1)
    for block, layout, _ in row_groups(scores, mask, TILE):
        tiles = _Tiles.of(rows[block].float(), layout)
        probs, dp = tiles.probabilities(_State(top[block], total[block])), layout.cut(upstream[block].float(), 0.0)
        sums = tree(add, torch.where(tiles.masked, 0.0, probs * dp))
        # From +0 over every tile: a dead one adds +0, and the sign of a zero delta cannot reach dX, whose zeros are stored as +0.
        delta = torch.zeros_like(top[block])
        for index in range(sums.shape[-1]):
            delta = delta + sums[..., index]
        found = torch.where(tiles.masked, 0.0, probs * (dp - delta[:, None, None]))
        gradient[block] = stored(layout.join(found, rows.shape[-1]), scores.dtype)
    return gradient.reshape(scores.shape)
