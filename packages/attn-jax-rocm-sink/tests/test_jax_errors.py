"""Bad calls name the value and what is supported, before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _engines, attention
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call, UnsupportedProblem
from attn_spec._errors import UnknownName
from jax_calls import jax_arrays, make_call

ONES = jnp.ones

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": ONES((2, 4, 5))}, ValueError, r"q must have 4 axes \[B, H, S, D\]; got shape \[2, 4, 5\]"),
    ({"q": ONES((2, 4, 5, 7))}, ValueError, "head dim must agree; got q 7, k 6"),
    ({"q": ONES((2, 3, 5, 6))}, ValueError, "multiple of kv heads; got 3 query heads and 2 kv heads"),
    ({"q": ONES((2, 4, 5, 6), jnp.bfloat16)}, TypeError, "q is bfloat16 and k is float32"),
    ({"q": ONES((2, 4, 5, 6), jnp.int32)}, TypeError, "q has dtype int32; supported: float32, bfloat16, float16"),
    ({"q": np.ones((2, 4, 5, 6))}, TypeError, "q has dtype float64"),
    ({"q": [1.0]}, TypeError, "q must be a jax.Array or a numpy.ndarray; got list"),
    ({"v": ONES((2, 2, 8, 3))}, ValueError, "keys must agree; got k 9, v 8"),
    ({"key_padding_mask": ONES((2, 9))}, TypeError, "key_padding_mask must be bool"),
    ({"key_padding_mask": ONES((2, 8), bool)}, ValueError, r"key_padding_mask must have shape \[B, T\] = \[2, 9\]"),
    ({"kv_lengths": ONES(2)}, TypeError, "kv_lengths must be int32 or int64; got float32"),
    ({"kv_lengths": ONES(3, int)}, ValueError, r"kv_lengths must have shape \[B\] = \[2\]; got \[3\]"),
    ({"kv_lengths": jnp.array([3, 10])}, ValueError, r"kv_lengths must lie in \[0, 9\]; got \[3, 10\]"),
    ({"kv_lengths": -1}, ValueError, r"kv_lengths must lie in \[0, 9\]; got -1"),
    ({"kv_lengths": True}, TypeError, "kv_lengths must be an integer"),
    ({"q_start": 2**31}, ValueError, "q_start must be an integer within 32 bits"),
    ({"q_start": np.array([0, 2**33])}, ValueError, "q_start must lie in"),
    ({"q_start": 1.5}, TypeError, "q_start must be a jax.Array"),
    ({"k_start": -1}, ValueError, "k_start must be 0 or more; got -1"),
    ({"k_start": jnp.array([0, -4])}, ValueError, "k_start must lie in"),
    ({"sinks": ONES(3)}, ValueError, r"sinks must have shape \[H\] = \[4\]; got \[3\]"),
    ({"bias": ONES((5, 9))}, ValueError, "bias must have shape"),
    ({"bias": ONES((1, 1, 5, 9), bool)}, TypeError, "bias has dtype bool"),
    ({"scale": np.nan}, ValueError, "scale must be a finite number or None; got nan"),
    ({"window": (-1, 0)}, ValueError, "window sides"),
    ({"window": (2**40, None)}, ValueError, r"window sides must be at most 2\*\*31 - 1 .*; got \(1099511627776, None\)"),
    ({"q_start": -(2**31)}, ValueError, r"q_start must be an integer within 32 bits, .*; got -2147483648"),
    ({"scale": 1e300}, ValueError, r"scale must be a finite number or None; got 1e\+300 \(it must be finite in float32"),
    ({"window": 3}, TypeError, "window must be"),
    ({"dropout_p": 1.5, "dropout_seed": 1}, ValueError, r"dropout_p must lie in \[0, 1\]; got 1.5"),
    ({"dropout_p": 0.5}, ValueError, "dropout_p > 0 needs dropout_seed"),
    ({"dropout_p": 0.5, "dropout_seed": 2**64}, ValueError, "dropout_seed must lie in"),
    ({"dropout_p": 0.5, "dropout_seed": 1.5}, TypeError, "dropout_seed must be an integer"),
    ({"dropout_p": 0.5, "dropout_seed": jnp.zeros(3, jnp.uint32)}, TypeError, r"got uint32 \[3\]"),
    ({"scale": jnp.asarray(1j)}, TypeError, "scale must be a real number; got Array"),
    ({"scale": jnp.asarray(True)}, TypeError, "scale must be a real number; got Array"),
    ({"scale": np.asarray("half")}, TypeError, "scale must be a real number; got array"),
    ({"engine": ["host"]}, TypeError, r"engine must be a string or None; got \['host'\]"),
    ({"contract": ["x"]}, TypeError, r"contract must be a string or None; got \['x'\]"),
    ({"contract": "ordered-v0"}, UnknownName, "unknown contract 'ordered-v0'; known: ordered-v1"),
    ({"engine": "tpu"}, UnknownName, "unknown engine of attn_jax_rocm_sink 'tpu'; known: host.*, xla"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**{**jax_arrays(make_call()), **change})


def test_bad_input_is_found_when_traced() -> None:
    arrays = jax_arrays(make_call())
    with pytest.raises(ValueError, match="head dim must agree"):
        jax.jit(lambda q: attention(**{**arrays, "q": q}))(ONES((2, 4, 5, 7)))


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"scale": 0.5}, {"window": (1, 0)}, {"dropout_p": 0.5, "dropout_seed": 1}, {"return_lse": True}]
)
def test_traced_options_are_told_to_be_static(options: dict[str, Any]) -> None:
    arrays = jax_arrays(make_call())
    name = next(iter(options))
    hint = ".*multiply q by it" if name == "scale" else ""
    with pytest.raises(TypeError, match=rf"attention: {name} must be known when traced: .* static_argnames, here \['{name}'\]{hint}"):
        jax.jit(attention)(**arrays, **options)
    assert jax.jit(attention, static_argnames=name)(**arrays, **options) is not None


def test_traced_lengths_out_of_range_are_invalid_arguments() -> None:
    arrays = jax_arrays(make_call())
    run = jax.jit(lambda lengths: attention(**arrays, kv_lengths=lengths))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: attn_jax_rocm_sink: .*kv_lengths"):
        jax.block_until_ready(run(jnp.array([3, 10])))
    assert run(jnp.array([3, 9])).shape == (2, 4, 5, 3)


@pytest.mark.parametrize("engine", [None, "xla"])
@pytest.mark.parametrize("form", [int, lambda start: np.array([0, start]), lambda start: jnp.array([0, start], jnp.int32)])
@pytest.mark.parametrize(("name", "rows"), [("q_start", 5), ("k_start", 9)])
def test_known_positions_beyond_32_bits_are_named(name: str, rows: int, form: Any, engine: str | None) -> None:
    arrays = jax_arrays(make_call())
    last = 2**31 - rows
    with pytest.raises(ValueError, match=rf"{name}\b.*{last + 1}"):
        attention(**arrays, **{name: form(last + 1)}, engine=engine)
    assert attention(**arrays, **{name: form(last)}, engine=engine).shape == (2, 4, 5, 3)


def test_traced_positions_beyond_32_bits_are_invalid_arguments() -> None:
    arrays = jax_arrays(make_call())
    run = jax.jit(lambda start: attention(**arrays, k_start=start))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: attn_jax_rocm_sink: key positions"):
        jax.block_until_ready(run(jnp.array([0, 2**31 - 1])))


def test_second_derivatives_are_refused_by_name() -> None:
    arrays = jax_arrays(make_call())
    rest = {name: arrays[name] for name in ("k", "v")}

    def first(q: jax.Array) -> jax.Array:
        return jax.grad(lambda q: (attention(q, **rest) ** 2).sum())(q).sum()

    with pytest.raises(NotImplementedError, match=r"attn_jax_rocm_sink: .* second derivative"):
        jax.grad(first)(arrays["q"])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, **rest), (arrays["q"],), (arrays["q"],))


def test_what_no_engine_runs_is_refused_with_the_reasons_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_jax_rocm_sink._attention.platform", lambda arrays, fallback: "tpu")
    with pytest.raises(UnsupportedProblem, match=r"device tpu \(supported: cpu\)") as error:
        attention(**jax_arrays(make_call()), contract="sm90-v1")
    assert error.value.problem is not None


def test_an_engine_that_is_not_usable_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(_engines.ENGINES["host"], unavailable=lambda: "the library is gone")
    monkeypatch.setitem(_engines.ENGINES, "host", broken)
    for engine in (None, "host"):
        with pytest.raises(UnsupportedProblem, match="lowering for platform cpu, engine host: the library is gone"):
            jax.jit(lambda arrays, engine=engine: attention(**arrays, engine=engine))(jax_arrays(make_call()))


@pytest.mark.skipif(_engines.ENGINES["ck"].unavailable() is None, reason="the ck engine runs here")
def test_what_this_machine_lacks_stands_beside_the_other_reasons() -> None:
    with pytest.raises(UnsupportedProblem) as error:
        attention(**jax_arrays(make_call()), engine="ck")
    dtype, state = error.value.reasons
    assert dtype.startswith("dtype float32") and state == _engines.ENGINES["ck"].unavailable()


def test_the_backend_refuses_what_it_lacks() -> None:
    call = Call("joint_attn_softmax", {"scores": np.zeros((1, 3), np.float32)})
    with pytest.raises(UnsupportedProblem, match=r"operator joint_attn_softmax \(supported: attention\)"):
        BACKEND.evaluate(call)
    assert BACKEND.reasons(call.problem()) == ("operator joint_attn_softmax (supported: attention)",)
    assert BACKEND.reasons(make_call().problem()) == ()
    assert "not on cuda" in str(BACKEND.unavailable("cuda"))
    with pytest.raises(UnknownName, match="known: host"):
        BACKEND.capabilities("ck")


@pytest.mark.parametrize("empty", [{"batch": 0}, {"queries": 0}, {"keys": 0}])
def test_empty_axes_run(empty: dict[str, int]) -> None:
    sizes = {"batch": 2, "queries": 3, "keys": 4} | empty
    q = ONES((sizes["batch"], 4, sizes["queries"], 6))
    k = ONES((sizes["batch"], 2, sizes["keys"], 6))
    mask = ONES((sizes["batch"], sizes["keys"]), bool)

    def loss(q: jax.Array, k: jax.Array, sinks: jax.Array) -> jax.Array:
        out, lse = attention(q, k, k, sinks=sinks, key_padding_mask=mask, return_lse=True)
        return out.sum() + lse.sum()

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, jnp.full(4, 0.25))
    rows = sizes["batch"] * sizes["queries"] * 4
    if sizes["keys"] == 0:
        assert value == 0.25 * rows and gradients[2].tolist() == [rows / 4] * 4
    elif rows == 0:
        assert value == 0.0 and gradients[2].tolist() == [0.0] * 4
    assert [g.shape for g in gradients] == [q.shape, k.shape, (4,)]
