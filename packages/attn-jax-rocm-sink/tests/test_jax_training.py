"""A GPT-OSS-shaped layer trains under jit on the host engine, and every step's attention replays through the reference byte for byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention
from attn_spec import Call
from attn_spec._errors import ContractViolation
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_same
from jax_calls import bits

H, K, D, WINDOW = 64, 8, 64, 128
TOKENS, SHORT, WIDTH = 136, 16, 24
"""The window hides keys from the last rows of the tokens, and none of the short ones."""
STEPS, RATE = 50, 0.3
NAMES = ("q", "k", "v", "sinks")
OPTIONS = {"causal": True, "window": (WINDOW - 1, None), "return_lse": True}

Parameters = dict[str, jax.Array]
Data = tuple[jax.Array, jax.Array]


def parameters(dtype: Any) -> Parameters:
    rng = np.random.default_rng(0)
    heads = {"q": H, "k": K, "v": K}
    projections = {name: rng.standard_normal((WIDTH, count, D)) / WIDTH**0.5 for name, count in heads.items()}
    projections["o"] = rng.standard_normal((H, D, WIDTH)) / (H * D) ** 0.5
    found = {name: jnp.asarray(value, dtype) for name, value in projections.items()}
    return found | {"sinks": jnp.asarray(rng.standard_normal(H), jnp.float32)}


def data(tokens: int, dtype: Any) -> Data:
    """The layer learns to give each token the one before it."""
    x = np.random.default_rng(1).standard_normal((1, tokens, WIDTH))
    return jnp.asarray(x, dtype), jnp.asarray(np.roll(x, 1, axis=1), jnp.float32)


def project(weights: Parameters, x: jax.Array) -> dict[str, jax.Array]:
    """q [B, H, S, D], k and v [B, K, S, D], and the sinks."""
    return {name: jnp.einsum("bse,ehd->bhsd", x, weights[name]) for name in ("q", "k", "v")} | {"sinks": weights["sinks"]}


def attend(inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    out, lse = attention(**inputs, **OPTIONS, engine="host")
    return out, lse


def loss(weights: Parameters, out: jax.Array, target: jax.Array) -> jax.Array:
    return ((jnp.einsum("bhsd,hde->bse", out, weights["o"]).astype(jnp.float32) - target) ** 2).mean()


@jax.jit
def step(weights: Parameters, batch: Data) -> tuple[Parameters, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """One step of gradient descent: new weights, loss, the attention's inputs and cotangent, and its results."""
    x, target = batch
    inputs, to_weights = jax.vjp(lambda weights: project(weights, x), weights)
    (out, lse), to_inputs = jax.vjp(attend, inputs)
    value, to_out = jax.vjp(lambda weights, out: loss(weights, out, target), weights, out)
    from_output, dout = to_out(jnp.ones((), jnp.float32))
    (dinputs,) = to_inputs((dout, jnp.zeros_like(lse)))
    (from_attention,) = to_weights(dinputs)
    updated = jax.tree.map(lambda weight, a, b: (weight - RATE * (a + b)).astype(weight.dtype), weights, from_output, from_attention)
    results = {"out": out, "lse": lse} | {f"d{name}": dinputs[name] for name in NAMES}
    return updated, value, inputs | {"dout": dout}, results


def replay(captured: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The same attention, forward and backward, in the reference's host kernels."""
    arrays = {name: bits(captured[name]) for name in NAMES}
    cotangents = {"out": bits(captured["dout"])}
    return get_backend("attn_reference").evaluate(Call("attention", arrays, OPTIONS, cotangents, NAMES), engine="host")


def check(captured: dict[str, jax.Array], results: dict[str, jax.Array], what: str) -> None:
    assert_same({name: bits(value) for name, value in results.items()}, replay(captured), what)


def check_the_window(captured: dict[str, jax.Array], results: dict[str, jax.Array]) -> None:
    """Without it no other rows change than those that lie beyond it."""
    out, lse = attention(**{name: captured[name] for name in NAMES}, causal=True, return_lse=True)
    for name, value in {"out": out, "lse": lse}.items():
        differs = (bits(value) != bits(results[name])).reshape(H, TOKENS, -1).any(-1)
        assert differs[:, WINDOW:].all() and not differs[:, :WINDOW].any(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_of_training_replays_in_the_reference(dtype: str) -> None:
    weights, batch = parameters(dtype), data(TOKENS, dtype)
    before, losses = weights, []
    for index in range(STEPS):
        weights, value, captured, results = step(weights, batch)
        check(captured, results, f"step {index}")
        losses.append(float(value))
    check_the_window(captured, results)
    assert losses[-1] < 0.5 * losses[0] and all(np.isfinite(losses))
    for name in ("sinks", "q", "k", "v", "o"):
        assert not np.array_equal(bits(weights[name]), bits(before[name])), f"{name} did not move"


def test_the_captured_step_is_the_gradient_of_the_layer() -> None:
    weights, (x, target) = parameters("float32"), data(SHORT, "float32")
    gradient = jax.jit(jax.grad(lambda weights: loss(weights, attend(project(weights, x))[0], target)))(weights)
    updated = step(weights, (x, target))[0]
    for name, value in gradient.items():
        moved = (np.asarray(weights[name], np.float64) - np.asarray(updated[name], np.float64)) / RATE
        assert np.abs(np.asarray(value)).max() > 1e-4
        # The step adds a rounding of the weight, 2^-24 of up to 4, divided by the rate.
        np.testing.assert_allclose(moved, np.asarray(value), atol=1e-5)


@pytest.mark.parametrize("name", ["sinks", "dout"])
def test_a_replay_of_other_data_fails(name: str) -> None:
    _, _, captured, results = step(parameters("float32"), data(SHORT, "float32"))
    with pytest.raises(ContractViolation):
        check(captured | {name: captured[name] + 1.0}, results, name)
