"""XLA's CPU threads flush subnormals; the handlers do not, and they leave XLA's own state as it was."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from attn_jax_rocm_sink import attention

TINY = np.float32(1e-42)


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    q = jnp.ones((1, 1, 2, 1), jnp.float32)
    k = jnp.zeros((1, 1, 1, 1), jnp.float32)
    return q, k, jnp.full((1, 1, 1, 1), TINY)


@jax.jit
def flushed(value: jax.Array) -> jax.Array:
    return value * jnp.float32(0.5) * jnp.float32(2.0)


def test_subnormal_values_pass_through() -> None:
    out = np.asarray(jax.jit(partial(attention, causal=False))(*inputs()))
    assert out.view(np.uint32).ravel().tolist() == [int(TINY.view(np.uint32))] * 2


def test_subnormal_gradients_are_kept() -> None:
    """The cotangent comes as data: XLA would flush one that it computes."""
    q, k, v = inputs()
    _, pullback = jax.vjp(lambda v: attention(q, k, v, causal=False), v)
    given = jax.jit(pullback)(jnp.asarray(np.full((1, 1, 2, 1), TINY)))[0]
    assert np.asarray(given).view(np.uint32).item() == 2 * int(TINY.view(np.uint32))


def test_the_state_of_the_calling_thread_is_restored() -> None:
    before = np.asarray(flushed(jnp.full((4,), TINY))).tobytes()
    jax.block_until_ready(jax.jit(attention)(*inputs()))
    assert np.asarray(flushed(jnp.full((4,), TINY))).tobytes() == before
    assert np.float32(TINY) * np.float32(1) == TINY


def test_a_chain_is_fused_and_products_are_not() -> None:
    """1 + 2^-12 squared needs the bit that a rounded product loses, so a chain without FMA would differ."""
    a = np.float32(1 + 2.0**-12)
    q = jnp.array([a, -1.0], jnp.float32).reshape(1, 1, 1, 2)
    k = jnp.array([a, a * a], jnp.float32).reshape(1, 1, 1, 2)
    _, lse = attention(q, k, k, scale=1.0, return_lse=True)
    # first index: RN(a*a); second: RN(acc - a*a) = 0, since both hold the rounded square.
    assert lse.item() == 0.0
    swapped = attention(q[..., ::-1], k[..., ::-1], k, scale=1.0, return_lse=True)[1]
    # acc = -RN(a*a), then FMA(a, a, acc) keeps the rounding error of the square.
    assert swapped.item() == float(np.float64(a) * np.float64(a) - np.float64(np.float32(a * a)))
    assert swapped.item() != 0.0
