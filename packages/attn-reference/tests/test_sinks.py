"""Softmax sinks: values, LSE, gradient, and rows that see nothing but the sink."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from float_bits import bits, same_bits
from torch import Tensor


def _two_keys(engine: ModuleType, score: float, sink: float) -> tuple[Tensor, Tensor, Tensor]:
    """out, LSE and dsink of one query with two keys of one score, v = 3 and 6, upstream 1."""
    sinks = torch.tensor([sink], requires_grad=True)
    q, k, v = torch.ones(1, 1, 1, 1), torch.full((1, 1, 2, 1), score), torch.tensor([3.0, 6.0]).view(1, 1, 2, 1)
    out, lse = engine.attention(q, k, v, causal=False, scale=1.0, sinks=sinks, return_lse=True)
    (dsinks,) = torch.autograd.grad(out, sinks, torch.ones_like(out))
    return out, lse, dsinks


@pytest.mark.parametrize(
    ("score", "sink", "out", "lse", "dsink"),
    [
        (0.0, 20.0, 9 / (2 + math.exp(20)), 20.000000004, -1.855e-8),
        (0.0, 0.0, 3.0, math.log(3), -1.0),
        (10.0, 0.0, 4.499897852, 10.69316988, -1.0215e-4),
        (0.0, -100.0, 4.5, math.log(2), -9 / 4 * math.exp(-100)),
    ],
)
def test_values(engine: ModuleType, score: float, sink: float, out: float, lse: float, dsink: float) -> None:
    found = _two_keys(engine, score, sink)
    assert found[0].item() == pytest.approx(out, rel=1e-6)
    assert found[1].item() == pytest.approx(lse, rel=1e-6)
    assert found[2].item() == pytest.approx(dsink, rel=1e-3)


def test_minus_infinity_is_no_sink(engine: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 8, generator=draw) for _ in range(3))
    sinks = torch.full((2,), -math.inf, requires_grad=True)
    out, lse = engine.attention(q, k, v, sinks=sinks, return_lse=True)
    plain, plain_lse = engine.attention(q, k, v, return_lse=True)
    assert same_bits(out, plain) and same_bits(lse, plain_lse)
    (dsinks,) = torch.autograd.grad(out.sum(), sinks)
    assert not bits(dsinks).any()


@pytest.mark.parametrize("sink", [0.5, 100.0, -100.0])
def test_row_with_nothing_but_the_sink(engine: ModuleType, sink: float) -> None:
    q, k, v = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4)
    sinks = torch.tensor([sink], requires_grad=True)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = engine.attention(q, k, v, sinks=sinks, kv_lengths=torch.tensor([0, 0]), causal=False, return_lse=True)
    assert not bits(out).any()
    assert bool((lse == sink).all())
    dlse = torch.arange(6.0).view(2, 1, 3)
    *gradients, dsinks = torch.autograd.grad((out, lse), (*leaves, sinks), (torch.full_like(out, math.nan), dlse))
    assert not any(bits(gradient).any() for gradient in gradients)
    assert dsinks.item() == 15.0


def test_only_the_sink_needs_a_gradient(engine: ModuleType) -> None:
    assert _two_keys(engine, 0.0, 0.0)[2].item() == pytest.approx(-1.0, rel=1e-6)


def test_sink_gradient_is_precise(engine: ModuleType) -> None:
    """Terms that cancel: summed in float32, each rounded in float32."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 256, 16, generator=draw).bfloat16() for _ in range(4))
    sinks = torch.zeros(2, requires_grad=True)
    (found,) = torch.autograd.grad(engine.attention(q, k, v, sinks=sinks), sinks, dout)
    scores = (q.double() @ k.double().transpose(-1, -2) / 4).masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), -math.inf)
    probs = torch.softmax(torch.cat([scores, torch.zeros(1, 2, 256, 1)], -1), -1)
    exact = -(probs[..., -1:] * dout.double() * (probs[..., :-1] @ v.double())).sum((0, 2, 3))
    assert found.dtype == torch.float32
    assert ((found.double() - exact).abs() <= 1e-4 * exact.abs()).all()


def test_sink_dtype_is_kept(engine: ModuleType) -> None:
    q = torch.randn(1, 2, 3, 4)
    sinks = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    engine.attention(q, q, q, sinks=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{}, {"window": (1, 0)}, {"q_start": 4}, {"key_padding_mask": torch.tensor([[True, False, True, True, True]])}]
)
def test_a_dropped_sink_is_noticed(engine: ModuleType, options: dict[str, object]) -> None:
    """Negative control on every path: a sink of 20 leaves almost nothing of the output."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 5, 4, generator=draw) for _ in range(3))
    with_sink, without = engine.attention(q, k, v, sinks=torch.full((4,), 20.0), **options), engine.attention(q, k, v, **options)
    assert with_sink.abs().max() < 1e-6 < without.abs().max()
