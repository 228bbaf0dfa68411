"""The emulated FMA against exact rationals and the C library, on inputs built to break an addition that rounds twice."""

from __future__ import annotations

import ctypes
import ctypes.util
from fractions import Fraction

import pytest
import torch
from attn_reference._fma import fma
from float_bits import bits, differing
from torch import Tensor

_FMAF = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6").fmaf
_FMAF.restype, _FMAF.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def _from_bits(values: Tensor) -> Tensor:
    return values.to(torch.int32).view(torch.float32)


def _random_bits(count: int, seed: int) -> Tensor:
    return _from_bits(torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed)))


def _library(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.tensor([_FMAF(*triple) for triple in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], dtype=torch.float32)


def _twice_rounded(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def _nearest(value: Fraction) -> float:
    """The binary32 number nearest to a rational, ties to even; overflow gives infinity."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    units = round(magnitude / quantum)
    result = float("inf") if units * quantum >= Fraction(2) ** 128 else float(units * quantum)
    return -result if value < 0 else result


def _ties(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """``a * b`` is half an ulp of c, a little more or less: (1 + i u)(1 - j u) differs from 1 far below the last bit of a float64 sum."""
    draw = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-100, 100, (count,), generator=draw).double()
    sign = torch.where(torch.rand(count, generator=draw) < 0.5, -1.0, 1.0).double()
    u = 2.0**-23
    i, j = (torch.randint(0, 3, (count,), generator=draw).double() for _ in range(2))
    c = torch.ldexp(1 + torch.randint(0, 2**23, (count,), generator=draw).double() * u, exponent)
    split = torch.randint(-20, 20, (count,), generator=draw).double()
    a = torch.ldexp(1 + i * u, split)
    b = torch.ldexp((1 - j * u / 2), exponent - 24 - split) * sign
    return a.float(), b.float(), c.float()


def _subnormal_ties(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sum lies in the subnormal range, half a quantum 2^-149 off a representable number, a little more or a little less."""
    draw = torch.Generator().manual_seed(seed)
    u = 2.0**-23
    i, j = (torch.randint(0, 3, (count,), generator=draw).double() for _ in range(2))
    c = _from_bits(torch.randint(0, 2**23, (count,), generator=draw))
    sign = torch.where(torch.rand(count, generator=draw) < 0.5, -1.0, 1.0).double()
    return (2.0**-75 * (1 + i * u)).float(), (2.0**-75 * (1 - j * u / 2) * sign).float(), c


def _cancelling(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """c is the negated rounded product, so the result is the rounding error of the product."""
    a, b = _random_bits(count, seed), _random_bits(count, seed + 1)
    return a, b, -(a.double() * b.double()).float()


def _near(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random bits, with c within 2^60 of the product."""
    a, b = _random_bits(count, seed), _random_bits(count, seed + 1)
    shift = torch.randint(-60, 60, (count,), generator=torch.Generator().manual_seed(seed + 2))
    return a, b, torch.ldexp(a.double() * b.double(), shift).float()


def _all_random(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return _random_bits(count, seed), _random_bits(count, seed + 1), _random_bits(count, seed + 2)


KINDS = {"ties": _ties, "subnormal_ties": _subnormal_ties, "cancelling": _cancelling, "near": _near, "random_bits": _all_random}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_c_library(kind: str) -> None:
    a, b, c = KINDS[kind](20_000, 7)
    assert differing(fma(a, b, c), _library(a, b, c)) == 0


@pytest.mark.parametrize("kind", ["ties", "subnormal_ties", "cancelling", "near"])
def test_equals_exact_rationals(kind: str) -> None:
    a, b, c = KINDS[kind](3_000, 11)
    finite = torch.isfinite(a) & torch.isfinite(b) & torch.isfinite(c)
    a, b, c = a[finite], b[finite], c[finite]
    assert a.numel() > 1_000
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    wanted = torch.tensor([_nearest(value) for value in exact], dtype=torch.float64).float()
    # A rational has no signed zero: zeros are compared as numbers here and by their sign in the other tests.
    assert differing(fma(a, b, c) + 0.0, wanted + 0.0) == 0


@pytest.mark.parametrize("kind", ["ties", "subnormal_ties"])
def test_rounding_twice_is_noticed(kind: str) -> None:
    """Negative control: a float64 sum rounded again fails on these ties."""
    a, b, c = KINDS[kind](20_000, 7)
    assert differing(_twice_rounded(a, b, c), _library(a, b, c)) > 1_000


def test_overflow_is_decided_by_the_exact_sum() -> None:
    largest = torch.tensor(3.4028234663852886e38)
    u = 2.0**-23
    a = torch.tensor([1 + u, 1.0, 1 + u, 1.0])
    b = torch.tensor([2.0**103 * (1 - u), 2.0**103, -(2.0**103) * (1 - u), -(2.0**103)])
    c = torch.stack([largest, largest, -largest, -largest])
    assert fma(a, b, c).tolist() == [largest.item(), float("inf"), -largest.item(), float("-inf")]
    assert _twice_rounded(a, b, c)[0].item() == float("inf")


def test_specials() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4028234663852886e38])
    a, b, c = (part.flatten() for part in torch.meshgrid(values, values, values, indexing="ij"))
    assert differing(fma(a, b, c), _library(a, b, c)) == 0
    assert bits(fma(torch.tensor(-0.0), torch.tensor(1.0), torch.tensor(-0.0))).item() == -(2**31)
