"""exp and ln of ``ordered-v1``: every multiplication and addition is its own rounded binary32 operation."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

__all__ = ["exp", "ln"]


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


_LOG2_E = _float(0x3FB8AA3B)
_LN2_HIGH, _LN2_LOW = _float(0x3F317200), _float(0x35BFBE8E)
_EXP_FIRST = _float(0x39500D01)  # 1/5040
_EXP_REST = tuple(_float(bits) for bits in (0x3AB60B61, 0x3C088889, 0x3D2AAAAB, 0x3E2AAAAB, 0x3F000000, 0x3F800000, 0x3F800000))

_SQRT2_BITS = 0x3FB504F3
_LN_FIRST = _float(0x3D9021BB)
_LN_REST = tuple(_float(bits) for bits in (0xBDEBD1B8, 0x3DEF251A, 0xBDFE5D4F, 0x3E11E9BF, 0xBE2AAE50, 0x3E4CCEAC, 0xBE7FFFFC, 0x3EAAAAAA))
_LN2_TOP, _LN2_CORRECTION = _float(0x3F318000), _float(0xB95E8083)


def exp(x: Tensor) -> Tensor:
    """exp(x) for float32 x <= 0 or NaN; at most 1.2 ulp off, never above 1, subnormal results kept, +0 below -104."""
    underflows = x < -104.0
    argument = torch.where(underflows | torch.isnan(x), 0.0, x)
    n = torch.floor(argument * _LOG2_E + 0.5)
    r = (argument - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, _EXP_FIRST)
    for coefficient in _EXP_REST:
        p = p * r + coefficient
    low = n < -126
    scaled = p * _power_of_two(torch.where(low, n + 64, n))
    result = torch.where(low, scaled * 2.0**-64, scaled)
    return torch.where(torch.isnan(x), x, torch.where(underflows, 0.0, result))


def _power_of_two(n: Tensor) -> Tensor:
    """2^n as float32, from the exponent bits, for float32 integers n in [-126, 127]."""
    return ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def ln(z: Tensor) -> Tensor:
    """Natural logarithm of float32 z >= 1, NaN or +inf."""
    bits = z.view(torch.int32)
    f = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    halve = f.view(torch.int32) >= _SQRT2_BITS
    f = torch.where(halve, f * 0.5, f)
    k = ((bits >> 23) - 127 + halve.to(torch.int32)).float()
    t = f - 1.0
    w = t * t
    p = torch.full_like(t, _LN_FIRST)
    for coefficient in _LN_REST:
        p = p * t + coefficient
    y = (t * w) * p
    y = y + k * _LN2_CORRECTION
    y = y - w * 0.5
    y = t + y
    y = y + k * _LN2_TOP
    return torch.where(torch.isfinite(z), y, z)
