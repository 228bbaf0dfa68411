"""Outputs, LSE and every gradient against float64 autograd, for every feature and dtype; subsets of gradients; double backward."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import plain_attention
import pytest
import torch
from float_bits import same_bits
from torch import Tensor

B, H, K, S, T, D, V = 2, 4, 2, 5, 40, 16, 8
DRAW = torch.Generator().manual_seed(0)
MASK = torch.rand(B, T, generator=DRAW) < 0.7
FEATURES: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "top_left": {"q_start": 0},
    "scale": {"scale": 0.3},
    "negative_scale": {"scale": -0.3},
    "zero_scale": {"scale": 0.0},
    "window": {"window": (6, 0)},
    "two_sided_window": {"causal": False, "window": (6, 3)},
    "left_only": {"causal": False, "window": (3, None)},
    "padding": {"key_padding_mask": MASK},
    "lengths": {"kv_lengths": torch.tensor([3, 31])},
    "starts": {"q_start": torch.tensor([20, 41]), "k_start": torch.tensor([3, 7])},
    "sinks": {"sinks": torch.tensor([0.0, 2.0, -4.0, float("-inf")])},
    "sinks_and_window": {"sinks": torch.tensor([0.0, 2.0, -4.0, 1.0]), "window": (3, 0)},
    "bias": {"bias": torch.randn(B, H, S, T, generator=DRAW)},
    "key_bias": {"bias": torch.randn(1, 1, 1, T, generator=DRAW)},
    "head_bias": {"bias": torch.randn(1, H, S, T, generator=DRAW)},
    "query_bias": {"bias": torch.randn(B, 1, S, 1, generator=DRAW)},
    "everything": {
        "key_padding_mask": MASK,
        "kv_lengths": torch.tensor([39, 25]),
        "q_start": torch.tensor([30, 20]),
        "k_start": torch.tensor([0, 2]),
        "window": (25, 1),
        "causal": False,
        "sinks": torch.tensor([0.0, 2.0, -4.0, 1.0]),
        "bias": torch.randn(1, H, 1, T, generator=DRAW),
        "scale": 0.2,
    },
}


def _inputs(dtype: torch.dtype, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, H, S, D), "k": (B, K, T, D), "v": (B, K, T, V)}
    return {name: torch.randn(shape, generator=draw).to(dtype).requires_grad_() for name, shape in shapes.items()}


def _cotangents(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(9)
    return torch.randn(B, H, S, V, generator=draw).to(dtype), torch.randn(B, H, S, generator=draw)


def _evaluate(function: Any, leaves: dict[str, Tensor], options: dict[str, Any], cotangents: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    leaves = dict(leaves)
    keywords = dict(options)
    for name in ("sinks", "bias"):
        if name in keywords:
            leaves[name] = keywords[name] = (
                keywords[name].clone().to(leaves["q"].dtype if leaves["q"].dtype == torch.float64 else torch.float32).requires_grad_()
            )
    out, lse = function(leaves["q"], leaves["k"], leaves["v"], **keywords)
    live = torch.isfinite(lse)
    gradients = torch.autograd.grad(
        (out, lse), tuple(leaves.values()), (cotangents[0].to(out.dtype), torch.where(live, cotangents[1].to(lse.dtype), 0.0))
    )
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", FEATURES)
def test_values_and_gradients(engine: ModuleType, feature: str, dtype: torch.dtype) -> None:
    options, leaves, cotangents = FEATURES[feature], _inputs(dtype), _cotangents(dtype)
    found = _evaluate(lambda *a, **o: engine.attention(*a, return_lse=True, **o), leaves, options, cotangents)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    wanted = _evaluate(plain_attention.attention, exact, options, cotangents)
    assert found["out"].dtype == dtype and found["lse"].dtype == torch.float32
    for name, reference in wanted.items():
        value = found[name]
        if name in ("dq", "dk", "dv"):
            assert value.dtype == dtype
        infinite = torch.isinf(reference)
        assert bool((value.double()[infinite] == reference[infinite]).all())
        error, size = (value.double() - reference)[~infinite].abs(), reference[~infinite].abs()
        rounding = 0.5 * torch.finfo(value.dtype).eps * size
        assert bool((error <= rounding + 4e-6 * size.max().clamp(min=1.0)).all()), f"{feature}: {name} is off by {error.max()}"


@pytest.mark.parametrize("broken", ["sinks", "bias", "window", "key_padding_mask"])
def test_an_ignored_option_is_noticed(engine: ModuleType, broken: str) -> None:
    """Negative control: leaving one option out must change the values by far more than the tolerance."""
    options = FEATURES["everything"]
    leaves = _inputs(torch.float32)
    full = engine.attention(leaves["q"], leaves["k"], leaves["v"], **options)
    without = engine.attention(leaves["q"], leaves["k"], leaves["v"], **{name: value for name, value in options.items() if name != broken})
    assert (full - without).abs().max() > 1e-2


@pytest.mark.parametrize(
    "wanted", [subset for size in range(1, 6) for subset in itertools.combinations(("q", "k", "v", "sinks", "bias"), size)]
)
def test_subsets_of_gradients(engine: ModuleType, wanted: tuple[str, ...]) -> None:
    options = FEATURES["everything"]
    tensors = {
        **{name: leaf.detach() for name, leaf in _inputs(torch.float32).items()},
        "sinks": options["sinks"].clone(),
        "bias": options["bias"].clone(),
    }
    dout = _cotangents(torch.float32)[0]

    def gradients(names: tuple[str, ...]) -> dict[str, Tensor | None]:
        leaves = {name: tensor.clone().requires_grad_(name in names) for name, tensor in tensors.items()}
        engine.attention(leaves["q"], leaves["k"], leaves["v"], **{**options, "sinks": leaves["sinks"], "bias": leaves["bias"]}).backward(
            dout
        )
        return {name: leaf.grad for name, leaf in leaves.items()}

    every, found = gradients(tuple(tensors)), gradients(wanted)
    for name in tensors:
        if name in wanted:
            assert same_bits(found[name], every[name])
        else:
            assert found[name] is None


def test_backward_twice_and_inputs_untouched(engine: ModuleType) -> None:
    leaves, (dout, _) = _inputs(torch.bfloat16), _cotangents(torch.bfloat16)
    before = [leaf.detach().clone() for leaf in leaves.values()] + [dout.clone()]
    out = engine.attention(leaves["q"], leaves["k"], leaves["v"])
    first = torch.autograd.grad(out, tuple(leaves.values()), dout, retain_graph=True)
    second = torch.autograd.grad(out, tuple(leaves.values()), dout)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert all(same_bits(a, b) for a, b in zip(before, [*leaves.values(), dout], strict=True))


def test_double_backward_raises_by_name(engine: ModuleType) -> None:
    leaves = _inputs(torch.float32)
    out = engine.attention(leaves["q"], leaves["k"], leaves["v"])
    (gradient,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"attention has no second derivative; use attn_reference.attention_fp32"):
        gradient.sum().backward()


def test_one_tensor_as_q_k_and_v(engine: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
        shared = x.clone().requires_grad_()
        apart = [x.clone().requires_grad_() for _ in range(3)]
        engine.attention(shared, shared, shared).sum().backward()
        engine.attention(*apart).sum().backward()
        assert shared.grad is not None and shared.grad.dtype == dtype
        total = sum(leaf.grad.double() for leaf in apart)
        assert (shared.grad.double() - total).abs().max() <= 4 * torch.finfo(dtype).eps * total.abs().max()


def test_group_heads_and_their_sums(engine: ModuleType) -> None:
    q, k = torch.zeros(1, 4, 1, 1, requires_grad=True), torch.zeros(1, 2, 1, 1, requires_grad=True)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).requires_grad_()
    out = engine.attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1, 1))
    assert out.flatten().tolist() == [10, 10, 20, 20]
    assert dv.flatten().tolist() == [3, 12]
    assert dq.abs().max() == dk.abs().max() == 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 1), (12, 3)])
def test_grouped_heads_equal_repeated_ones(engine: ModuleType, heads: int, kv_heads: int) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, heads, 4, 8, generator=draw),
        torch.randn(1, kv_heads, 7, 8, generator=draw),
        torch.randn(1, kv_heads, 7, 4, generator=draw),
    )
    repeated = [tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (k, v)]
    assert same_bits(engine.attention(q, k, v), engine.attention(q, *repeated))


def test_only_the_bias_needs_a_gradient(engine: ModuleType) -> None:
    q = torch.zeros(2, 1, 2, 1)
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(2, 1, 2, 1)
    bias = torch.zeros(1, 1, 1, 2, requires_grad=True)
    engine.attention(q, q, v, causal=False, bias=bias).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [[[[-1.0, 1.0]]]]
