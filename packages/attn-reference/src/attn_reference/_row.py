"""One softmax row of ``ordered-v1``, vectorised over rows: state, probabilities, log-sum-exp and the backward of a row.

Rows are float32 [..., T] with ``masked`` bool [..., T]; an unmasked score is never -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_reference._elementary import exp, ln
from attn_reference._tile import TileLayout, add, maximum, tree

__all__ = ["RowState", "row_delta", "row_state", "score_gradient"]


@dataclass(frozen=True)
class RowState:
    """Maximum and sum of exponentials of each row, float32 [...]; (-inf, 0) before the first live tile."""

    max: Tensor
    sum: Tensor

    @staticmethod
    def exponential(x: Tensor) -> Tensor:
        """exp of the contract, for arguments that are not positive."""
        return exp(x)

    @property
    def live(self) -> Tensor:
        return self.max != -torch.inf

    def merge(self, later: RowState) -> RowState:
        """Append a later state: a dead one changes nothing, the first live one is copied."""
        top = maximum(self.max, later.max)
        total = self.sum * self.exponential(self.max - top) + later.sum * self.exponential(later.max - top)
        return type(self)(
            torch.where(later.live, torch.where(self.live, top, later.max), self.max),
            torch.where(later.live, torch.where(self.live, total, later.sum), self.sum),
        )

    def probabilities(self, scores: Tensor, masked: Tensor) -> Tensor:
        """P of each pair; masked pairs are +0."""
        return torch.where(masked, 0.0, exp(scores - self.max.unsqueeze(-1)) / self.sum.unsqueeze(-1))

    def sink_probability(self, sink: Tensor) -> Tensor:
        """P of the sink of each row; +0 where there is none (-inf)."""
        return torch.where(sink == -torch.inf, 0.0, exp(sink - self.max) / self.sum)

    def log_sum_exp(self) -> Tensor:
        """``RN(m + ln s)``, -inf for a dead row."""
        return torch.where(self.live, self.max + ln(self.sum), -torch.inf) + 0.0


def row_state(scores: Tensor, masked: Tensor, layout: TileLayout, sink: Tensor | None = None) -> RowState:
    """State of each row: live tiles left to right, then the sink ([...], -inf: none)."""
    tiles = layout.cut(torch.where(masked, -torch.inf, scores), -torch.inf)
    tile_max = tree(maximum, tiles)
    exponentials = torch.where(tiles == -torch.inf, 0.0, exp(tiles - tile_max.unsqueeze(-1)))
    tile_sum = tree(add, exponentials)
    state = RowState(scores.new_full(scores.shape[:-1], -torch.inf), scores.new_zeros(scores.shape[:-1]))
    for index in range(tile_max.shape[-1]):
        state = state.merge(RowState(tile_max[..., index], tile_sum[..., index]))
    return state if sink is None else state.merge(RowState(sink, torch.ones_like(sink)))


def row_delta(probs: Tensor, dprobs: Tensor, masked: Tensor, layout: TileLayout, dlse: Tensor | None = None) -> Tensor:
    """Sum of P * dP of each row, minus the cotangent of its log-sum-exp.

    The first live tile's tree is copied, the later live ones are added in order.
    """
    tile_sum = tree(add, layout.cut(torch.where(masked, 0.0, probs * dprobs), 0.0))
    tile_live = layout.cut(~masked, False).any(dim=-1)
    delta = probs.new_zeros(probs.shape[:-1])
    begun = torch.zeros_like(delta, dtype=torch.bool)
    for index in range(tile_sum.shape[-1]):
        term, live = tile_sum[..., index], tile_live[..., index]
        delta = torch.where(live, torch.where(begun, delta + term, term), delta)
        begun = begun | live
    return delta if dlse is None else delta - dlse


def score_gradient(probs: Tensor, dprobs: Tensor, delta: Tensor, masked: Tensor) -> Tensor:
    """Gradient of each final score, +0 at masked pairs."""
    return torch.where(masked, 0.0, probs * (dprobs - delta.unsqueeze(-1))) + 0.0
