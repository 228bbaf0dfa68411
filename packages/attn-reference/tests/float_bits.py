"""Bits of float tensors, for comparisons in which +0 is not -0 and every NaN is the same."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The bits as integers; each NaN is replaced by one value."""
    found = tensor.detach().contiguous().view(_INTEGERS[tensor.dtype])
    return torch.where(tensor.isnan(), torch.iinfo(found.dtype).max, found)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Shape, dtype and every bit are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in their bits."""
    return int((bits(a) != bits(b)).sum())
