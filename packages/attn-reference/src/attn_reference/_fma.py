"""Fused multiply-add in binary32 without hardware support: one rounding of the exact ``a * b + c``."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fma", "round_sum"]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``RN(a * b + c)`` of float32 tensors that broadcast; float32."""
    return round_sum(a.double() * b.double(), c.double()).float()


def round_sum(product: Tensor, addend: Tensor) -> Tensor:
    """The float32 value nearest to the exact ``product + addend``, held in float64.

    ``product`` is float64 and exact: two 24-bit significands fill 48 of its 53 bits. ``addend`` holds a float32 value. Rounding their sum
    to 53 bits and then to 24 is wrong near ties; so the first rounding is made one to odd, after which the second is right (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57, 2008).
    """
    total = product + addend
    # TwoSum (Knuth): total + error is exact; error is NaN where total is infinite or NaN.
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    inexact_even = (error.abs() > 0) & ((total.view(torch.int64) & 1) == 0)
    odd = torch.nextafter(total, error * torch.inf)
    return torch.where(inexact_even, odd, total).float().double()
