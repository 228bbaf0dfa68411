"""Conversion to the dtype of a result: nearest even, with the zero rule or without."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nearest", "stored"]


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``nearest`` with zeros as +0."""
    return nearest(values + 0.0, dtype)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 ``values`` to nearest even in ``dtype``; overflow gives infinity, subnormal results are kept."""
    return _bfloat16(values) if dtype == torch.bfloat16 else values.to(dtype)


def _bfloat16(values: Tensor) -> Tensor:
    # In integers, since the conversion instructions of some processors flush subnormals whatever the mode.
    bits = values.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(torch.isnan(values), 0x7FC0, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)
