"""Biases that dialects state in their own way: masks as -inf, ALiBi, and broadcasting whose gradient is summed in the contract's order."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["alibi", "alibi_slopes", "broadcast", "with_mask"]


def with_mask(bias: jax.Array | None, mask: jax.Array) -> jax.Array:
    """float32 bias where ``mask`` (bool) is True, -inf elsewhere. ``mask`` and ``bias`` are [B|1, H|1, S|1, T|1] and broadcast.

    The gradient of ``bias`` is that of the result, summed over the axes that ``mask`` has widened.
    """
    if bias is None:
        return jnp.where(mask, jnp.float32(0.0), -jnp.inf)
    return jnp.where(mask, broadcast(bias.astype(jnp.float32), jnp.broadcast_shapes(bias.shape, mask.shape)), -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def broadcast(bias: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``bias`` to ``shape``. Its gradient is a sum from +0 over the broadcast axes, ascending and lexicographic, one addition at a time.

    Source: docs/contracts/ordered-v1.md, section 3, ``dbias``.
    """
    return jnp.broadcast_to(bias, shape)


def _broadcast_fwd(bias: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return broadcast(bias, shape), bias


def _broadcast_bwd(shape: tuple[int, ...], bias: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    axes = [axis for axis, size in enumerate(bias.shape) if size != shape[axis]]
    if not axes:
        return (cotangent,)
    terms = jnp.moveaxis(cotangent, axes, range(len(axes)))
    terms = terms.reshape(math.prod(shape[axis] for axis in axes), *terms.shape[len(axes) :])
    total, _ = jax.lax.scan(lambda partial_sum, term: (partial_sum + term, None), jnp.zeros(terms.shape[1:], terms.dtype), terms)
    return (total.reshape(bias.shape),)


broadcast.defvjp(_broadcast_fwd, _broadcast_bwd)


def alibi(heads: int, queries: int, keys: int, shift: jax.Array) -> jax.Array:
    """``-slope[h] * |i + shift - j|``, float32 [B|1, H, S, T]; ``shift`` int32 [B|1] puts query i beside key ``i + shift``."""
    query, key = jnp.arange(queries, dtype=jnp.int32)[:, None], jnp.arange(keys, dtype=jnp.int32)
    distance = jnp.abs(shift[:, None, None] + query - key).astype(jnp.float32)
    return -jnp.asarray(alibi_slopes(heads))[:, None, None] * distance[:, None]


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 [H]: 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two; the remaining heads take every other slope of 2n heads.

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, and the authors' published model code for other head counts.
    """
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-4.0 * (2 * head + 1) / whole) for head in range(heads - whole)]
    return np.array(slopes + between, dtype=np.float32)
