"""Constants and measured data of contract ``sm90-v1`` (docs/contracts/sm90-v1.md)."""

from __future__ import annotations

import lzma
import math
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

__all__ = ["CONTRACT", "SEGMENT", "STEP", "ex2_table", "key_tile", "score_factor"]

CONTRACT = "sm90-v1"
SEGMENT = 1024
"""Keys of a segment."""
STEP = 16
"""Terms of one tensor-core step."""
_LOG2_E = 1.4426950408889634
_POINTS = 1 << 23
_DATA = Path(__file__).parent / "data" / "sm90_ex2_ulp_diff.xz"


def key_tile(head_dim: int) -> int:
    """Keys of a tile."""
    return 128 if head_dim <= 128 else 64


@lru_cache(maxsize=256)
def score_factor(scale: float, contract: str = CONTRACT, function: str = "attention") -> float:
    """``c = RN(scale * log2 e)``, the binary32 factor of the scores of ``contract``. ValueError, in the name of ``function``, unless it is
    normal and positive."""
    with np.errstate(over="ignore"):
        factor = np.float32(0.0) if math.isnan(scale) else np.float64(scale * _LOG2_E).astype(np.float32)
    if not (np.finfo(np.float32).tiny <= factor <= np.finfo(np.float32).max):
        raise ValueError(f"{function}: contract {contract} needs scale * log2(e) to be a normal positive float32; got scale={scale}")
    return float(factor)


@cache
def ex2_table() -> np.ndarray:
    """float32 [2^23]: ``ex2.approx.ftz.f32`` at ``-(2^23 - i) / 2^23``, read-only. Source: data/README.md."""
    differences = np.frombuffer(lzma.decompress(_DATA.read_bytes()), dtype=np.int8)
    exact = np.exp2((np.arange(_POINTS) - _POINTS) / _POINTS)
    table = (exact.astype(np.float32).view(np.int32) + differences).view(np.float32)
    table.flags.writeable = False
    return table
