"""The quantizer on tensors against numpy's, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_reference import nvfp4
from attn_spec import nvfp4 as law
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import to_numpy

OUTERS = ("none", "row", "tile", 2048.0, 2688.0, 2.0**-20)


def values(length: int) -> torch.Tensor:
    """[2, 70, length] over 60 binades, with zeros, ties, saturation, and in item 1 NaN and infinities."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, 70, length, generator=generator) * torch.exp2(torch.randint(-30, 30, (2, 70, 1), generator=generator).float())
    x[:, 0], x[:, 1], x[:, 2, ::2], x[:, 3] = 0.0, -0.0, -0.0, 6 * 2.0**-10
    x[:, 4], x[:, 5, -1], x[:, 6] = 6 * 2.0**-10 * 1.01, 3e38, 1e-42
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -5]
    x[:, 7] = torch.tensor(ties).repeat(-(-length // len(ties)))[:length]
    x[1, 8, -1], x[1, 40, 0], x[1, 41, 0] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("length", (16, 40))
def test_the_bytes_of_numpy(length: int, outer: law.Outer, dtype: torch.dtype) -> None:
    x = values(length)
    if dtype == torch.float16:
        x[0] = x[0].clamp(-6e4, 6e4)  # so that item 0 stays finite
    x = x.to(dtype)
    found, expected = nvfp4.quantize(x, outer=outer), law.quantize(to_numpy(x), outer=outer)
    assert_bytes(to_numpy(found.codes), expected.codes, "codes")
    assert_bytes(to_numpy(found.scales), expected.scales, "scales")
    assert_bytes(np.broadcast_to(to_numpy(found.outer), (2, 70, 1)), np.broadcast_to(expected.outer, (2, 70, 1)), "outer")
    decoded = nvfp4.dequantize(found)
    assert decoded.isfinite().any() and decoded.isnan().any()
    assert_bytes(to_numpy(decoded), law.dequantize(expected), "values")
    assert_bytes(to_numpy(nvfp4.fake_quantize(x, outer=outer)), law.dequantize(expected), "without packing")


def test_every_scale_decodes_and_a_view_quantizes_as_its_copy() -> None:
    scales = torch.arange(0x80, dtype=torch.uint8)
    packed = nvfp4.NVFP4(torch.full((0x80, 8), 0x72, dtype=torch.uint8), scales.unsqueeze(-1), torch.ones(()), 16)
    expected = law.NVFP4(to_numpy(packed.codes), to_numpy(packed.scales), np.ones((), np.float32), 16)
    assert_bytes(to_numpy(nvfp4.dequantize(packed)), law.dequantize(expected), "values")
    x = torch.randn(48, 32)
    assert torch.equal(nvfp4.quantize(x.T).codes, nvfp4.quantize(x.T.contiguous()).codes)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_gradient_passes_straight_through(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20, dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 20)
    (found,) = torch.autograd.grad(nvfp4.fake_quantize(x, outer="row"), x, upstream)
    assert found.dtype == dtype and torch.equal(found, upstream.to(dtype))
    _, tangent = torch.func.jvp(nvfp4.fake_quantize, (x.detach(),), (upstream.to(dtype),))
    assert torch.equal(tangent, upstream.to(dtype).float())
    mapped = torch.func.vmap(lambda row: nvfp4.fake_quantize(row, outer="row"))(x.detach())
    assert torch.equal(mapped, nvfp4.fake_quantize(x.detach(), outer="row"))


def test_flush_to_zero_moves_no_byte() -> None:
    x = values(40)
    expected = nvfp4.quantize(x, outer="row")
    torch.set_flush_denormal(True)
    try:
        found = nvfp4.quantize(x, outer="row")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize(
    ("x", "outer", "error", "message"),
    [
        (torch.zeros(16, dtype=torch.float64), "none", TypeError, "got dtype torch.float64"),
        ([1.0], "none", TypeError, "got list"),
        (torch.zeros(16), "tile", ValueError, r"2 axes or more; got shape \[16\]"),
        (torch.zeros(16), "global", ValueError, "got 'global'"),
        (torch.zeros(16), 0, ValueError, "got 0"),
        (torch.zeros(16), float("nan"), ValueError, "got nan"),
        (torch.zeros(16, dtype=torch.int32), "none", TypeError, "got dtype torch.int32"),
    ],
)
@pytest.mark.parametrize("function", ("quantize", "fake_quantize"))
def test_bad_arguments_are_named(function: str, x: torch.Tensor, outer: law.Outer, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{function}: .*{message}"):
        getattr(nvfp4, function)(x, outer=outer)
