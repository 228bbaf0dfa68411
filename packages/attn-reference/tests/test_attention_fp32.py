"""``attention_fp32``: as close to float64 as a plain float32 computation, under hostile settings, and differentiable twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import plain_attention
import pytest
import torch
from attn_reference import attention_fp32, pytorch
from attn_reference._dropout import kept_pairs
from float_bits import bits, same_bits
from torch import Tensor

B, H, K, S, T, D, V = 2, 4, 2, 24, 60, 32, 16
DRAW = torch.Generator().manual_seed(0)
MASK = torch.rand(B, T, generator=DRAW) < 0.7
FEATURES: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "padding": {"key_padding_mask": MASK},
    "lengths": {"kv_lengths": torch.tensor([5, 47])},
    "window": {"window": (6, 0)},
    "starts": {"q_start": 30, "k_start": torch.tensor([3, 7])},
    "sinks": {"sinks": torch.tensor([0.0, 2.0, 5.0, 1.0])},
    "bias": {"bias": torch.randn(1, H, S, T, generator=DRAW)},
    "everything": {"key_padding_mask": MASK, "window": (25, 1), "causal": False, "sinks": torch.tensor([0.0, 2.0, 5.0, 1.0]), "scale": 0.2},
}

SEED_RELATIVE_TO_PEAK = {torch.bfloat16: 0.03, torch.float16: 0.005}
"""Thresholds that the published operator family uses for half-precision attention: largest difference over largest value."""
OURS_RELATIVE_TO_PEAK = {torch.bfloat16: 2.0**-9 + 1e-5, torch.float16: 2.0**-12 + 1e-5}
"""Ours: half a unit in the last place of the result, since everything before it is float32."""


@contextmanager
def hostile_settings() -> Iterator[None]:
    """Autocast to bfloat16 and every reduced-precision float32 product allowed."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in ((B, H, S, D), (B, K, T, D), (B, K, T, V))]


def _with_gradients(function: Any, inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    keywords = dict(options)
    for name in ("sinks", "bias"):
        if name in keywords:
            keywords[name] = keywords[name].to(inputs[0].dtype).requires_grad_()
            leaves.append(keywords[name])
    out, lse = function(*leaves[:3], **keywords)
    draw = torch.Generator().manual_seed(2)
    dout = torch.randn(out.shape, generator=draw).to(out.dtype)
    dlse = torch.where(torch.isfinite(lse), torch.randn(lse.shape, generator=draw), 0).to(lse.dtype)
    return [out.detach(), torch.nan_to_num(lse.detach(), neginf=0.0), *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


def _is_close(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> bool:
    """Each error against float64 is at most twice that of the plain computation in the same dtype."""

    def error(values: Tensor, reference: Tensor) -> float:
        return float((values.double() - reference).abs().max())

    return all(error(a, reference) <= 2 * error(b, reference) + 1e-9 for a, b, reference in zip(found, plain, exact, strict=True))


def _golden(*tensors: Tensor, **options: Any) -> Any:
    return attention_fp32(*tensors, return_lse=True, **options)


@pytest.mark.parametrize("feature", FEATURES)
def test_close_under_hostile_settings(feature: str) -> None:
    inputs, options = _inputs(), FEATURES[feature]
    plain = _with_gradients(plain_attention.attention, inputs, options)
    exact = _with_gradients(plain_attention.attention, [tensor.double() for tensor in inputs], options)
    with hostile_settings():
        found = _with_gradients(_golden, inputs, options)
    assert all(tensor.dtype == torch.float32 for tensor in found)
    assert _is_close(found, plain, exact)


@pytest.mark.parametrize("fault", ["zeros", "dropped sink", "ignored mask", "ignored window", "bfloat16 products"])
def test_faults_are_not_close(fault: str) -> None:
    """Negative controls: the check above must refuse these."""
    inputs, options = _inputs(), FEATURES["everything"]
    plain = _with_gradients(plain_attention.attention, inputs, options)
    exact = _with_gradients(plain_attention.attention, [tensor.double() for tensor in inputs], options)
    if fault == "zeros":
        found = [torch.zeros_like(tensor) for tensor in plain]
    elif fault == "bfloat16 products":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = _with_gradients(plain_attention.attention, inputs, options)
    else:
        name = {"dropped sink": "sinks", "ignored mask": "key_padding_mask", "ignored window": "window"}[fault]
        found = _with_gradients(_golden, inputs, {key: value for key, value in options.items() if key != name})
        plain, exact = plain[: len(found)], exact[: len(found)]
    assert not _is_close(found, plain, exact)
    assert _is_close(
        _with_gradients(_golden, inputs, options),
        *(_with_gradients(plain_attention.attention, [t.to(d) for t in inputs], options) for d in (torch.float32, torch.float64)),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_relative_to_peak(dtype: torch.dtype) -> None:
    inputs = _inputs(dtype)
    golden = attention_fp32(*inputs)
    assert isinstance(golden, Tensor) and golden.dtype == torch.float32
    difference = (pytorch.attention(*inputs).float() - golden).abs().max() / golden.abs().max()
    assert difference <= OURS_RELATIVE_TO_PEAK[dtype] < SEED_RELATIVE_TO_PEAK[dtype]


def test_second_derivatives() -> None:
    inputs, options = _inputs(), FEATURES["everything"]

    def second(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = function(*leaves, **{**options, "sinks": options["sinks"].to(dtype)})[0]
        first = torch.autograd.grad((out * out).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum((gradient * gradient).sum() for gradient in first), leaves))

    with hostile_settings():
        found = second(_golden, torch.float32)
    assert _is_close(found, second(plain_attention.attention, torch.float32), second(plain_attention.attention, torch.float64))


def test_transforms_of_torch_func() -> None:
    """grad, vmap, jvp and hessian, with each other's and autograd's values."""
    q, k, v = (tensor[:, :, :3] for tensor in _inputs())

    def loss(*tensors: Tensor) -> Tensor:
        out = attention_fp32(*tensors)
        assert isinstance(out, Tensor)
        return out.square().sum()

    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    with hostile_settings():
        found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        tangents = [torch.randn_like(tensor) for tensor in (q, k, v)]
        _, slope = torch.func.jvp(loss, (q, k, v), tuple(tangents))
        torch.testing.assert_close(slope, sum((a * b).sum() for a, b in zip(expected, tangents, strict=True)), rtol=1e-4, atol=1e-4)
        mapped = torch.func.vmap(attention_fp32)(torch.stack((q, 2 * q)), torch.stack((k, k)), torch.stack((v, v)))
        assert torch.equal(mapped[0], attention_fp32(q, k, v)) and torch.equal(mapped[1], attention_fp32(2 * q, k, v))
        small = q[:1, :1, :, :2], k[:1, :1, :, :2], v[:1, :1, :, :2]
        second = torch.func.hessian(loss)(*small).reshape(6, 6)
        twice = torch.autograd.functional.hessian(loss, small)[0][0].reshape(6, 6)
    torch.testing.assert_close(second, twice, rtol=1e-4, atol=1e-5)
    assert second.abs().max() > 1e-2


def test_settings_are_given_back() -> None:
    with hostile_settings():
        products = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
        leaf = _inputs()[0].requires_grad_()
        attention_fp32(leaf, *_inputs()[1:]).sum().backward()
        assert torch.is_autocast_enabled("cpu")
        assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == products
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(ValueError, match="window sides"):
            attention_fp32(leaf, *_inputs()[1:], window=(-2, 0))
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_unseen_keys_and_dead_rows(content: float) -> None:
    q, k, v = _inputs()
    lengths = torch.tensor([0, 40])

    def run(fill: float) -> list[Tensor]:
        unused = (torch.arange(T) >= lengths.view(-1, 1)).view(B, 1, T, 1)
        leaves = [tensor.clone().requires_grad_() for tensor in (q, torch.where(unused, fill, k), torch.where(unused, fill, v))]
        out, lse = attention_fp32(*leaves, kv_lengths=lengths, causal=False, return_lse=True)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out.sum(), leaves)]

    clean, dirty = run(0.0), run(content)
    assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not bits(dirty[0][0]).any() and bool((dirty[1][0] == -math.inf).all())
    assert all(torch.isfinite(gradient).all() for gradient in dirty[2:])


def test_dropout_takes_the_pairs_of_the_contract() -> None:
    inputs = _inputs()
    axes = (torch.arange(H).view(-1, 1, 1), torch.arange(S).view(-1, 1), torch.arange(T))
    keep = torch.stack([kept_pairs(0.4, torch.tensor(3), batch, *axes) for batch in range(B)])
    found = attention_fp32(*inputs, dropout_p=0.4, dropout_seed=3)
    wanted = plain_attention.attention(*(tensor.double() for tensor in inputs), keep=keep, dropout_p=0.4)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="dropout_seed"):
        attention_fp32(*inputs, dropout_p=0.4)
