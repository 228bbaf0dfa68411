"""exp and ln: accuracy against float64, exact points, monotonicity, known bits."""

from __future__ import annotations

import numpy as np
import pytest
import scalar_law
import torch
from attn_reference._elementary import exp, ln
from float_bits import bits, differing
from torch import Tensor


def _ulps(found: Tensor, exact: Tensor) -> Tensor:
    """Distance in units of the last place of the exact value."""
    exponent = torch.frexp(exact)[1].double() - 1
    return (found.double() - exact).abs() / torch.exp2(exponent.clamp(min=-126) - 23)


def test_exp_accuracy() -> None:
    x = torch.cat([torch.linspace(-104, 0, 400_001), -torch.logspace(-30, 1, 100_001)])
    assert _ulps(exp(x), torch.exp(x.double())).max() < 1.2


def test_exp_exact_points() -> None:
    x = torch.tensor([0.0, -0.0, -103.9, -104.00001, -200.0, float("-inf"), float("nan")])
    found = exp(x)
    assert found[:2].tolist() == [1.0, 1.0]
    assert found[2].item() > 0.0
    assert bits(found[3:6]).tolist() == [0, 0, 0]
    assert found[6].isnan()


def test_exp_never_exceeds_one_and_is_monotone() -> None:
    near_zero = torch.arange(0, 2_000_000, dtype=torch.int32).mul(500).add(-(2**31)).view(torch.float32)
    for x in (near_zero, -torch.linspace(0, 104, 2_000_001)):
        found = exp(x)
        assert found.max() <= 1.0
        assert bool((found[1:] <= found[:-1]).all())


def test_exp_keeps_subnormals() -> None:
    found = exp(torch.linspace(-103.9, -87.4, 1001))
    assert bool(((found > 0) & (found < 2.0**-126)).all())


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (-1e-6, 0x3F7FFFEF),
        (-0.5, 0x3F1B4598),
        (-1.0, 0x3EBC5AB2),
        (-10.0, 0x383E6BCE),
        (-87.0, 0x00B33687),
        (-88.5, 0x0027FCE2),
        (-100.0, 0x0000001B),
    ],
)
def test_exp_known_bits(x: float, wanted: int) -> None:
    assert bits(exp(torch.tensor(x))).item() == wanted


def test_ln_accuracy() -> None:
    z = torch.cat([torch.linspace(1, 2, 200_001), torch.logspace(0, 38, 200_001)])
    exact = torch.log(z.double())
    found = ln(z)
    assert bool(((found.double() - exact).abs() <= 1.0e-7 * exact + 1.0e-12).all())


def test_ln_exact_points() -> None:
    assert bits(ln(torch.tensor([1.0, float("inf"), 2.0]))).tolist() == [0, 0x7F800000, 0x3F317218]
    assert ln(torch.tensor(float("nan"))).isnan()


def test_scalar_text_gives_the_same_bits() -> None:
    draw = torch.Generator().manual_seed(0)
    x = -110 * torch.rand(3000, generator=draw)
    z = torch.exp(60 * torch.rand(3000, generator=draw))
    with np.errstate(all="ignore"):
        by_text = [
            torch.tensor([float(rule(np.float32(value))) for value in values.tolist()])
            for rule, values in ((scalar_law.exp, x), (scalar_law.ln, z))
        ]
    assert differing(exp(x), by_text[0]) == 0
    assert differing(ln(z), by_text[1]) == 0


def test_a_fused_horner_step_is_noticed() -> None:
    """Negative control: contracting p * r + c changes bits."""
    x = -20 * torch.rand(3000, generator=torch.Generator().manual_seed(1))
    assert differing(torch.exp(x), exp(x)) > 30
