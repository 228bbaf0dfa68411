"""Tiles of slots over logical keys, and the halves tree that reduces one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TILE", "TileLayout", "add", "maximum", "tree"]

TILE = 256


@dataclass(frozen=True)
class TileLayout:
    """Where the keys of a row lie: ``keys`` int64 [L] are the stored indices of the logical keys, the first of them in slot ``first``."""

    keys: Tensor
    first: int
    tile: int = TILE

    @classmethod
    def of(cls, count: int, device: torch.device, *, kept: Tensor | None = None, k_start: int = 0, tile: int = TILE) -> TileLayout:
        """Layout of ``count`` stored keys of which ``kept`` (bool [T], None: all) remain, the first at position ``k_start``."""
        keys = torch.arange(count, device=device)
        return cls(keys if kept is None else keys[kept], k_start % tile, tile)

    def cut(self, row: Tensor, fill: float | bool) -> Tensor:
        """[..., T] to [..., tiles, tile]; slots without a key hold ``fill``."""
        length = self.keys.numel()
        tiles = -(-(self.first + length) // self.tile) if length else 0
        slots = row.new_full((*row.shape[:-1], tiles * self.tile), fill)
        slots[..., self.first : self.first + length] = row.index_select(-1, self.keys)
        return slots.reshape(*row.shape[:-1], tiles, self.tile)

    def join(self, tiles: Tensor, count: int) -> Tensor:
        """[..., tiles, tile] back to [..., count] stored keys; +0 at keys that are not logical ones."""
        row = tiles.new_zeros((*tiles.shape[:-2], count))
        row[..., self.keys] = tiles.flatten(-2)[..., self.first : self.first + self.keys.numel()]
        return row


def tree(combine: Callable[[Tensor, Tensor], Tensor], slots: Tensor) -> Tensor:
    """[..., tile] to [...]: slot i meets slot i + half for half = tile / 2, tile / 4, ..., 1."""
    while slots.shape[-1] > 1:
        half = slots.shape[-1] // 2
        slots = combine(slots[..., :half], slots[..., half:])
    return slots[..., 0]


def add(a: Tensor, b: Tensor) -> Tensor:
    """``RN(a + b)``."""
    return a + b


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Maximum that propagates NaN; of two zeros the second."""
    return torch.where(torch.isnan(a), a, torch.where(torch.isnan(b), b, torch.where(a > b, a, b)))
