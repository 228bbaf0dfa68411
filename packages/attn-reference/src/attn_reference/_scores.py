"""Final scores of a block of rows, recomputed wherever they are needed.

The query heads of one kv head are laid one after the other: row ``g * S + i`` is query i of head g of the group. So the order "head in its
group, then query" is the order of rows, and H query heads become K groups of ``R = G * S`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_reference._chain import chain
from attn_reference._dropout import keep_scale, kept_pairs
from attn_reference._segment import Segment
from attn_reference._tile import TileLayout

__all__ = ["SCORE_BLOCK", "Grouped"]

SCORE_BLOCK = 1 << 20
"""Scores of a block of rows, so that memory stays bounded; no bit depends on it."""


@dataclass(frozen=True)
class Grouped:
    """A segment in float32 with its heads grouped."""

    segment: Segment

    @property
    def heads(self) -> int:
        return self.segment.query_rows(self.segment.inputs.q).shape[0]

    @property
    def kv_heads(self) -> int:
        return self.segment.key_rows(self.segment.inputs.k).shape[0]

    @property
    def rows(self) -> int:
        return self.heads // self.kv_heads * self.segment.positions.queries

    def grouped(self, tensor: Tensor) -> Tensor:
        """[H, S, ...] to float32 [K, R, ...]."""
        return tensor.float().reshape(self.kv_heads, self.rows, *tensor.shape[2:])

    def ungrouped(self, tensor: Tensor) -> Tensor:
        """[K, R, ...] to [H, S, ...]."""
        return tensor.reshape(self.heads, self.segment.positions.queries, *tensor.shape[2:])

    @cached_property
    def q(self) -> Tensor:
        return self.grouped(self.segment.query_rows(self.segment.inputs.q))

    @cached_property
    def k(self) -> Tensor:
        return self.segment.key_rows(self.segment.inputs.k).float()

    @cached_property
    def v(self) -> Tensor:
        return self.segment.key_rows(self.segment.inputs.v).float()

    @cached_property
    def scale(self) -> Tensor:
        return torch.tensor(self.segment.inputs.scale, dtype=torch.float32, device=self.k.device)

    @cached_property
    def layout(self) -> TileLayout:
        positions = self.segment.positions
        return TileLayout.of(positions.keys, self.k.device, kept=self.segment.kept_keys(), k_start=positions.k_start)

    @cached_property
    def sinks(self) -> Tensor | None:
        """The sink of each row, [K, R]."""
        sinks = self.segment.inputs.sinks
        return None if sinks is None else self.grouped(sinks.unsqueeze(-1).expand(-1, self.segment.positions.queries))

    @cached_property
    def _visible(self) -> Tensor:
        return self.segment.visible()

    def _head_and_query(self, block: slice) -> tuple[Tensor, Tensor]:
        """Query head [K, rows] and query [rows] of each row."""
        rows, queries = torch.arange(block.start, block.stop, device=self.k.device), self.segment.positions.queries
        first = torch.arange(0, self.heads, self.heads // self.kv_heads, device=self.k.device)
        return first.unsqueeze(-1) + torch.div(rows, queries, rounding_mode="floor"), rows % queries

    def scores(self, block: slice) -> tuple[Tensor, Tensor]:
        """Final scores [K, rows, T] and the mask of pairs that are not visible or whose score is -inf."""
        scores = chain(self.q[:, block], self.k.transpose(-1, -2)) * self.scale
        head, query = self._head_and_query(block)
        bias = self.segment.bias()
        if bias is not None:
            scores = scores + bias.expand(self.heads, *self._visible.shape)[head, query]
        return scores, (scores == -torch.inf) | ~self._visible[query]

    def dropout(self, block: slice) -> tuple[Tensor, Tensor] | None:
        """Kept pairs [K, rows, T] and the keep scale; None without dropout."""
        inputs = self.segment.inputs
        if inputs.dropout_seed is None:
            return None
        head, query = self._head_and_query(block)
        key = torch.arange(self.segment.positions.keys, device=self.k.device)
        kept = kept_pairs(inputs.dropout_p, inputs.dropout_seed, self.segment.index, head.unsqueeze(-1), query.unsqueeze(-1), key)
        return kept, keep_scale(inputs.dropout_p, self.k.device)
