"""Attention in a few lines of jax.numpy, for closeness alone: float32 scores, one more logit for the sink, jax's own softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: np.ndarray,
    scale: float,
    bias: jax.Array | float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """[B, S, H, V] of q [B, S, H, D], k and v [B, T, K, .]; ``visible`` bool, ``bias``: [B|1, H|1, S, T]. Rows that see nothing are 0."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(array.astype(jnp.float32), group, axis=2) for array in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q.astype(jnp.float32), k, precision="highest") * scale + bias
    sink = jnp.full(q.shape[2], -jnp.inf) if sinks is None else sinks
    column = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:3], 1))
    # A row that sees nothing gets scores of its own, so that neither it nor its gradient is NaN; then it is cut.
    alive = jnp.broadcast_to(visible, scores.shape).any(-1, keepdims=True)
    logits = jnp.where(alive, jnp.concatenate([jnp.where(visible, scores, -jnp.inf), column], -1), 0.0)
    weights = jnp.where(alive, jax.nn.softmax(logits, -1)[..., :-1], 0.0)
    return jnp.einsum("bhst,bthv->bshv", weights, v, precision="highest")
