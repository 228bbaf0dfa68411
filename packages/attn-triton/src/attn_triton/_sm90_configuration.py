"""How the kernels of contract sm90-v1 are launched, as data. No field moves a bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CONFIGS", "HEAD_DIMS", "Sm90Config", "TileConfig"]

HEAD_DIMS = (64, 128, 256)
"""Head dims of q, k and v."""


@dataclass(frozen=True)
class TileConfig:
    """A program owns ``owners`` rows or keys; the other side streams by, ``others`` at a time (key tiles: 128), in ``stages`` buffers."""

    owners: int
    num_warps: int
    stages: int
    others: int = 128

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options; the contract rounds every product that it does not state as an FMA."""
        return {"num_warps": self.num_warps, "num_stages": self.stages, "enable_fp_fusion": False}


@dataclass(frozen=True)
class Sm90Config:
    """For one head dim. ``segments`` and ``merge`` are the two kernels of few rows (decode), whose segments are programs of their own."""

    forward: TileConfig
    segments: TileConfig
    merge: TileConfig
    delta: TileConfig
    queries: TileConfig
    keys: TileConfig


CONFIGS = {
    64: Sm90Config(
        forward=TileConfig(64, 4, 3),
        segments=TileConfig(16, 4, 2),
        merge=TileConfig(1, 2, 4),
        delta=TileConfig(64, 4, 1),
        queries=TileConfig(64, 4, 3),
        keys=TileConfig(64, 4, 2, others=64),
    ),
    128: Sm90Config(
        forward=TileConfig(64, 4, 1),
        segments=TileConfig(16, 4, 2),
        merge=TileConfig(1, 4, 4),
        delta=TileConfig(64, 4, 1),
        queries=TileConfig(128, 8, 2),
        keys=TileConfig(64, 4, 2, others=64),
    ),
    256: Sm90Config(
        forward=TileConfig(64, 8, 2),
        segments=TileConfig(16, 4, 2),
        merge=TileConfig(1, 4, 4),
        delta=TileConfig(32, 4, 1),
        queries=TileConfig(64, 8, 2),
        keys=TileConfig(64, 8, 1, others=64),
    ),
}
"""By head dim, the quickest of those tried on one H200 (Triton 3.6, 2026-11-30). Two or three programs of 64 rows share a processor, so
that its tensor cores have work while one of them takes exponentials. dq of 256 has two stages: with one, Triton 3.6 spills."""
