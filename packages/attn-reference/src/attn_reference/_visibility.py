"""Which pairs of a segment are visible, from positions, lengths and masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Positions", "visible_pairs"]

_INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True)
class Positions:
    """Positions of one batch item or packed segment.

    Query i is at ``q_start + i``, stored key j at ``k_start + j``; keys from ``used_keys`` on are unused.
    """

    queries: int
    keys: int
    used_keys: int
    q_start: int
    k_start: int

    def __post_init__(self) -> None:
        for name, start, count in (("q_start", self.q_start, self.queries), ("k_start", self.k_start, self.keys)):
            for position in (start, start + count - 1) if count else ():
                if position not in _INT32:
                    raise ValueError(f"attention: {name}={start} with {count} rows leaves the 32-bit range of positions")
        if self.k_start < 0:
            raise ValueError(f"attention: k_start must be 0 or more; got {self.k_start}")


def visible_pairs(
    positions: Positions, device: torch.device, *, causal: bool, left: int, right: int, query_mask: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    """bool [S, T]: True where query i sees stored key j.

    ``left`` and ``right`` are the window besides the diagonal, -1 for no bound; ``query_mask`` [S] and ``key_mask`` [T] are True for
    rows and keys in use.
    """
    stored = torch.arange(positions.keys, device=device)
    query = (positions.q_start + torch.arange(positions.queries, device=device)).unsqueeze(-1)
    key = positions.k_start + stored
    visible = (stored < positions.used_keys).expand(positions.queries, -1)
    if key_mask is not None:
        visible = visible & key_mask
    if query_mask is not None:
        visible = visible & query_mask.unsqueeze(-1)
    if causal:
        visible = visible & (key <= query)
    if left >= 0:
        visible = visible & (key >= query - left)
    if right >= 0:
        visible = visible & (key <= query + right)
    return visible
