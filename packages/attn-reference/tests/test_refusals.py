"""What the torch operators refuse instead of guessing, on both engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_spec import UnsupportedProblem
from attn_spec._errors import UnknownName
from torch import Tensor


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 2, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"causal": "no"}, TypeError, "causal must be True or False; got 'no'"),
        ({"causal": None}, TypeError, "causal must be True or False; got None"),
        ({"contract": ["ordered-v1"]}, UnknownName, "unknown contract ['ordered-v1']"),
        ({"scale": 1e39}, ValueError, "scale must be a finite number or None; got"),
        ({"scale": 10**400}, ValueError, "scale must be a finite number or None; got"),
        ({"scale": True}, ValueError, "scale must be a finite number or None; got"),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, TypeError, "dropout_seed must be an integer"),
        ({"dropout_p": 0.5, "dropout_seed": True}, TypeError, "dropout_seed must be an integer"),
        ({"dropout_p": 0.5, "dropout_seed": "a"}, TypeError, "dropout_seed must be an integer"),
        ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2])}, TypeError, "dropout_seed must be an integer"),
        ({"sinks": 0.0}, TypeError, "sinks must be a torch.Tensor; got float"),
        ({"key_padding_mask": [[True]]}, TypeError, "key_padding_mask must be a torch.Tensor; got list"),
    ],
)
def test_bad_options_are_named(engine: Any, keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("[", r"\[")):
        engine.attention(*qkv(), **keywords)


@pytest.mark.parametrize("bad", [torch.int32, torch.float64, "float32", None])
def test_another_dtype_of_scores_is_refused(engine: Any, bad: Any) -> None:
    with pytest.raises(TypeError, match="joint_attn_qk_gemm: out_dtype must be one of float32, bfloat16, float16; got"):
        engine.joint_attn_qk_gemm(*qkv()[:2], out_dtype=bad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_autocast_excuses_no_dtype(engine: Any, dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in qkv())
    with torch.autocast("cpu"):
        with pytest.raises(TypeError, match="attention: q has dtype float"):
            engine.attention(q, k, v)
        with pytest.raises(TypeError, match="joint_attn_qk_gemm: q has dtype float"):
            engine.joint_attn_qk_gemm(q, k)


@pytest.mark.parametrize("bad", [[1.0], torch.randn(1, 2, 3, 4).to_sparse()], ids=["list", "sparse"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_no_dense_tensor_is_named(engine: Any, bad: Any, autocast: bool) -> None:
    with torch.autocast("cpu", enabled=autocast), pytest.raises(TypeError, match="attention: q must be"):
        engine.attention(bad, *qkv()[1:])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_device_without_data_is_refused(engine: Any, autocast: bool) -> None:
    empty = [tensor.to("meta") for tensor in qkv()]
    with torch.autocast("cpu", enabled=autocast), pytest.raises(UnsupportedProblem, match="device meta"):
        engine.attention(*empty)


def test_a_map_over_no_sample_is_refused(engine: Any) -> None:
    q, k, v = (tensor.expand(0, *tensor.shape) for tensor in qkv())
    for function in (
        engine.attention,
        lambda q, k, v: engine.joint_attn_qk_gemm(q, k),
        lambda q, k, v: engine.attention(q, k, v, sinks=v[0, 0, 0, :2]),
    ):
        with pytest.raises(ValueError, match="the mapped axis has size 0"):
            torch.vmap(function)(q, k, v)


def test_forward_mode_is_refused(engine: Any) -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="attention: forward-mode differentiation"):
        torch.func.jvp(lambda moving: engine.attention(moving, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.randn(2, 5), torch.randn(2, 5))
        with pytest.raises(NotImplementedError, match="joint_attn_softmax: forward-mode differentiation"):
            engine.joint_attn_softmax(dual)


@pytest.mark.parametrize("length", [-3, 9])
def test_lengths_out_of_range_raise_in_compiled_graphs_too(engine: Any, length: int) -> None:
    compiled = torch.compile(lambda q, k, v, used: engine.attention(q, k, v, kv_lengths=used), backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match="kv_lengths must lie"):
        compiled(*qkv(), torch.tensor([length]))


@pytest.mark.parametrize(("q_start", "k_start"), [(-(2**31), 0), (0, 2**31 - 5)])
def test_positions_reach_the_limits_of_32_bits(engine: Any, q_start: int, k_start: int) -> None:
    starts = {"q_start": torch.tensor([q_start]), "k_start": torch.tensor([k_start])}
    assert engine.attention(*qkv(), causal=False, **starts).isfinite().all()
    with pytest.raises((ValueError, RuntimeError), match="position"):
        engine.attention(*qkv(), causal=False, q_start=torch.tensor([-(2**31) - 1]))
