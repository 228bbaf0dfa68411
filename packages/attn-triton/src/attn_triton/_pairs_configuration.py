"""Configurations of the kernels on pairs in memory, by device. No field moves a bit."""

from __future__ import annotations

from dataclasses import dataclass

from attn_triton._configuration import Config

__all__ = ["CONFIGS", "FEW_CONFIGS", "PairConfigs"]


@dataclass(frozen=True)
class PairConfigs:
    """How the kernels are launched. No field moves a bit.

    ``products`` has blocks of ``rows`` rows and ``keys`` slots; ``elements`` are the kernels that go over the lines, ``rows`` at a time,
    with at least ``programs`` programs. A step of the chains over keys has ``row_sums.keys`` keys, one of the chains over rows
    ``key_sums.rows`` rows, with ``columns`` columns each.
    """

    products: Config
    elements: Config
    row_sums: Config
    row_select: Config
    key_sums: Config
    key_select: Config
    columns: int
    programs: int = 1


CONFIGS = {
    "cuda": PairConfigs(
        products=Config(rows=128, num_warps=8, keys=128, chunk=16, num_stages=2),
        elements=Config(rows=4, num_warps=4),
        row_sums=Config(rows=128, num_warps=4, keys=16, num_stages=2),
        row_select=Config(rows=128, num_warps=8, keys=16),
        key_sums=Config(rows=16, num_warps=4, keys=128, num_stages=2),
        key_select=Config(rows=16, num_warps=8, keys=128),
        columns=64,
    ),
    "rocm": PairConfigs(
        products=Config(rows=32, num_warps=4, keys=64, chunk=16),
        elements=Config(rows=4, num_warps=4),
        row_sums=Config(rows=32, num_warps=4, keys=32),
        row_select=Config(rows=32, num_warps=4, keys=16),
        key_sums=Config(rows=32, num_warps=4, keys=32),
        key_select=Config(rows=16, num_warps=4, keys=32),
        columns=128,
    ),
    "cpu": PairConfigs(
        products=Config(rows=128, num_warps=1, keys=256, chunk=128),
        elements=Config(rows=128, num_warps=1),
        row_sums=Config(rows=128, num_warps=1, keys=256),
        row_select=Config(rows=128, num_warps=1, keys=256),
        key_sums=Config(rows=128, num_warps=1, keys=256),
        key_select=Config(rows=128, num_warps=1, keys=256),
        columns=256,
    ),
}
"""By device, for many rows."""


def _few(rows: int, columns: int) -> PairConfigs:
    sums = Config(rows=rows, num_warps=max(1, rows // 4), keys=64, num_stages=3)
    return PairConfigs(
        products=Config(rows=rows, num_warps=4, chunk=16),
        elements=Config(rows=4, num_warps=4),
        row_sums=sums,
        row_select=Config(rows=rows, num_warps=max(1, rows // 4), keys=16),
        key_sums=CONFIGS["cuda"].key_sums,
        key_select=CONFIGS["cuda"].key_select,
        columns=columns,
        programs=1024,
    )


FEW_CONFIGS = {"cuda": {4: _few(4, 32), 16: _few(16, 32)}}
"""By device for few rows (decode), and by the rows of a block. A thread has four outputs: with the four FMAs of each key
its chain waits for nothing but the one before it."""
