"""``engine="xla"``: attention in plain jax.numpy, for whatever the kernels refuse. The semantics of ``attention``, not its bits.

Sums are XLA's, in float32 at the highest precision, over whole score matrices [B, H, S, T]. It stands outside every contract.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax_rocm_sink._philox import kept_pairs
from attn_jax_rocm_sink._vjp import Inputs

__all__ = ["NAME", "attention_with_lse", "reasons"]

NAME = "xla"

_FAR = 2**30
"""Beyond any distance between two stored rows: positions further apart than this are equally far."""


def reasons(contract: str | None) -> tuple[str, ...]:
    """Why a call is refused: a contract that is asked for by name is not kept here."""
    return () if contract is None else (f"contract {contract} (engine {NAME} keeps none: its order of sums is XLA's)",)


class _Row(NamedTuple):
    """Softmax of every row, float32; query heads are [K, G], G of them a kv head. Masked and dead probabilities are +0."""

    probabilities: jax.Array  # [B, K, G, S, T]
    sink: jax.Array  # [B, K, G, S]
    lse: jax.Array  # [B, K, G, S]
    unmasked: jax.Array  # bool [B, K, G, S, T]


@jax.custom_vjp
def attention_with_lse(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of checked inputs: [B, H, S, V] in ``out_dtype`` and float32 [B, H, S].

    Traced lengths are clamped into the arrays, traced positions into 32 bits. A NaN or an infinity in a visible row of v, or in the
    cotangent of a row of out, makes the whole results that it enters NaN.
    """
    return _results(inputs)


@jax.jit
def _results(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    row = _softmax(inputs)
    weights, terms = _dropped(inputs, row)
    v = inputs.v.astype(jnp.float32)
    poisoned = (terms & _non_finite(v)[:, :, None, None, :]).any(-1, keepdims=True)
    out = jnp.where(poisoned, jnp.nan, _product("bkgst,bktv->bkgsv", weights, _finite(v)))
    shape = inputs.q.shape[:3]
    return out.reshape(*shape, v.shape[-1]).astype(inputs.out_dtype), row.lse.reshape(shape)


def _forward(inputs: Inputs) -> tuple[tuple[jax.Array, jax.Array], Inputs]:
    return _results(inputs), inputs


@jax.jit
def _gradients(inputs: Inputs, cotangents: tuple[jax.Array, jax.Array]) -> Inputs:
    row = _softmax(inputs)
    weights, terms = _dropped(inputs, row)
    q, k, v = _grouped(inputs, inputs.q), inputs.k.astype(jnp.float32), inputs.v.astype(jnp.float32)
    dout, dlse = (_grouped(inputs, cotangent) for cotangent in cotangents)
    dp = jnp.where(terms, _product("bkgsv,bktv->bkgst", dout, v) * _keep_scale(inputs.dropout_p), 0.0)
    delta = jnp.where(row.unmasked, row.probabilities * dp, 0.0).sum(-1) - dlse
    ds = jnp.where(row.unmasked, row.probabilities * (dp - delta[..., None]), 0.0)
    # A non-finite q or k has made ds NaN wherever it is visible; a non-finite dout has not reached the weights of v.
    poisoned = (terms & _non_finite(dout)[..., None]).any((2, 3))[..., None]
    found = {
        "q": (_product("bkgst,bktd->bkgsd", ds, _finite(k)) * inputs.scale).reshape(inputs.q.shape),
        "k": _product("bkgst,bkgsd->bktd", ds, _finite(q)) * inputs.scale,
        "v": jnp.where(poisoned, jnp.nan, _product("bkgst,bkgsv->bktv", weights, _finite(dout))),
    }
    if inputs.sinks is not None:
        dsinks = -(row.sink * delta).sum((0, 3)).reshape(inputs.sinks.shape)
        found["sinks"] = jnp.where(jnp.isneginf(inputs.sinks), 0.0, dsinks)
    if inputs.bias is not None:
        full = ds.reshape(*inputs.q.shape[:3], ds.shape[-1])
        found["bias"] = full.sum([axis for axis, size in enumerate(inputs.bias.shape) if size != full.shape[axis]], keepdims=True)
    # None is a zero cotangent; integer and boolean operands have no other.
    arrays = [field.name for field in dataclasses.fields(inputs) if isinstance(getattr(inputs, field.name), (jax.Array, np.ndarray))]
    gradients: dict[str, Any] = {name: found[name].astype(getattr(inputs, name).dtype) if name in found else None for name in arrays}
    return dataclasses.replace(inputs, **gradients)


def _backward(inputs: Inputs, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Inputs]:
    return (_gradients(inputs, cotangents),)


attention_with_lse.defvjp(_forward, _backward)


def _softmax(inputs: Inputs) -> _Row:
    scores = _product("bkgsd,bktd->bkgst", _grouped(inputs, inputs.q), inputs.k.astype(jnp.float32)) * inputs.scale
    if inputs.bias is not None:
        scores += _bias(inputs, inputs.bias)
    # A pair at -inf is masked; a NaN is not.
    unmasked = _visible(inputs) & (scores != -jnp.inf)
    scores = jnp.where(unmasked, scores, -jnp.inf)
    kv_heads = inputs.k.shape[1]
    sinks = jnp.float32(-jnp.inf) if inputs.sinks is None else inputs.sinks.astype(jnp.float32).reshape(kv_heads, -1, 1)
    largest = jnp.maximum(scores.max(-1, initial=-jnp.inf), sinks)
    # The maximum of a row with neither a key nor a sink must not meet another -inf.
    shift = jnp.where(jnp.isneginf(largest), 0.0, largest)
    exponentials = jnp.where(unmasked, jnp.exp(scores - shift[..., None]), 0.0)
    sink = jnp.exp(sinks - shift)
    total = exponentials.sum(-1) + sink
    divisor = jnp.where(total == 0.0, 1.0, total)
    # Without a key, LSE is the sink itself, NaN or infinity included, and no NaN of the divisor may reach a masked pair.
    lse = jnp.where(unmasked.any(-1), shift + jnp.log(divisor), jnp.broadcast_to(sinks, largest.shape))
    return _Row(jnp.where(unmasked, exponentials / divisor[..., None], 0.0), sink / divisor, lse, unmasked)


def _visible(inputs: Inputs) -> jax.Array:
    """bool [B, 1, 1, S, T]: pairs that lengths, positions and the mask leave."""
    batch, _, queries, _ = inputs.q.shape
    keys = inputs.k.shape[2]
    lengths = jnp.full((batch,), keys) if inputs.kv_lengths is None else jnp.clip(inputs.kv_lengths, 0, keys)
    lengths = lengths.astype(jnp.int32)
    query, key = jnp.arange(queries, dtype=jnp.int32)[:, None], jnp.arange(keys, dtype=jnp.int32)
    visible = jnp.broadcast_to(key < lengths[:, None, None], (batch, queries, keys))
    ahead = _first_distance(inputs, lengths)[:, None, None] + query - key
    if inputs.causal:
        visible &= ahead >= 0
    if inputs.window_left >= 0:
        visible &= ahead <= inputs.window_left
    if inputs.window_right >= 0:
        visible &= -ahead <= inputs.window_right
    if inputs.key_padding_mask is not None:
        visible &= inputs.key_padding_mask[:, None, :]
    return visible[:, None, None]


def _first_distance(inputs: Inputs, lengths: jax.Array) -> jax.Array:
    """Position of query 0 minus that of stored key 0, int32 [B], within +-2^30 so that rows can be added."""
    if inputs.q_start is None:
        return lengths - inputs.q.shape[2]
    q_start = jnp.clip(inputs.q_start, -(2**31) + 1, 2**31 - 1).astype(jnp.int32)
    if inputs.k_start is None:
        return jnp.clip(q_start, -_FAR, _FAR)
    k_start = jnp.clip(inputs.k_start, 0, 2**31 - 1).astype(jnp.int32)
    half = (q_start >> 1) - (k_start >> 1)
    near = jnp.abs(half) < _FAR // 2
    return jnp.where(near, jnp.where(near, q_start, 0) - jnp.where(near, k_start, 0), jnp.sign(half) * _FAR)


def _dropped(inputs: Inputs, row: _Row) -> tuple[jax.Array, jax.Array]:
    """Weights of v [B, K, G, S, T] after dropout, and the pairs that have one."""
    if inputs.dropout_seed is None:
        return row.probabilities, row.unmasked
    shape = (*inputs.q.shape[:3], inputs.k.shape[2])
    kept = kept_pairs(inputs.dropout_p, inputs.dropout_seed, shape).reshape(row.unmasked.shape) & row.unmasked
    return jnp.where(kept, row.probabilities * _keep_scale(inputs.dropout_p), 0.0), kept


def _keep_scale(probability: float) -> float:
    return 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)


def _grouped(inputs: Inputs, rows: jax.Array) -> jax.Array:
    """[B, H, ...] as float32 [B, K, G, ...]."""
    batch, kv_heads = inputs.k.shape[:2]
    return rows.astype(jnp.float32).reshape(batch, kv_heads, rows.shape[1] // kv_heads, *rows.shape[2:])


def _bias(inputs: Inputs, bias: jax.Array) -> jax.Array:
    """[B|1, H|1, S|1, T|1] as float32 [B|1, K|1, G|1, S|1, T|1]."""
    heads, kv_heads = (1, 1) if bias.shape[1] == 1 else (bias.shape[1], inputs.k.shape[1])
    return bias.astype(jnp.float32).reshape(bias.shape[0], kv_heads, heads // kv_heads, *bias.shape[2:])


def _finite(values: jax.Array) -> jax.Array:
    """Non-finite numbers as 0, so that a weight of 0 leaves no trace of them."""
    return jnp.where(jnp.isfinite(values), values, 0.0)


def _non_finite(rows: jax.Array) -> jax.Array:
    """bool [...] for rows [..., V]: whether a row holds a NaN or an infinity."""
    return ~jnp.isfinite(rows).all(-1)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """float32 sums at the highest precision; a zero is +0."""
    total = jnp.einsum(equation, left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.where(total == 0.0, 0.0, total)
