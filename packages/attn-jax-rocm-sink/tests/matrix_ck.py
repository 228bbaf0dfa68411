"""The ck engine in the matrix: the cells that it refuses, and its dropout over the fake of AITER."""

from __future__ import annotations

import numpy as np
from matrix_cells import AXES, Axes, Cell

__all__ = ["RUNNING", "kept_pairs", "refusals", "runs"]

RUNNING: Axes = {
    **AXES,
    "bias": ("none", "1HSS", "B1SS", "BHSS", "11SS"),
    "dtype": ("bfloat16", "float16"),
    "repeated": ("twice",),
    "engine": ("ck",),
}
"""Values of the axes that some cell of the ck engine runs with."""


def refusals(cell: Cell) -> tuple[str, ...]:
    """What the reasons of a refusal say, one each; empty for the cells that run."""
    if cell.dtype == "float32":
        return ("dtype float32 (supported: bfloat16, float16)",)
    padded, bias = "padding" in cell.mask, cell.bias != "none"
    own_starts = cell.mask == "padding_bottom_right" and cell.layout != "attention"
    wide = cell.bias in ("pre_scale", "alibi") or (bias and cell.layout.startswith("thd"))
    found = {
        "q_start (supported: top-left and bottom-right alignment)": own_starts,
        "a bias together with lengths or packed input": bias and padded,
        "a bias of float32 (supported: the dtype of q)": wide,
    }
    return tuple(reason for reason, applies in found.items() if applies)


def runs(cell: Cell) -> bool:
    return not refusals(cell)


def kept_pairs(seed: int, p: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Pairs [B, H, S, T] that the fake keeps: its hash of place and seed (``fakes/aiter.cc``)."""
    state = np.full(shape, seed, np.uint64)
    for place in np.ogrid[tuple(slice(size) for size in shape)]:
        state = (state ^ place.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53 >= p
