"""Validation: the Problem that a call describes. Messages of bad calls are pinned for every backend in attn_shared_tests.test_errors."""

from __future__ import annotations

import numpy as np
import pytest
from attn_spec import Call, bfloat16, get_op
from attn_spec._errors import UnknownName
from attn_spec._validation import ArrayInfo, describe

Q, K, V = ArrayInfo((2, 4, 5, 8), "bfloat16"), ArrayInfo((2, 2, 7, 8), "bfloat16"), ArrayInfo((2, 2, 7, 3), "bfloat16")


def test_a_call_is_described_by_its_sizes() -> None:
    problem = describe("attention", {"q": Q, "k": K, "v": V}, {"causal": True}, gradient=True)
    assert (problem.batch, problem.heads, problem.kv_heads, problem.queries, problem.keys) == (2, 4, 2, 5, 7)
    assert (problem.head_dim, problem.value_dim, problem.dtype, problem.contract) == (8, 3, "bfloat16", "ordered-v1")
    assert problem.features == {"causal", "gradient"}


@pytest.mark.parametrize(
    ("options", "features"),
    (
        ({"causal": False}, set()),
        ({"causal": False, "window": (None, None)}, set()),
        ({"causal": False, "window": (3, None)}, {"window"}),
        ({"causal": False, "dropout_p": 0.0, "dropout_seed": 3}, set()),
        ({"causal": False, "dropout_p": 0.1}, {"dropout"}),
        ({"causal": False, "return_lse": True}, {"return_lse"}),
        ({"causal": False, "scale": 0.0}, set()),
    ),
)
def test_only_used_options_are_features(options: dict[str, object], features: set[str]) -> None:
    assert describe("attention", {"q": Q, "k": K, "v": V}, options).features == features


@pytest.mark.parametrize("start", (3, 0, -3))
def test_a_start_is_a_feature(start: int) -> None:
    assert "q_start" in describe("attention", {"q": Q, "k": K, "v": V}, {"q_start": start}).features


def test_packed_and_joint_calls_count_totals() -> None:
    q, k = ArrayInfo((5, 4, 8), "float32"), ArrayInfo((6, 2, 8), "float32")
    offsets = ArrayInfo((4,), "int32")
    packed = describe("attention_varlen", {"q": q, "k": k, "v": k, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets})
    assert (packed.batch, packed.queries, packed.keys) == (3, 5, 6)
    text, image = ArrayInfo((1, 2, 8, 4), "float32"), ArrayInfo((1, 2, 16, 4), "float32")
    arrays = {f"{part}_{side}": info for part in "qkv" for side, info in (("txt", text), ("img", image))}
    joint = describe("joint_attention", {**arrays, "prompt_mask": ArrayInfo((1, 8), "bool")})
    assert (joint.queries, joint.keys) == (24, 24) and joint.features == {"prompt_mask"}


def test_devices_must_agree_and_are_named() -> None:
    with pytest.raises(ValueError, match="one device; got q on cpu, k on cuda, v on cpu"):
        describe("attention", {"q": Q, "k": ArrayInfo(K.shape, "bfloat16", "cuda"), "v": V})


def test_a_call_describes_its_own_problem() -> None:
    call = Call("joint_attn_softmax", {"scores": np.zeros((2, 3, 4), bfloat16)}, wrt=("scores",))
    problem = call.problem("cuda")
    assert (problem.batch, problem.queries, problem.keys, problem.dtype, problem.device) == (2, 3, 4, "bfloat16", "cuda")
    assert problem.features == {"gradient"}


def test_an_empty_name_of_a_contract_is_no_default() -> None:
    with pytest.raises(UnknownName, match="unknown contract ''"):
        describe("attention", {"q": Q, "k": K, "v": V}, contract="")
    with pytest.raises(UnknownName, match="unknown contract ''"):
        get_op("attention", contract="")


def test_what_is_no_name_is_no_contract() -> None:
    for bad in (5, ["ordered-v1"]):
        with pytest.raises(UnknownName, match="unknown contract"):
            describe("attention", {"q": Q, "k": K, "v": V}, contract=bad)  # type: ignore[arg-type]


def test_a_truth_value_is_no_probability() -> None:
    with pytest.raises(ValueError, match=r"dropout_p must lie in \[0, 1\]; got True"):
        describe("attention", {"q": Q, "k": K, "v": V}, {"dropout_p": True})


def test_a_missing_input_is_named() -> None:
    with pytest.raises(TypeError, match="attention: missing k, v"):
        describe("attention", {"q": Q})


def test_an_argument_that_the_operator_does_not_have_is_named() -> None:
    array = np.zeros((1, 2, 4, 8), np.float32)
    arrays = dict.fromkeys("qkv", array)
    with pytest.raises(TypeError, match=r"attention: unknown argument 'casual'; known: q, k, v, .*causal"):
        Call("attention", arrays, {"casual": False}).problem()
    with pytest.raises(TypeError, match="attn: unknown argument 'sinks'; known: q, k, v, causal, scale"):
        Call("attn", {**arrays, "sinks": array}).problem()
    with pytest.raises(TypeError, match="attention: q must be a numpy array; got list"):
        Call("attention", {**arrays, "q": [1]}).problem()  # type: ignore[dict-item]
    for name in ("w", "sinks"):
        with pytest.raises(ValueError, match=rf"wrt must name arrays of the call that have a gradient \(q, k, v\); got '{name}'"):
            Call("attention", arrays, wrt=(name,))


def test_messages_name_the_function_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"^attn: q is bfloat16 and v is float32"):
        describe("attn", {"q": Q, "k": K, "v": ArrayInfo(V.shape, "float32")})
    with pytest.raises(TypeError, match=r"^attention_fp32: q is bfloat16 and v is float32"):
        describe("attention", {"q": Q, "k": K, "v": ArrayInfo(V.shape, "float32")}, caller="attention_fp32")
    with pytest.raises(TypeError, match=r"^attention: q_start must be an integer or an integer array .*; got 1.5"):
        describe("attention", {"q": Q, "k": K, "v": V}, {"q_start": 1.5})
