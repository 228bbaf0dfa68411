"""Calls of the kernels on arrays of one device, and the sums over batch items that they leave to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_jax_rocm_sink import _ffi, _lowering
from attn_jax_rocm_sink._manual_axes import vary, varying_axes
from attn_jax_rocm_sink._signature import Signature

__all__ = ["dbias_of", "dropout_at", "kernel", "ordered_sum"]

_FULL = (0, 1, 2, 3)


def kernel(signature: Signature, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The results that ``signature`` names. What it leaves unsummed is computed one batch item at a time."""
    if not signature.unsummed:
        results = _lowering.call(signature, operands)
        axes = varying_axes(operands.values())
        return {name: vary(array, axes) for name, array in results.items()}
    batch, heads, queries = operands["q"].shape[:3]
    keys = operands["k"].shape[2]
    whole_ds = "dbias" in signature.results and ("dbias" in signature.unsummed or operands["bias"].shape[0] == 1)

    def item(index: jax.Array, own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        given = {name: own[name][None] if name in own else array for name, array in operands.items()}
        if "dropout_seed" in given:
            given["dropout_seed"] = dropout_at(signature, given["dropout_seed"], index, 0)
        if "dsinks" in signature.results:
            given["sinks"] = given["sinks"].astype(jnp.float32)
        if whole_ds:
            given["bias"] = jnp.broadcast_to(given["bias"].astype(jnp.float32), (1, heads, queries, keys))
        found = kernel(replace(signature, unsummed=()), given)
        return {name: array if name == "dsinks" else array[0] for name, array in found.items()}

    own = {name: array for name, array in operands.items() if signature.axes(name)[0] == "b" and array.shape[0] == batch}
    found = jax.lax.map(lambda both: item(*both), (jnp.arange(batch, dtype=jnp.uint32), own))
    if "dsinks" in found and "dsinks" not in signature.unsummed:
        found["dsinks"] = ordered_sum(found["dsinks"], operands["sinks"].dtype)
    if whole_ds and "dbias" not in signature.unsummed:
        found["dbias"] = dbias_of(found["dbias"], operands["bias"].shape, operands["bias"].dtype)
    return {name: found[name] for name in signature.results}  # the loop sorts the names


def dropout_at(signature: Signature, seed: jax.Array, item: jax.Array | int, head: jax.Array | int) -> jax.Array:
    """The seed [4] of a part of a call that begins at this batch item and head of it, where the counters of dropout have them."""
    engine = dict(signature.attributes)["engine"]
    if not _lowering.traits(engine).partial_dropout:
        raise ValueError(
            f"attn_jax_rocm_sink: engine {engine} draws dropout for whole calls alone: not for a part of a batch, as sharding and the "
            "gradient of sinks over several devices need it"
        )
    return seed + jnp.stack([jnp.asarray(word, jnp.uint32) for word in (0, 0, item, head)])


def ordered_sum(terms: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sum of ``terms`` float32 [N, ...] over axis 0, one RN addition after another from +0, rounded to ``dtype``.

    On the CPU by a handler: XLA's own additions flush subnormals there.
    """
    flat = terms.reshape(terms.shape[0], -1)
    axes = varying_axes([terms])

    def handler(rows: jax.Array) -> jax.Array:
        return vary(_ffi.ordered_sum(rows, dtype), axes)

    def scan(rows: jax.Array) -> jax.Array:
        zeros = vary(jnp.zeros(rows.shape[1:], rows.dtype), axes)
        return jax.lax.scan(lambda total, row: (total + row, None), zeros, rows, unroll=8)[0].astype(dtype)

    return jax.lax.platform_dependent(flat, cpu=handler, default=scan).reshape(terms.shape[1:])


def dbias_of(ds: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """dbias of ``shape`` from dS float32 [B, H, S, T]: sums on the axes of size 1 over (batch, head, query, key), lexicographically."""
    reduced = tuple(axis for axis in _FULL if shape[axis] == 1)
    kept = tuple(axis for axis in _FULL if shape[axis] != 1)
    terms = ds.transpose(reduced + kept).reshape(-1, *(ds.shape[axis] for axis in kept))
    return ordered_sum(terms, dtype).reshape(shape)
