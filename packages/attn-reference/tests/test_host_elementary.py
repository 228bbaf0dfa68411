"""Elementary steps of every variant against the definition: exp over its range, FMA on ties, conversions of any bit pattern."""

from __future__ import annotations

import pytest
import torch
from attn_reference._host_kernels import HostKernels
from attn_reference._pytorch_kernels import KERNELS as DEFINITION
from test_host_fuzz import assert_same
from torch import Tensor


@pytest.fixture(params=HostKernels.variants())
def variant(request: pytest.FixtureRequest) -> HostKernels:
    return HostKernels(variant=request.param)


def _bit_patterns(low: int, high: int, *shape: int) -> Tensor:
    """Floats with random bits in [low, high)."""
    g = torch.Generator().manual_seed(0)
    patterns = torch.randint(low, high, shape, generator=g)
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


def test_exp_over_its_range(variant: HostKernels) -> None:
    """Rows of one 0 and 255 arguments whose bits are uniform over [-0, -128], so that results reach down to subnormals and +0."""
    scores = _bit_patterns(0x80000000, 0xC3000000, 300, 256)
    scores[:150] = -(torch.rand(150, 256, generator=torch.Generator().manual_seed(1)) * 40 + 70)
    scores[:, 7] = 0.0
    found, expected = (kernels.softmax_forward(scores, None, torch.float32)[0] for kernels in (variant, DEFINITION))
    tiny = torch.finfo(torch.float32).tiny
    assert ((expected > 0) & (expected < tiny)).sum() > 1000, "control: subnormal results"
    assert_same({"probs": found}, {"probs": expected}, "exp")


def _sums(kernels: object, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """FMA(a, b, c) as the chain of [c, a] and [1, b]."""
    q = torch.stack((c, a), dim=-1).reshape(-1, 1, 1, 2)
    k = torch.stack((torch.ones_like(b), b), dim=-1).reshape(-1, 1, 1, 2)
    return kernels.qk_gemm_forward(q, k, 1.0, torch.float32)  # type: ignore[attr-defined]


def test_fma_on_ties(variant: HostKernels) -> None:
    """Products of exactly half an ulp of the addend, or 2^-47 short of it, where rounding to binary64 first makes a tie."""
    g = torch.Generator().manual_seed(2)
    count = 4000
    signs = torch.randint(0, 2, (2, count), generator=g) * 2.0 - 1.0
    c = torch.randint(2**23, 2**24, (count,), generator=g).float() * signs[0]
    hair = torch.randint(0, 2, (count,), generator=g) * 2.0**-23
    scale = 2.0 ** torch.randint(-20, 20, (count,), generator=g)
    a, b = scale * (1.0 + hair), signs[1] * 0.5 / scale * (1.0 - hair)
    found, expected = _sums(variant, a, b, c), _sums(DEFINITION, a, b, c)
    twice = (a.double() * b.double() + c.double()).float().reshape(found.shape)
    assert (twice != expected).any(), "control: rounding to binary64 first gives other results"
    assert_same({"fma": found}, {"fma": expected}, "ties")


def test_fma_of_any_bits(variant: HostKernels) -> None:
    a, b, c = (_bit_patterns(0, 2**32, 3, 6000)[row] for row in range(3))
    assert_same({"fma": _sums(variant, a, b, c)}, {"fma": _sums(DEFINITION, a, b, c)}, "random bits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_of_any_bits(variant: HostKernels, dtype: torch.dtype) -> None:
    """Down to the half dtype at the end, and up from it at the start."""
    wide = torch.cat((_bit_patterns(0, 2**32, 60_000), _bit_patterns(0x33000000, 0x39000000, 20_000))).reshape(1, 1, -1, 1)
    one = torch.ones(1, 1, 1, 1)
    assert_same(
        {"narrow": variant.qk_gemm_forward(wide, one, 1.0, dtype)}, {"narrow": DEFINITION.qk_gemm_forward(wide, one, 1.0, dtype)}, dtype
    )
    narrow = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, 1, -1, 1)
    expected = narrow.float() + 0.0
    assert_same({"wide": variant.qk_gemm_forward(narrow, one.to(dtype), 1.0, torch.float32)}, {"wide": expected}, dtype)
