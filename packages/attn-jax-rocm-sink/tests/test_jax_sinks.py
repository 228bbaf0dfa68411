"""Sink arithmetic with known numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention


def one_row(scores: list[float], values: list[float], sink: float) -> tuple[jax.Array, ...]:
    """q = 1, so that k holds the scores; D = V = 1."""
    q = jnp.ones((1, 1, 1, 1), jnp.float32)
    k = jnp.array(scores, jnp.float32).reshape(1, 1, -1, 1)
    v = jnp.array(values, jnp.float32).reshape(1, 1, -1, 1)
    return q, k, v, jnp.array([sink], jnp.float32)


def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, **options: object) -> tuple[jax.Array, jax.Array]:
    return attention(q, k, v, sinks=sinks, scale=1.0, return_lse=True, **options)


@jax.jit
def sink_gradient(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    return jax.grad(lambda s: run(q, k, v, s)[0].sum())(sinks)


def test_two_keys_and_a_zero_sink() -> None:
    case = one_row([0.0, 0.0], [3.0, 6.0], 0.0)
    out, lse = run(*case)
    assert out.item() == pytest.approx(3.0, rel=1e-6)
    assert lse.item() == pytest.approx(np.log(3.0), rel=1e-6)
    assert sink_gradient(*case).item() == pytest.approx(-1.0, rel=1e-6)


def test_a_zero_sink_is_not_no_sink() -> None:
    case = one_row([0.0, 0.0], [3.0, 6.0], -np.inf)
    assert run(*case)[0].item() == pytest.approx(4.5, rel=1e-6)
    assert sink_gradient(*case).item() == 0.0


def test_a_large_sink_takes_nearly_all_mass() -> None:
    case = one_row([0.0], [1.0], 20.0)
    assert run(*case)[0].item() == pytest.approx(2.0611537e-9, rel=1e-5)
    assert sink_gradient(*case).item() == pytest.approx(-2.0611537e-9, rel=1e-5)


def test_a_sink_of_two() -> None:
    case = one_row([0.0], [1.0], 2.0)
    assert run(*case)[0].item() == pytest.approx(0.11920292, rel=1e-6)
    assert sink_gradient(*case).item() == pytest.approx(-0.10499359, rel=1e-6)


@pytest.mark.parametrize("options", [{"kv_lengths": 0}, {"key_padding_mask": np.zeros((1, 2), bool)}], ids=["kv_lengths", "mask"])
def test_a_row_without_keys_is_its_sink(options: dict[str, object]) -> None:
    q, k, v, sinks = one_row([1.0, 2.0], [3.0, np.nan], 0.5)
    out, lse = run(q, k, v, sinks, **options)
    assert np.asarray(out).tobytes() == np.zeros((1, 1, 1, 1), np.float32).tobytes()
    assert lse.item() == 0.5

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        out, lse = run(q, k, v, sinks, **options)
        return 7.0 * out.sum() + 3.0 * lse.sum()

    dq, dk, dv, dsinks = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)
    for gradient in (dq, dk, dv):
        assert np.asarray(gradient).tobytes() == bytes(gradient.nbytes)
    assert dsinks.item() == 3.0


@pytest.mark.parametrize("engine", ["host", "xla"])
@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_a_row_without_keys_takes_a_sink_that_is_not_finite(sink: float, engine: str) -> None:
    """out stays +0, LSE is the sink, q, k and v get zeros: only the sink's own gradient is NaN."""
    q, k, v, sinks = one_row([1.0, 2.0], [3.0, np.nan], sink)
    out, lse = run(q, k, v, sinks, kv_lengths=0, engine=engine)
    assert np.asarray(out).tobytes() == bytes(4)
    np.testing.assert_array_equal(np.asarray(lse), np.full((1, 1, 1), sink, np.float32))
    gradients = jax.grad(lambda *four: run(*four, kv_lengths=0, engine=engine)[0].sum(), (0, 1, 2, 3))(q, k, v, sinks)
    for gradient in gradients[:3]:
        assert np.asarray(gradient).tobytes() == bytes(gradient.nbytes)
    assert np.isnan(gradients[3]).all()


@pytest.mark.parametrize("engine", ["host", "xla"])
@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_a_row_with_keys_is_poisoned_by_a_sink_that_is_not_finite(sink: float, engine: str) -> None:
    """NaN at the visible pairs alone: a hidden key gets zeros."""
    q, k, v, sinks = one_row([1.0, 2.0], [3.0, 4.0], sink)
    out, lse = run(q, k, v, sinks, kv_lengths=1, engine=engine)
    assert np.isnan(out).all() and np.isnan(lse).all()
    dk, dv = jax.grad(lambda k, v: run(q, k, v, sinks, kv_lengths=1, engine=engine)[0].sum(), (0, 1))(k, v)
    for gradient in (dk, dv):
        assert np.isnan(gradient[0, 0, 0, 0]) and np.asarray(gradient)[0, 0, 1].tobytes() == bytes(4)


def test_a_row_without_keys_and_sink_is_dead() -> None:
    q, k, v, _ = one_row([1.0, 2.0], [3.0, 6.0], 0.0)
    out, lse = attention(q, k, v, kv_lengths=0, return_lse=True)
    assert out.item() == 0.0 and lse.item() == -np.inf


def test_the_lse_gradient_reaches_sink_and_scores() -> None:
    case = one_row([0.0, 0.0], [3.0, 6.0], 0.0)
    dk, dsinks = jax.grad(lambda q, k, v, s: run(q, k, v, s)[1].sum(), (1, 3))(*case)
    np.testing.assert_allclose(np.asarray(dk).ravel(), [1 / 3, 1 / 3], rtol=1e-6)
    assert dsinks.item() == pytest.approx(1 / 3, rel=1e-6)
