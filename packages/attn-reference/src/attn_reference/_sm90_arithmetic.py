"""The operations of ``sm90-v1`` beyond IEEE ones: the tensor-core step, ex2, and sums by halves. Plain torch operations, any device.

Source: docs/contracts/sm90-v1.md, section 1.
"""

from __future__ import annotations

from functools import cache

import torch
from attn_spec._sm90 import STEP, ex2_table
from torch import Tensor

__all__ = ["chain", "ex2", "halves", "step"]

_ABSENT = -(1 << 20)
"""Exponent of a zero: below every other one."""
_LEAST = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}
_GRID = 1 << 23


def chain(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """``step`` over the inner axis, ascending, sixteen terms at a time; missing terms of the last step are zeros.

    Args:
        a: half [..., R, N]; b: half [..., N, C], the same leading axes.
        start: float32 [..., R, C], the accumulators; None is +0.

    Returns:
        float32 [..., R, C].
    """
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float32, device=a.device) if start is None else start
    for begin in range(0, a.shape[-1], STEP):
        acc = step(acc, a[..., begin : begin + STEP], b[..., begin : begin + STEP, :])
    return acc


def step(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """One tensor-core step: c float32 [..., R, C] plus a half [..., R, N] times b half [..., N, C], N <= 16."""
    left, right = a.double().unsqueeze(-1), b.double().unsqueeze(-3)
    products = left * right
    exponents = torch.where(products == 0, _ABSENT, _exponent(a).unsqueeze(-1) + _exponent(b).unsqueeze(-3))
    e = torch.maximum(exponents.amax(-2), _exponent(c)).clamp_min(-133)
    unit = _power_of_two(25 - e)
    total = (products * unit.unsqueeze(-2)).trunc().sum(-2) + (c.double() * unit).trunc()
    finite = _toward_zero(total * _power_of_two(e - 25))
    special = products.sum(-2) + c.double()
    return torch.where(torch.isfinite(special), finite, special.float())


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|), at least that of the smallest normal number of its dtype; zeros, infinities and NaN are absent."""
    exponent = torch.frexp(x.double().nan_to_num(0.0, 0.0, 0.0))[1] - 1
    return torch.where((x == 0) | ~torch.isfinite(x), _ABSENT, exponent.clamp_min(_LEAST[x.dtype]))


def _power_of_two(n: Tensor) -> Tensor:
    """2^n in float64 for integers n in [-1022, 1023]."""
    return ((n.to(torch.int64) + 1023) << 52).view(torch.float64)


def _toward_zero(x: Tensor) -> Tensor:
    """float64 rounded to float32 toward zero; 2^128 and above give infinity, a zero is +0."""
    nearest = x.float()
    inner = torch.where(nearest.double().abs() > x.abs(), torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    return torch.where(x.abs() >= 2.0**128, nearest, inner) + 0.0


@cache
def _table(device: torch.device) -> Tensor:
    """ex2 at ``(i - 2^23) / 2^23`` for i in 0 .. 2^23, and what stands for the last of them above zero; float64."""
    ends = torch.tensor([1.0, 1.0 - 2.0**-24], dtype=torch.float64)
    return torch.cat((torch.tensor(ex2_table()).double(), ends)).to(device)


def ex2(x: Tensor) -> Tensor:
    """``ex2.approx.ftz.f32`` of float32 x."""
    magnitude = x.double().abs().nan_to_num(0.0, 0.0, 0.0).clamp_max(1024.0)
    whole = magnitude.floor()
    part = ((magnitude - whole) * _GRID).long()
    positive = x > 0
    # Above zero the instruction's grid lies one step beside the one below.
    beside = torch.where(part == _GRID - 1, _GRID + 1, part + 1)
    mantissa = _table(x.device)[torch.where(positive, beside, _GRID - part)]
    value = mantissa * _power_of_two(torch.where(positive, whole + 1, -whole).clamp(-1022, 1023))
    value = torch.where(value < 2.0**-126, 0.0, value).float()
    return torch.where(torch.isfinite(x), value, torch.where(torch.isnan(x), x, torch.where(positive, torch.inf, 0.0)))


def halves(x: Tensor, down_to: int = 1) -> Tensor:
    """Sums by halves over the last axis: ``x[i] + x[i + n/2]``, then n/4, ..., until ``down_to`` are left."""
    while x.shape[-1] > down_to:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x
