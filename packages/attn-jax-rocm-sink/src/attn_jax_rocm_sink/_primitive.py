"""A kernel call as JAX sees it: no derivative, one rule for vmap, one for each kind of sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax

from attn_jax_rocm_sink._batching import vmap_rule
from attn_jax_rocm_sink._partitioning import explicit, partitioned
from attn_jax_rocm_sink._signature import Signature

__all__ = ["call"]


def call(signature: Signature, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The results that ``signature`` names, under any transformation but a derivative."""
    return dict(zip(signature.results, _run(signature, list(operands.values())), strict=True))


def _run(signature: Signature, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(_function(signature)(*values))


@cache
def _function(signature: Signature) -> Callable[..., Sequence[jax.Array]]:
    sharded = explicit(signature, partitioned(signature))
    mapped = jax.custom_batching.custom_vmap(sharded)
    mapped.def_vmap(vmap_rule(signature, _run))
    first_order = jax.custom_jvp(jax.jit(mapped))
    first_order.defjvp(_refuse_derivative)
    return first_order


def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError("attn_jax_rocm_sink: attention has first derivatives in reverse mode only; a second derivative was asked for")
