"""Attention as one differentiable JAX primitive: the forward handler, the backward handler, and the rule that joins them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attn_jax_rocm_sink import _lowering, _primitive
from attn_jax_rocm_sink._kernel import dbias_of, ordered_sum
from attn_jax_rocm_sink._manual_axes import missing_axes, vary, varying_axes
from attn_jax_rocm_sink._signature import Signature

__all__ = ["RESIDUALS", "Inputs", "attention_with_lse"]

RESIDUALS = "attn_jax_rocm_sink"
"""``checkpoint_name`` of what forward computes: a policy that saves it spares the backward pass a second forward."""

_DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
_ARRAYS = ("q", "k", "v", "key_padding_mask", "kv_lengths", "q_start", "k_start", "sinks", "bias", "dropout_seed")
_STATIC = ("causal", "scale", "window_left", "window_right", "dropout_p", "out_dtype", "engine", "top_left")


@partial(jax.tree_util.register_dataclass, data_fields=list(_ARRAYS), meta_fields=list(_STATIC))
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Checked inputs of one call; an absent optional array is None.

    q [B, H, S, D], k [B, K, T, D], v [B, K, T, V]; key_padding_mask bool [B, T]; kv_lengths, q_start, k_start int32 or int64 [B];
    sinks [H]; bias [B|1, H|1, S|1, T|1]; dropout_seed uint32 [2], low word first. ``window_left`` and ``window_right`` are -1
    without a bound. ``engine`` names handlers, or a contract: then each platform has its own. ``top_left`` stands for a q_start of 0
    where the engine takes no q_start.
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
    top_left: bool = False

    def operands(self) -> dict[str, jax.Array]:
        """The arrays that are present: the one place that decides it, for forward and backward alike."""
        found = {name: array for name in _ARRAYS if (array := getattr(self, name)) is not None}
        if self.dropout_seed is not None:  # with the batch item and head at which the counters begin
            found["dropout_seed"] = jnp.concatenate([self.dropout_seed, jnp.zeros(2, jnp.uint32)])
        return found

    def attributes(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "causal": self.causal,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
            **({"alignment": 1} if self.top_left else {}),
        }


@partial(jax.tree_util.register_dataclass, data_fields=["inputs", "kept"], meta_fields=["needs"])
@dataclass(frozen=True)
class _Residuals:
    """What the backward pass keeps: inputs, the results of forward that the engine needs, and the inputs whose gradient is asked for."""

    inputs: Inputs
    kept: dict[str, jax.Array]
    needs: tuple[str, ...]


def _call(
    direction: Literal["forward", "backward"],
    inputs: Inputs,
    operands: dict[str, jax.Array],
    results: tuple[str, ...],
    unsummed: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    axes = varying_axes(operands.values())
    operands = {name: vary(array, axes) for name, array in operands.items()}
    signature = Signature(direction, tuple(operands), results, tuple(inputs.attributes().items()), inputs.out_dtype, unsummed)
    return _primitive.call(signature, operands)


def _forward(inputs: Inputs) -> dict[str, jax.Array]:
    found = _call("forward", inputs, inputs.operands(), tuple(dict.fromkeys(("out", "lse", *_kept(inputs)))))
    return {name: checkpoint_name(array, RESIDUALS) for name, array in found.items()}


def _kept(inputs: Inputs) -> tuple[str, ...]:
    return _lowering.traits(inputs.engine).kept


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
        gradients = _summed_over_devices(inputs, operands, needs)
    # None is a zero cotangent; integer and boolean operands have no other.
    found: dict[str, Any] = {name: gradients.get(name) for name in _ARRAYS}
    return (dataclasses.replace(inputs, **found),)


def _summed_over_devices(inputs: Inputs, operands: dict[str, jax.Array], needs: tuple[str, ...]) -> dict[str, jax.Array]:
    """Gradients by name. Inside ``jax.shard_map`` an input that is the same on the devices of a mesh axis, over which others differ, has a
    gradient that sums over them: for sinks and bias the axis is taken for one of the batch, and the terms are added in batch order.
    """
    axes = varying_axes(operands.values())
    shared = {name: missing for name in needs if (missing := missing_axes(operands[name], axes))}
    for name in shared:
        if name not in ("sinks", "bias") or (name == "bias" and operands["bias"].shape[0] != 1):
            raise ValueError(
                f"attention: {name} is the same on all devices of mesh axis {', '.join(shared[name])} and other arrays differ: "
                "its gradient has no order of summation in the contract (supported: sinks, and a bias without a batch axis); "
                "jax.lax.pcast(..., to='varying') leaves the sum to JAX"
            )
    results = _call("backward", inputs, operands, tuple(f"d{name}" for name in needs), tuple(f"d{name}" for name in shared))
    found = {name: results[f"d{name}"] for name in needs}
    for name, missing in shared.items():
        terms = jax.lax.all_gather(found[name], missing, axis=0, tiled=True, to="invarying")
        operand = operands[name]
        found[name] = ordered_sum(terms, operand.dtype) if name == "sinks" else dbias_of(terms, operand.shape, operand.dtype)
    return found


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


attention_with_lse.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
