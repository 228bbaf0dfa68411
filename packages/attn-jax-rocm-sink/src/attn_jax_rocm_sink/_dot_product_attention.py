"""``dot_product_attention``: the call of ``jax.nn``, with sinks, lowered onto ``attention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_jax_rocm_sink._arrays import as_array, check_known, check_range, is_integer
from attn_jax_rocm_sink._attention import attention
from attn_jax_rocm_sink._bias import with_mask
from attn_jax_rocm_sink._segments import fitted, keep_rows, spoil

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    contract: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``jax.nn.dot_product_attention`` with ``sinks``; names, layout and alignment are its own.

    Arrays may be whatever ``jnp.asarray`` takes.

    Args:
        query: [B, T, N, H] or [T, N, H]; key and value: [B, S, K, H] or [S, K, H]; the head dim of value may differ.
        bias: added after scaling, broadcastable to [B, N, T, S].
        mask: bool, broadcastable to [B, N, T, S], True takes part. One of shape [B|1, 1, 1, S] is a ``key_padding_mask``: keys that it
            drops are removed. Any other is -inf in the bias; keys that it hides from every query of a batch item may hold anything.
        is_causal: top-left: key j is visible to query i iff j <= i.
        query_seq_lengths, key_value_seq_lengths: int32 or int64 [B], or one for all; rows past them are 0 in output and gradients. A
            batch item whose traced lengths do not fit is NaN.
        local_window_size: ``(left, right)`` or one integer for both, counted from key i for query i (top-left).
        sinks: [N] logits, as in ``attention``.
        implementation: the ``engine`` of ``attention``.
        return_residual: also return the log-sum-exp, float32 [B, T, N], differentiable; -inf past ``query_seq_lengths``.

    Returns:
        [B, T, N, H] in the dtype of value. A row without a visible key is 0, where ``jax.nn`` averages the values.

    Raises:
        TypeError, ValueError, UnsupportedProblem: as ``attention``.

    Source: the documentation of jax.nn.dot_product_attention, JAX 0.10.
    """
    op = "dot_product_attention"
    check_known(op, is_causal=is_causal, scale=scale, local_window_size=local_window_size, return_residual=return_residual)
    if not isinstance(is_causal, bool):
        raise TypeError(f"{op}: is_causal must be True or False; got {is_causal!r}")
    query, key, value = (as_array(op, name, array) for name, array in (("query", query), ("key", key), ("value", value)))
    bias, mask = (None if array is None else as_array(op, name, array) for name, array in (("bias", bias), ("mask", mask)))
    ranks = {"query": query.ndim, "key": key.ndim, "value": value.ndim}
    if len(set(ranks.values())) > 1 or query.ndim not in (3, 4):
        raise ValueError(f"{op}: query, key and value must all have 4 axes, or all 3; got {ranks}")
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    bias, mask = _with_four_axes("bias", bias, full), _with_four_axes("mask", mask, full)
    kept: jax.Array | None = None
    if mask is not None:
        if mask.dtype != jnp.bool_:
            raise TypeError(f"dot_product_attention: mask must be bool (True takes part), and bias is added; got {mask.dtype.name}")
        if mask.shape[1:3] == (1, 1):
            kept = jnp.broadcast_to(mask[:, 0, 0], (full[0], full[3]))
        else:
            seen = mask.any((1, 2))[..., None, None]
            key, value = jnp.where(seen, key, jnp.zeros((), key.dtype)), jnp.where(seen, value, jnp.zeros((), value.dtype))
            bias = with_mask(bias, mask)
    query_lengths, no_queries = _lengths("query_seq_lengths", query_seq_lengths, full[0], full[2])
    key_lengths, no_keys = _lengths("key_value_seq_lengths", key_value_seq_lengths, full[0], full[3])
    lost = no_queries if no_keys is None else no_keys if no_queries is None else no_queries | no_keys
    query = _used(query, query_lengths, lost)
    window: Any = (local_window_size, local_window_size) if is_integer(local_window_size) else local_window_size
    out, lse = attention(
        *(jnp.swapaxes(array, 1, 2) for array in (query, key, value)),
        causal=is_causal,
        scale=scale,
        key_padding_mask=kept,
        kv_lengths=key_lengths,
        q_start=0 if is_causal or window is not None else None,
        window=window,
        sinks=None if sinks is None else as_array(op, "sinks", sinks),
        bias=bias,
        return_lse=True,
        contract=contract,
        engine=implementation,
    )
    out, lse = jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
    out, lse = _used(out, query_lengths, lost), _used(lse, query_lengths, lost, unused=-jnp.inf)
    if ranks["query"] == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _with_four_axes(name: str, array: jax.Array | None, full: tuple[int, int, int, int]) -> jax.Array | None:
    """``array`` with leading axes of size 1; ValueError when it does not broadcast to ``full`` [B, N, T, S]."""
    if array is None:
        return None
    shape = (1,) * (4 - array.ndim) + tuple(array.shape)
    if len(shape) != 4 or any(size not in (1, axis) for size, axis in zip(shape, full, strict=True)):
        raise ValueError(f"dot_product_attention: {name} must broadcast to [B, N, T, S] = {list(full)}; got {list(array.shape)}")
    return array.reshape(shape)


def _lengths(name: str, lengths: Any, batch: int, size: int) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """``lengths`` checked, int32 [B] within [0, size], and bool [B]: which traced ones were outside. Known ones raise."""
    if lengths is None:
        return None, None
    check_range("dot_product_attention", name, lengths, 0, size)
    array = as_array("dot_product_attention", name, lengths)
    if array.dtype.name not in ("int32", "int64"):
        raise TypeError(f"dot_product_attention: {name} must be int32 or int64; got {array.dtype.name}")
    if array.shape not in ((), (batch,)):
        raise ValueError(f"dot_product_attention: {name} must be an integer or have shape [B] = {[batch]}; got {list(array.shape)}")
    return fitted(jnp.broadcast_to(array, (batch,)), size)


def _used(rows: jax.Array, lengths: jax.Array | None, lost: jax.Array | None, unused: float = 0.0) -> jax.Array:
    """``rows`` [B, T, ...], ``unused`` from ``lengths`` [B] on, and NaN for the batch items that are lost."""
    if lengths is not None:
        rows = keep_rows(rows, lengths, unused)
    return rows if lost is None else spoil(rows, lost)
