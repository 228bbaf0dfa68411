"""``dot_product_attention``: close to ``jax.nn``, the bytes of ``attention``, and sinks; each comparison can fail."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention, dot_product_attention
from attn_spec._errors import ContractViolation, UnknownName
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_zero
from jax_calls import bits

B, T, S, N, K, D = 2, 6, 8, 4, 2, 5
RNG = np.random.default_rng(0)
Q, KEY, VALUE = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((B, T, N, D), (B, S, K, D), (B, S, K, D)))
WEIGHT = jnp.asarray(RNG.standard_normal((B, T, N, D)), jnp.float32)
BIAS = jnp.asarray(RNG.standard_normal((1, N, T, S)), jnp.float32)
MASK = np.random.default_rng(1).random((B, 1, T, S)) < 0.6
MASK[..., 0] = True
KEYS = jnp.asarray(np.random.default_rng(2).random((B, 1, 1, S)) < 0.6).at[..., 0].set(True)
SINKS = jnp.array([2.0, -8.0, 20.0, 0.0])

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"is_causal": True}),
    "lengths": ({}, {"is_causal": True, "query_seq_lengths": jnp.array([4, 6]), "key_value_seq_lengths": jnp.array([8, 3])}),
    "window": ({}, {"local_window_size": 2}),
    "window_sides": ({}, {"local_window_size": (3, 1), "scale": 0.3}),
    "bias_mask": ({"bias": BIAS}, {"mask": jnp.asarray(MASK)}),
    "bias_keys": ({"bias": BIAS[:, :1, :1]}, {"mask": KEYS}),
}


def head(t: Any) -> Any:
    """[B, T, N, H] to the layout of ``attention`` and back."""
    return jnp.swapaxes(t, 1, 2)


def results(function: Any, moving: dict[str, jax.Array], **options: Any) -> dict[str, np.ndarray]:
    """Output and the gradients of ``moving`` under jit."""

    @jax.jit
    def run(moving: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, pullback = jax.vjp(lambda moving: function(**moving, **options), moving)
        return out, pullback(WEIGHT)[0]

    out, gradients = run(moving)
    return {"out": bits(out)} | {f"d{name}": bits(value) for name, value in gradients.items()}


@pytest.mark.parametrize("case", CASES)
def test_it_is_close_to_jax_nn(case: str) -> None:
    moving, options = CASES[case]
    moving = {"query": Q, "key": KEY, "value": VALUE, **moving}
    ours, theirs = (results(function, moving, **options) for function in (dot_product_attention, jax.nn.dot_product_attention))
    for name, value in theirs.items():
        assert np.abs(value).max() > 0
        assert_close(ours[name], value, f"{case}: {name}", tolerance=3e-6)


def test_an_ignored_argument_is_not_close_to_jax_nn() -> None:
    plain = bits(dot_product_attention(Q, KEY, VALUE))
    for name, argument in {"mask": jnp.asarray(MASK), "is_causal": True, "local_window_size": 2, "bias": BIAS, "scale": 0.1}.items():
        theirs = jax.jit(lambda q, name=name, argument=argument: jax.nn.dot_product_attention(q, KEY, VALUE, **{name: argument}))(Q)
        with pytest.raises(ContractViolation):
            assert_close(plain, np.asarray(theirs), name, tolerance=3e-6)


EQUALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"causal": False}),
    "top_left": ({"is_causal": True, "local_window_size": (3, 1)}, {"causal": True, "window": (3, 1), "q_start": 0}),
    "key_mask": ({"mask": KEYS}, {"causal": False, "key_padding_mask": KEYS[:, 0, 0]}),
    "mask": ({"mask": jnp.asarray(MASK)}, {"causal": False, "bias": jnp.where(MASK, 0.0, -jnp.inf)}),
    "mask_bias": (
        {"mask": jnp.asarray(MASK), "bias": BIAS[:, :, :1]},
        {"causal": False, "bias": jnp.where(MASK, BIAS[:, :, :1], -jnp.inf)},
    ),
    "lengths": ({"key_value_seq_lengths": jnp.array([3, 0])}, {"causal": False, "kv_lengths": jnp.array([3, 0])}),
}


@pytest.mark.parametrize("case", EQUALS)
def test_it_has_the_bytes_of_attention(case: str) -> None:
    ours, theirs = EQUALS[case]
    out, lse = dot_product_attention(Q, KEY, VALUE, **ours, sinks=SINKS, return_residual=True)
    expected, expected_lse = attention(head(Q), head(KEY), head(VALUE), **theirs, sinks=SINKS, return_lse=True)
    assert_bytes(bits(head(out)), bits(expected), "out")
    assert_bytes(bits(head(lse)), bits(expected_lse), "lse")
    without = dot_product_attention(Q, KEY, VALUE, **ours)
    with pytest.raises(ContractViolation):
        assert_bytes(bits(head(without)), bits(expected), "a dropped sink")


def test_three_axes_are_one_batch_item() -> None:
    whole = dot_product_attention(Q[:1], KEY[:1], VALUE[:1], sinks=SINKS, is_causal=True, return_residual=True)
    alone = dot_product_attention(Q[0], KEY[0], VALUE[0], sinks=SINKS, is_causal=True, return_residual=True)
    for ours, expected in zip(alone, whole, strict=True):
        assert_bytes(bits(ours), bits(expected[0]), "[T, N, H]")


def test_rows_past_the_query_lengths_are_zero_whatever_they_hold() -> None:
    """The others have the bytes, and keys the gradients, of a call without those rows."""
    short = jnp.array([4, 0])
    poisoned = Q.at[0, 4:].set(jnp.nan).at[1].set(jnp.inf)
    moving = {"query": poisoned, "key": KEY, "value": VALUE, "sinks": SINKS}
    found = results(dot_product_attention, moving, query_seq_lengths=short, is_causal=True)
    for name in ("out", "dquery"):
        assert_zero(found[name][0, 4:], name)
        assert_zero(found[name][1], name)
    for name in ("dkey", "dvalue"):
        assert_zero(found[name][1], name)

    def alone(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> jax.Array:
        return dot_product_attention(query, key, value, sinks=sinks, is_causal=True)

    out, pullback = jax.vjp(alone, Q[:1, :4], KEY[:1], VALUE[:1], SINKS)
    assert_bytes(found["out"][:1, :4], bits(out), "out")
    for name, value in zip(("dquery", "dkey", "dvalue", "dsinks"), pullback(WEIGHT[:1, :4]), strict=True):
        ours = found[name] if name == "dsinks" else found[name][:1, :4] if name == "dquery" else found[name][:1]
        assert_bytes(ours, bits(value), name)
    lse = dot_product_attention(poisoned, KEY, VALUE, query_seq_lengths=short, return_residual=True)[1]
    assert (np.asarray(lse[0, 4:]) == -np.inf).all() and np.isfinite(np.asarray(lse[0, :4])).all()


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
@pytest.mark.parametrize("length", [-1, 9])
def test_traced_lengths_that_do_not_fit_are_nan(name: str, length: int) -> None:
    @jax.jit
    def run(lengths: jax.Array) -> Any:
        return dot_product_attention(Q, KEY, VALUE, **{name: lengths}, return_residual=True)

    for found in run(jnp.array([length, 4])):
        assert np.isnan(found[0]).all() and np.isfinite(found[1, :4]).all()


def test_keys_that_the_mask_hides_may_hold_anything() -> None:
    for mask in (KEYS.at[..., 5].set(False), jnp.asarray(MASK).at[..., 5].set(False)):
        moving = {"query": Q, "key": KEY, "value": VALUE}
        dirty = {"query": Q, "key": KEY.at[:, 5].set(jnp.nan), "value": VALUE.at[:, 5].set(jnp.inf)}
        clean, found = (results(dot_product_attention, arrays, mask=mask) for arrays in (moving, dirty))
        for name, value in clean.items():
            assert_bytes(found[name], value, name)


def test_a_row_that_sees_nothing_is_zero() -> None:
    mask = jnp.asarray(MASK).at[1, 0, 2].set(False)
    found = results(dot_product_attention, {"query": Q, "key": KEY, "value": VALUE}, mask=mask)
    assert_zero(found["out"][1, 2], "out")
    assert_zero(found["dquery"][1, 2], "dquery")


def test_the_gradient_of_a_broadcast_bias_is_summed_in_order() -> None:
    """A mask [B, 1, T, S] widens a bias [1, 1, 1, S]: the sum over batch and queries is one addition at a time, ascending."""
    arrays = {"query": Q, "key": KEY, "value": VALUE}
    narrow = BIAS[:, :1, :1]
    found = results(dot_product_attention, {**arrays, "bias": narrow}, mask=jnp.asarray(MASK))["dbias"]
    wide = results(dot_product_attention, {**arrays, "bias": jnp.where(MASK, narrow, -jnp.inf)})["dbias"]
    total, other = np.zeros(S, np.float32), np.zeros(S, np.float32)
    for item, row in np.ndindex(B, T):
        total += wide[item, 0, row]
        other += wide[B - 1 - item, 0, T - 1 - row]
    assert np.abs(total).max() > 0.01
    assert_bytes(found[0, 0, 0], total, "dbias")
    with pytest.raises(ContractViolation):
        assert_bytes(found[0, 0, 0], other, "another order")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": Q[0]}, ValueError, "must all have 4 axes, or all 3"),
        ({"mask": BIAS}, TypeError, "mask must be bool"),
        ({"mask": jnp.ones((B, 1, T, S - 1), bool)}, ValueError, r"mask must broadcast to \[B, N, T, S\]"),
        ({"bias": jnp.ones((3, 1, T, S))}, ValueError, r"bias must broadcast to \[B, N, T, S\]"),
        ({"query_seq_lengths": jnp.array([7, 1])}, ValueError, r"query_seq_lengths must lie in \[0, 6\]"),
        ({"query_seq_lengths": jnp.array([1.0, 1.0])}, TypeError, "query_seq_lengths must be int32 or int64"),
        ({"query_seq_lengths": jnp.array([1])}, ValueError, r"query_seq_lengths must be an integer or have shape"),
        ({"key_value_seq_lengths": jnp.array([9, 1])}, ValueError, r"key_value_seq_lengths must lie in \[0, 8\]; got 9"),
        ({"local_window_size": (-1, 0)}, ValueError, "window sides"),
        ({"implementation": "cudnn"}, UnknownName, "unknown engine"),
        ({"sinks": jnp.zeros(3)}, ValueError, "sinks must have shape"),
        ({"query": None}, TypeError, "query must be an array or what jnp.asarray makes one of; got None"),
        ({"bias": "none"}, TypeError, "bias must be an array or .*; got 'none'"),
        ({"mask": [[True], [True, False]]}, TypeError, "mask must be an array or"),
        ({"sinks": "none"}, TypeError, "sinks must be an array or .*; got 'none'"),
        ({"query_seq_lengths": 9}, ValueError, r"query_seq_lengths must lie in \[0, 6\]; got 9"),
        ({"query_seq_lengths": [5]}, ValueError, r"query_seq_lengths must be an integer or have shape \[B\] = \[2\]; got \[1\]"),
        ({"key_value_seq_lengths": True}, TypeError, "key_value_seq_lengths must be int32 or int64; got bool"),
        ({"key_value_seq_lengths": [1.5, 2.0]}, TypeError, "key_value_seq_lengths must be int32 or int64; got float32"),
        ({"is_causal": None}, TypeError, "is_causal must be True or False; got None"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dot_product_attention(**{"query": Q, "key": KEY, "value": VALUE, **change})


ARRAY_LIKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "query": ({"query": np.asarray(Q).tolist()}, {}),
    "query in float64": ({"query": np.asarray(Q, np.float64)}, {}),
    "bias of no axes": ({"bias": 0.5}, {"bias": jnp.full((1, 1, 1, 1), 0.5)}),
    "mask": ({"mask": MASK.tolist()}, {"mask": jnp.asarray(MASK)}),
    "lengths": (
        {"query_seq_lengths": [3, 2], "key_value_seq_lengths": (7, 1)},
        {"query_seq_lengths": jnp.array([3, 2]), "key_value_seq_lengths": jnp.array([7, 1])},
    ),
    "one length": (
        {"query_seq_lengths": 3, "key_value_seq_lengths": np.int64(7)},
        {"query_seq_lengths": jnp.array([3, 3]), "key_value_seq_lengths": jnp.array([7, 7])},
    ),
    "window": ({"local_window_size": np.int64(2)}, {"local_window_size": (2, 2)}),
    "sinks": ({"sinks": [2.0, -8.0, 20.0, 0.0]}, {"sinks": SINKS}),
}


@pytest.mark.parametrize("case", ARRAY_LIKES)
def test_what_jnp_asarray_takes_is_taken(case: str) -> None:
    likes, arrays = ({"query": Q, "key": KEY, "value": VALUE, **change} for change in ARRAY_LIKES[case])
    assert_bytes(bits(dot_product_attention(**likes)), bits(dot_product_attention(**arrays)), case)


def test_traced_options_name_static_argnames() -> None:
    with pytest.raises(TypeError, match=r"is_causal, scale, local_window_size must be known .* static_argnames, here \['is_causal'"):
        jax.jit(dot_product_attention)(Q, KEY, VALUE, is_causal=True, scale=0.5, local_window_size=2)


def test_the_plain_engine_is_close() -> None:
    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str) -> jax.Array:
        return dot_product_attention(Q, KEY, VALUE, is_causal=True, sinks=SINKS, implementation=implementation)

    assert_close(bits(run("xla")), np.asarray(run("host")), "xla", tolerance=3e-6)
