"""The host kernels give the bytes of the PyTorch definition on random problems with every feature."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from attn_reference import _host_kernels
from attn_reference._pytorch_kernels import KERNELS as DEFINITION
from attn_spec.torch import AttentionInputs
from float_bits import differing
from host_problems import DTYPES, dense, packed, pick, results, values

HOST = _host_kernels.KERNELS
SEEDS = range(40)


def assert_same(found: dict[str, Any], expected: dict[str, Any], about: object) -> None:
    wrong = {name: differing(found[name], expected[name]) for name in expected}
    assert not any(wrong.values()), f"elements that differ: {wrong} in {about}"


def describe(inputs: AttentionInputs) -> str:
    tensors = {field.name: value for field in fields(inputs) if (value := getattr(inputs, field.name)) is not None}
    return ", ".join(f"{name}={tuple(value.shape) if isinstance(value, torch.Tensor) else value}" for name, value in tensors.items())


@pytest.mark.parametrize("seed", SEEDS)
def test_dense_attention(seed: int) -> None:
    inputs = dense(seed)
    assert_same(results(HOST, inputs, seed), results(DEFINITION, inputs, seed), describe(inputs))


@pytest.mark.parametrize("seed", SEEDS)
def test_packed_attention(seed: int) -> None:
    inputs = packed(seed)
    assert_same(results(HOST, inputs, seed), results(DEFINITION, inputs, seed), describe(inputs))


@pytest.mark.parametrize("seed", range(20))
def test_joint_operators(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    batch, kv_heads, group, queries = pick(g, 1, 2), pick(g, 1, 2), pick(g, 1, 2), pick(g, 1, 7, 100)
    keys, width, kind = pick(g, 1, 60, 256, 600), pick(g, 1, 7, 16, 48), pick(g, "normal", "large", "subnormal", "special")
    dtype, wide = pick(g, *DTYPES), pick(g, *DTYPES)
    q = values(g, kind, dtype, batch, kv_heads * group, queries, width)
    k = values(g, kind, dtype, batch, kv_heads, keys, width)
    mask = torch.rand(batch, keys, generator=g) < 0.6 if pick(g, True, False) else None
    expected, found = (_joint(kernels, q, k, mask, wide) for kernels in (DEFINITION, HOST))
    assert_same(found, expected, f"{tuple(q.shape)} {tuple(k.shape)} {dtype} {wide} {kind} mask={mask is not None}")


def _joint(kernels: Any, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    scores = kernels.qk_gemm_forward(q, k, 0.3, dtype)
    probs, row_max, row_sum = kernels.softmax_forward(scores, mask, dtype)
    out = kernels.av_gemm_forward(probs, k, k.dtype)
    dprobs, dv = kernels.av_gemm_backward(out, probs, k, (True, True))
    dscores = kernels.softmax_backward(dprobs, scores, mask, row_max, row_sum)
    dq, dk = kernels.qk_gemm_backward(dscores, q, k, 0.3, (True, True))
    return {"scores": scores, "probs": probs, "out": out, "dprobs": dprobs, "dv": dv, "dscores": dscores, "dq": dq, "dk": dk}


def test_a_changed_bit_is_seen() -> None:
    inputs = dense(0)
    expected = results(DEFINITION, inputs)
    changed = dict(expected, lse=torch.nextafter(expected["lse"], torch.tensor(torch.inf)))
    with pytest.raises(AssertionError, match="elements that differ"):
        assert_same(changed, expected, "control")
