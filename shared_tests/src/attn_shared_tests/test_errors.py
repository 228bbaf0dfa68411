"""Errors: bad input is named before any work, with what is supported; an option that a backend lacks raises and is never dropped."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call, UnsupportedProblem
from attn_spec._arrays import from_float32
from attn_spec._errors import UnknownName
from attn_spec._operators import OPERATORS
from attn_spec.testing.inputs import Sizes, random_call
from attn_spec.testing.runner import Evaluate, Refused, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites

F32 = np.float32
BASE = problems.attention()
ONE = problems.attention(batch=2, heads=2, kv_heads=2, queries=2, keys=2)
PACKED = problems.varlen((2, 3))
JOINT = problems.joint()


def _attention(**changes: Any) -> Call:
    return problems.edited(BASE, **changes)


def _zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD: dict[str, tuple[Call, type[Exception] | tuple[type[Exception], ...], str]] = {
    "rank of q": (_attention(q=_zeros(2, 5, 8)), ValueError, r"q must have 4 axes \[B, H, S, D\]; got shape \[2, 5, 8\]"),
    "rank of v": (_attention(v=_zeros(2, 7, 8)), ValueError, r"v must have 4 axes .*\[2, 7, 8\]"),
    "batch": (_attention(q=_zeros(3, 4, 5, 8)), ValueError, r"batch must agree; got q 3, k 2, v 2"),
    "head dim": (_attention(k=_zeros(2, 2, 7, 9)), ValueError, r"head dim must agree; got q 8, k 9"),
    "head dim of zero": (_attention(q=_zeros(2, 4, 5, 0), k=_zeros(2, 2, 7, 0)), ValueError, r"head dim of q must be at least 1; got 0"),
    "value dim of zero": (_attention(v=_zeros(2, 2, 7, 0)), ValueError, r"head dim of v must be at least 1; got 0"),
    "keys": (_attention(v=_zeros(2, 2, 6, 8)), ValueError, r"keys must agree; got k 7, v 6"),
    "kv heads": (_attention(v=_zeros(2, 1, 7, 8)), ValueError, r"kv heads must agree; got k 2, v 1"),
    "head ratio 3 to 2": (_attention(q=_zeros(2, 3, 5, 8)), ValueError, r"positive multiple of kv heads; got 3 query heads and 2 kv heads"),
    "head ratio 33 to 2": (_attention(q=_zeros(2, 33, 5, 8)), ValueError, r"got 33 query heads and 2 kv heads"),
    "no kv heads": (_attention(k=_zeros(2, 0, 7, 8), v=_zeros(2, 0, 7, 8)), ValueError, r"got 4 query heads and 0 kv heads"),
    "float64": (_attention(q=_zeros(2, 4, 5, 8, dtype=np.float64)), TypeError, r"float64.*supported: float32, bfloat16, float16"),
    "integers": (_attention(q=_zeros(2, 4, 5, 8, dtype=np.int32)), TypeError, r"q has dtype int32; supported: float32, bfloat16, float16"),
    "mixed dtypes": (
        _attention(v=from_float32(BASE.arrays["v"], "bfloat16")),
        TypeError,
        r"q is float32 and v is bfloat16; they must share one dtype",
    ),
    "mask dtype": (
        _attention(key_padding_mask=_zeros(2, 7, dtype=np.int32)),
        TypeError,
        r"key_padding_mask must be bool \(True keeps the key\); got int32",
    ),
    "mask rank 3": (_attention(key_padding_mask=_zeros(2, 1, 7, dtype=bool)), ValueError, r"shape \[B, T\] = \[2, 7\]; got \[2, 1, 7\]"),
    "mask rank 4": (_attention(key_padding_mask=_zeros(2, 1, 5, 7, dtype=bool)), ValueError, r"got \[2, 1, 5, 7\]"),
    "mask of scores where B = H = S": (
        problems.edited(ONE, key_padding_mask=_zeros(2, 2, 2, 2, dtype=bool)),
        ValueError,
        r"shape \[B, T\] = \[2, 2\]; got \[2, 2, 2, 2\]",
    ),
    "mask too short": (_attention(key_padding_mask=_zeros(2, 5, dtype=bool)), ValueError, r"got \[2, 5\]"),
    "lengths dtype": (_attention(kv_lengths=_zeros(2)), TypeError, r"kv_lengths must be int32 or int64; got float32"),
    "lengths shape": (_attention(kv_lengths=_zeros(3, dtype=np.int32)), ValueError, r"kv_lengths must have shape \[B\] = \[2\]; got \[3\]"),
    "q_start shape": (_attention(q_start=_zeros(2, 1, dtype=np.int64)), ValueError, r"q_start must have shape \[B\]"),
    "q_start not an integer": (_attention(q_start=1.5), TypeError, r"q_start must be .*(1.5|float)"),
    "negative k_start": (_attention(k_start=-1), ValueError, r"k_start must be 0 or more; got -1"),
    "sinks shape": (_attention(sinks=_zeros(3)), ValueError, r"sinks must have shape \[H\] = \[4\]; got \[3\]"),
    "sinks dtype": (_attention(sinks=_zeros(4, dtype=np.int64)), TypeError, r"sinks have dtype int"),
    "bias shape": (_attention(bias=_zeros(1, 3, 5, 7)), ValueError, r"bias must have shape .* = \[2, 4, 5, 7\]; got \[1, 3, 5, 7\]"),
    "bias too short": (_attention(bias=_zeros(2, 1, 1, 6)), ValueError, r"got \[2, 1, 1, 6\]"),
    "boolean bias": (_attention(bias=_zeros(1, 1, 5, 7, dtype=bool)), TypeError, r"bias has dtype bool.*key_padding_mask, or -inf"),
    "negative window": (_attention(window=(-1, 0)), ValueError, r"window sides .* must be 0 or more; got \(-1, 0\)"),
    "window beyond 32 bits": (
        _attention(window=(2**40, None)),
        ValueError,
        r"window sides must be at most 2\*\*31 - 1 .*got \(10995",
    ),
    "q_start beyond 32 bits": (_attention(q_start=-(2**31)), ValueError, r"q_start must be .*from -\(2\*\*31 - 1\).*; got -2147483648"),
    "scale beyond float32": (_attention(scale=1e300), ValueError, r"scale must be .*; got 1e\+300 \(it must be finite in float32"),
    "window of one number": (_attention(window=4), TypeError, r"window must be \(left, right\).*got 4"),
    "scale of NaN": (_attention(scale=float("nan")), ValueError, r"scale must be a finite number or None; got nan"),
    "scale of infinity": (_attention(scale=float("inf")), ValueError, r"scale must be a finite number or None; got inf"),
    "dropout above one": (_attention(dropout_p=1.5), ValueError, r"dropout_p must lie in \[0, 1\]; got 1.5"),
    "negative dropout": (_attention(dropout_p=-0.1), ValueError, r"dropout_p must lie in \[0, 1\]; got -0.1"),
    "dropout seed": (_attention(dropout_p=0.5, dropout_seed=-1), ValueError, r"dropout_seed must lie in \[0, 2\*\*64\); got -1"),
    "row without keys": (Call("joint_attn_softmax", {"scores": _zeros(2, 0)}), ValueError, r"at least one key; got T=0"),
    "scalar scores": (Call("joint_attn_softmax", {"scores": np.array(1, F32)}), ValueError, r"at least one axis"),
    "mask for scores without a batch": (
        Call("joint_attn_softmax", {"scores": _zeros(4), "key_padding_mask": _zeros(1, 4, dtype=bool)}),
        ValueError,
        r"needs scores with a batch axis",
    ),
    "mask of another batch": (
        Call("joint_attn_softmax", {"scores": _zeros(2, 3, 4), "key_padding_mask": _zeros(3, 4, dtype=bool)}),
        ValueError,
        r"\[2, 4\]; got \[3, 4\]",
    ),
    "score dtype": (Call("joint_attn_softmax", {"scores": _zeros(2, 4, dtype=np.float64)}), TypeError, r"float64"),
    "qk head dims": (
        Call("joint_attn_qk_gemm", {"q": _zeros(1, 1, 2, 3), "k": _zeros(1, 1, 2, 4)}),
        ValueError,
        r"head dim must agree; got q 3, k 4",
    ),
    "av keys": (
        Call("joint_attn_av_gemm", {"probs": _zeros(1, 1, 2, 3), "v": _zeros(1, 1, 4, 2)}),
        ValueError,
        r"keys must agree; got probs 3, v 4",
    ),
    "probs dtype": (
        Call("joint_attn_av_gemm", {"probs": from_float32(_zeros(1, 1, 2, 3), "bfloat16"), "v": _zeros(1, 1, 3, 2)}),
        TypeError,
        r"probs must be float32 or the dtype of v",
    ),
    "offsets dtype": (problems.edited(PACKED, cu_seqlens_q=_zeros(3)), TypeError, r"cu_seqlens_q must be int32 or int64; got float32"),
    "offsets of another batch": (
        problems.edited(PACKED, cu_seqlens_k=_zeros(2, dtype=np.int32)),
        ValueError,
        r"cu_seqlens_k must have shape",
    ),
    "empty offsets": (
        problems.edited(PACKED, cu_seqlens_q=_zeros(0, dtype=np.int32)),
        ValueError,
        r"cu_seqlens_q must have shape \[segments \+ 1\]; got \[0\]",
    ),
    "dense q for packed": (problems.edited(PACKED, q=_zeros(1, 4, 5, 8)), ValueError, r"q must have 3 axes"),
    "image length": (problems.edited(JOINT, v_img=_zeros(2, 2, 3, 8)), ValueError, r"img length must agree"),
    "heads of text and image": (problems.edited(JOINT, q_img=_zeros(2, 4, 16, 8)), ValueError, r"heads of q must agree"),
    "prompt mask": (
        problems.edited(JOINT, prompt_mask=_zeros(2, 16, dtype=bool)),
        ValueError,
        r"prompt_mask must have shape \[B, T_txt\] = \[2, 8\]; got \[2, 16\]",
    ),
    "unknown contract": (
        replace(BASE, contract="ordered-v0"),
        UnknownName,
        r"unknown contract 'ordered-v0'; known: ordered-v1, ordered-v2, sm90-v1",
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mask": {"key_padding_mask": np.zeros((2, 7), bool)},
    "lengths": {"kv_lengths": np.array([1, 2])},
    "bias": {"bias": np.full((1, 1, 1, 7), -np.inf, F32)},
    "window": {"window": (0, 0)},
    "sinks": {"sinks": np.full(4, 3, F32)},
    "scale": {"scale": 0.0},
    "causal": {"causal": True, "q_start": 0},
    "dropout": {"dropout_p": 1.0, "dropout_seed": 1},
}


def check_bad(evaluate: Evaluate, name: str) -> None:
    call, expected, message = BAD[name]
    try:
        evaluate(call)
    except expected as error:
        assert re.search(message, str(error)), f"{name}: the message is {error}"
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{name} was accepted")


def check_option(evaluate: Evaluate, name: str) -> None:
    """An option changes the result; a backend without it refuses instead."""
    plain = problems.attention(causal=False)
    found, without = evaluate(problems.edited(plain, **OPTIONS[name])), evaluate(plain)
    assert (found["out"] != without["out"]).any(), f"{name} changes nothing"


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(backend: Runner, name: str) -> None:
    operators = backend.backend.capabilities(backend.engine).operators
    if BAD[name][0].op in operators:
        check_bad(backend.attempt, name)
        return
    expected = BAD[name][1]
    with pytest.raises((UnsupportedProblem, *(expected if isinstance(expected, tuple) else (expected,)))):
        backend.attempt(BAD[name][0])


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_never_ignored(backend: Runner, name: str) -> None:
    backend.run(check_option, name)


def test_a_call_without_an_input_is_refused(backend: Runner) -> None:
    with pytest.raises(TypeError, match="missing"):
        problems.edited(BASE, drop=("v",)).problem(backend.device)


@pytest.mark.parametrize("op", [name for name in OPERATORS if name != "attn"])
def test_capabilities_and_behaviour_agree(backend: Runner, op: str) -> None:
    """An operator that the capabilities list runs; one that they do not raises UnsupportedProblem with their reasons."""
    smallest: dict[str, Callable[[], Call]] = {
        "attention": lambda: problems.attention(return_lse=False),
        "attention_varlen": lambda: problems.varlen((2,), return_lse=False),
        "joint_attention": problems.joint,
        "qat_attention": lambda: random_call("qat_attention", "float32", Sizes(queries=2, head_dim=16)),
        "qat_attention_varlen": lambda: random_call("qat_attention_varlen", "float32", Sizes(queries=2, head_dim=16)),
        "joint_attn_softmax": lambda: problems.softmax((2, 3)),
        "joint_attn_qk_gemm": lambda: Call("joint_attn_qk_gemm", {"q": _zeros(1, 1, 2, 3), "k": _zeros(1, 1, 2, 3)}),
        "joint_attn_av_gemm": lambda: Call("joint_attn_av_gemm", {"probs": _zeros(1, 1, 2, 3), "v": _zeros(1, 1, 3, 2)}),
    }
    listed = op in backend.backend.capabilities(backend.engine).operators
    try:
        backend.evaluate(smallest[op]())
    except Refused as refusal:
        assert not listed or refusal.reasons, refusal
    else:
        assert listed, f"{backend.name} ran {op}, which its capabilities do not list"


def test_a_refusal_names_every_reason_and_who_could_run_it(backend: Runner) -> None:
    problem = replace(problems.attention().problem(backend.device), device="nowhere", dtype="float8")
    reasons = backend.reasons(problem)
    text = str(UnsupportedProblem(backend.backend.name, reasons, problem, ("somebody",)))
    assert any("nowhere" in reason for reason in reasons), reasons
    for part in (*reasons, str(problem), "somebody"):
        assert part in text


def test_the_input_check_catches_a_silent_backend(reference: Evaluate) -> None:
    assert_bites(check_bad, faulty.accepts_anything, reference, "head ratio 3 to 2")


def test_the_option_check_catches_a_dropped_option(reference: Evaluate) -> None:
    for name, fault in (
        ("mask", faulty.ignores_masks),
        ("bias", faulty.ignores_the_bias),
        ("window", faulty.ignores_the_window),
        ("sinks", faulty.drops_the_sink),
    ):
        assert_bites(check_option, fault, reference, name)
