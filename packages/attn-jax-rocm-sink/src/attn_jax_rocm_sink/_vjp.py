"""Attention as one differentiable JAX primitive: the forward handler, the backward handler, and the rule that joins them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax_rocm_sink import _ffi

__all__ = ["Inputs", "attention_with_lse"]

_DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
_ARRAYS = ("q", "k", "v", "key_padding_mask", "kv_lengths", "q_start", "k_start", "sinks", "bias", "dropout_seed")
_STATIC = ("causal", "scale", "window_left", "window_right", "dropout_p", "out_dtype", "engine")


@partial(jax.tree_util.register_dataclass, data_fields=list(_ARRAYS), meta_fields=list(_STATIC))
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Checked inputs of one call; an absent optional array is None.

    q [B, H, S, D], k [B, K, T, D], v [B, K, T, V]; key_padding_mask bool [B, T]; kv_lengths, q_start, k_start int32 or int64 [B];
    sinks [H]; bias [B|1, H|1, S|1, T|1]; dropout_seed uint32 [2], low word first. ``window_left`` and ``window_right`` are -1
    without a bound.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    key_padding_mask: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    q_start: jax.Array | None = None
    k_start: jax.Array | None = None
    sinks: jax.Array | None = None
    bias: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    causal: bool
    scale: float
    window_left: int
    window_right: int
    dropout_p: float
    out_dtype: str
    engine: str

    def operands(self) -> dict[str, jax.Array]:
        """The arrays that are present: the one place that decides it, for forward and backward alike."""
        return {name: array for name in _ARRAYS if (array := getattr(self, name)) is not None}

    def attributes(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "causal": self.causal,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
        }


@partial(jax.tree_util.register_dataclass, data_fields=["inputs", "kept"], meta_fields=["needs"])
@dataclass(frozen=True)
class _Residuals:
    """What the backward pass keeps: inputs, the results of forward that the engine needs, and the inputs whose gradient is asked for."""

    inputs: Inputs
    kept: dict[str, jax.Array]
    needs: tuple[str, ...]


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _forward(inputs: Inputs) -> dict[str, jax.Array]:
    rows = _struct(inputs.q.shape[:3], jnp.float32)
    out = _struct((*inputs.q.shape[:3], inputs.v.shape[3]), jnp.dtype(inputs.out_dtype))
    results = {"out": out, "lse": rows} | {name: rows for name in ("row_max", "row_sum") if name in _kept(inputs)}
    return _ffi.call(_ffi.FORWARD, inputs.operands(), results, inputs.attributes())


def _kept(inputs: Inputs) -> tuple[str, ...]:
    return _ffi.HANDLERS[inputs.engine].kept


@jax.custom_vjp
def attention_with_lse(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of checked inputs: [B, H, S, V] in ``out_dtype`` and float32 [B, H, S]."""
    found = _forward(inputs)
    return found["out"], found["lse"]


def _attention_fwd(primals: Any) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    inputs = jax.tree.map(lambda primal: primal.value, primals)
    present = ((name, getattr(primals, name)) for name in _DIFFERENTIABLE)
    needs = tuple(name for name, primal in present if primal is not None and primal.perturbed)
    found = _forward(inputs)
    return (found["out"], found["lse"]), _Residuals(inputs, {name: found[name] for name in _kept(inputs)}, needs)


def _attention_bwd(residuals: _Residuals, cotangents: tuple[Any, Any]) -> tuple[Inputs]:
    inputs, needs = residuals.inputs, residuals.needs
    gradients: dict[str, jax.Array] = {}
    if needs:
        dout, dlse = cotangents
        operands = inputs.operands() | residuals.kept
        operands["dout"] = jnp.zeros(dout.shape, dout.dtype) if _is_zero(dout) else dout
        if not _is_zero(dlse):
            operands["dlse"] = dlse
        shapes = {f"d{name}": _struct(operands[name].shape, operands[name].dtype) for name in needs}
        results = _ffi.call(_ffi.BACKWARD, operands, shapes, inputs.attributes())
        gradients = {name: results[f"d{name}"] for name in needs}
    # None is a zero cotangent; integer and boolean operands have no other.
    found: dict[str, Any] = {name: gradients.get(name) for name in _ARRAYS}
    return (dataclasses.replace(inputs, **found),)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


attention_with_lse.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
