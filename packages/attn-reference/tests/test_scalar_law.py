"""Bytes of ``attention``, forward and backward, against the contract's text written as scalar loops."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attn_reference._dropout import kept_pairs
from float_bits import differing, same_bits
from scalar_attention import ScalarAttention

B, H, K, S, T, D, V = 2, 4, 2, 3, 270, 3, 2


def _arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"q": (B, H, S, D), "k": (B, K, T, D), "v": (B, K, T, V), "dout": (B, H, S, V), "dlse": (B, H, S)}
    return {name: (2 * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def _mask(seed: int, keep: float) -> np.ndarray:
    mask = np.random.default_rng(seed).random((B, T)) < keep
    mask[0, 100:150] = False
    return mask


_BIAS = np.random.default_rng(5).standard_normal((1, H, 1, T)).astype(np.float32)
_BIAS[0, 1, 0, :265] = -np.inf
CASES: dict[str, dict[str, Any]] = {
    "plain": {"causal": False},
    "causal": {},
    "scale": {"scale": -0.7, "causal": False},
    "window": {"window": (4, 2), "causal": False},
    "padding": {"key_padding_mask": _mask(1, 0.9)},
    "one_item_padded_out": {"key_padding_mask": np.stack([np.zeros(T, dtype=bool), np.ones(T, dtype=bool)])},
    "lengths": {"kv_lengths": np.array([0, 259])},
    "starts": {"q_start": np.array([700, 265]), "k_start": np.array([450, 3])},
    "starts_and_padding": {"k_start": np.array([200, 255]), "key_padding_mask": _mask(2, 0.95)},
    "sinks": {"sinks": np.array([0.5, -np.inf, 9.0, -3.0], dtype=np.float32)},
    "sinks_without_keys": {"sinks": np.array([0.5, -np.inf, 9.0, -3.0], dtype=np.float32), "kv_lengths": np.array([1, 0])},
    "bias": {"bias": _BIAS},
    "bias_over_keys": {"bias": np.random.default_rng(6).standard_normal((B, 1, S, 1)).astype(np.float32)},
}


def _run(engine: ModuleType, arrays: dict[str, np.ndarray], options: dict[str, Any], with_dlse: bool) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("q", "k", "v")}
    keywords = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    for name in ("sinks", "bias"):
        if name in keywords:
            leaves[name] = keywords[name] = keywords[name].clone().requires_grad_()
    out, lse = engine.attention(
        leaves["q"], leaves["k"], leaves["v"], return_lse=True, **{n: v for n, v in keywords.items() if n not in "qkv"}
    )
    outputs, cotangents = ((out, lse), (tensors["dout"], tensors["dlse"])) if with_dlse else ((out,), (tensors["dout"],))
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), cotangents)
    return {"out": out, "lse": lse, **dict(zip(leaves, gradients, strict=True))}


def _law(arrays: dict[str, np.ndarray], options: dict[str, Any], with_dlse: bool) -> dict[str, torch.Tensor]:
    with np.errstate(all="ignore"):
        law = ScalarAttention(q=arrays["q"], k=arrays["k"], v=arrays["v"], **options)
        out, lse = law.forward()
        found = {"out": out, "lse": lse, **law.backward(arrays["dout"], arrays["dlse"] if with_dlse else None)}
    return {name: torch.from_numpy(array) for name, array in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_attention_is_the_text(engine: ModuleType, case: str) -> None:
    arrays = _arrays(len(case))
    with_dlse = case != "causal"
    found, wanted = _run(engine, arrays, CASES[case], with_dlse), _law(arrays, CASES[case], with_dlse)
    assert set(found) == set(wanted)
    wrong = {name: differing(found[name], wanted[name]) for name in wanted if not same_bits(found[name], wanted[name])}
    assert not wrong, f"{case}: differing elements {wrong}"


def test_specials_stay_in_their_rows(engine: ModuleType) -> None:
    arrays = _arrays(3)
    arrays["q"][0, 0, 1, 0] = np.nan
    arrays["q"][1, 2, 2, :] = np.inf
    arrays["k"][0, 0, 268, :] = 3e38
    arrays["k"][1, 1, 269, 1] = np.nan
    arrays["v"][0, 1, 269, 0] = np.inf
    arrays["v"][1, 0, 5, :] = np.float32(1e-42)
    arrays["q"][0, 3] = np.float32(1e-40)
    found, wanted = _run(engine, arrays, {}, True), _law(arrays, {}, True)
    wrong = {name: differing(found[name], wanted[name]) for name in wanted if not same_bits(found[name], wanted[name])}
    assert not wrong, f"differing elements {wrong}"
    assert 0 < int(found["out"].isnan().sum()) < found["out"].numel()


def test_dropout_is_the_text(engine: ModuleType) -> None:
    arrays, seed = _arrays(4), 0x9E3779B97F4A7C15
    axes = [torch.arange(size) for size in (H, S, T)]
    signed = torch.tensor(seed - 2**64)
    keep = torch.stack([kept_pairs(0.3, signed, b, axes[0].view(-1, 1, 1), axes[1].view(-1, 1), axes[2]) for b in range(B)]).numpy()
    found = _run(engine, arrays, {"dropout_p": 0.3, "dropout_seed": seed}, True)
    wanted = _law(arrays, {"keep": keep, "keep_scale": 1 / 0.7}, True)
    wrong = {name: differing(found[name], wanted[name]) for name in wanted if not same_bits(found[name], wanted[name])}
    assert not wrong, f"differing elements {wrong}"


def test_another_order_is_noticed(engine: ModuleType) -> None:
    """Negative control: the same mathematics with the keys reversed must not pass as the same bits."""
    arrays = _arrays(6)
    reversed_keys = {**arrays, "k": arrays["k"][:, :, ::-1].copy(), "v": arrays["v"][:, :, ::-1].copy()}
    wanted = _law(arrays, {"causal": False}, True)
    found = _run(engine, reversed_keys, {"causal": False}, True)
    assert torch.allclose(found["out"], wanted["out"], rtol=1e-4, atol=1e-5)
    assert not same_bits(found["out"], wanted["out"])
    assert not same_bits(found["lse"], wanted["lse"]) or not same_bits(found["q"], wanted["q"])
