"""The vmap rule: the mapped axis becomes part of the batch.

Nothing of one batch item moves a bit of another, so that the folded call has the bytes of a loop. Where that would not hold, calls run one
after another in a ``lax.map``: with mapped sinks (the kernels take one set of sinks), with dropout (its counters hold the batch index), and
for the gradient of a bias that all batch items share, whose unsummed terms would need the memory of every score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_jax_rocm_sink._kernel import ordered_sum
from attn_jax_rocm_sink._signature import Signature

__all__ = ["vmap_rule"]

Results = tuple[jax.Array, ...]
Run = Callable[[Signature, Sequence[jax.Array]], Results]


def vmap_rule(signature: Signature, run: Run) -> Callable[..., tuple[Results, tuple[bool, ...]]]:
    """The rule of ``run(signature, ...)`` for ``jax.custom_batching.custom_vmap``."""

    def fold_into_batch(size: int, batched: Sequence[bool], *values: jax.Array) -> tuple[Results, tuple[bool, ...]]:
        mapped = {name for name, is_mapped in zip(signature.operands, batched, strict=True) if is_mapped}
        named = signature.named(values)
        q = named["q"].shape[1:] if "q" in mapped else named["q"].shape
        if _separate(signature, mapped, named, q[0]):
            found = _one_after_another(signature, run, mapped, named)
        else:
            found = _folded(signature, run, mapped, named, size, q[0])
        return found, (True,) * len(found)

    return fold_into_batch


def _separate(signature: Signature, mapped: set[str], named: dict[str, jax.Array], batch: int) -> bool:
    shared_bias = "dbias" in signature.results and "dbias" not in signature.unsummed and named["bias"].shape[-4] == 1 != batch
    return "sinks" in mapped or "dropout_seed" in named or shared_bias


def _one_after_another(signature: Signature, run: Run, mapped: set[str], named: dict[str, jax.Array]) -> Results:
    moving = {name: named[name] for name in named if name in mapped}

    def one(own: dict[str, jax.Array]) -> Results:
        return run(signature, [own.get(name, array) for name, array in named.items()])

    return jax.lax.map(one, moving)


def _folded(signature: Signature, run: Run, mapped: set[str], named: dict[str, jax.Array], size: int, batch: int) -> Results:
    def fold(name: str, array: jax.Array) -> jax.Array:
        """[N, B, ...] or an operand that every mapped call shares, as [N * B, ...]."""
        if signature.axes(name)[0] != "b":
            return array
        if name == "bias" and array.shape[-4] == 1:
            if name not in mapped and "dbias" not in signature.results:
                return array
            whole = array if name in mapped else jnp.broadcast_to(array, (size, *array.shape))
            return jnp.repeat(whole[:, 0], batch, axis=0)
        whole = array if name in mapped else jnp.broadcast_to(array, (size, *array.shape))
        return whole.reshape(size * batch, *whole.shape[2:])

    sinks_too = "dsinks" in signature.results and "dsinks" not in signature.unsummed
    folded = replace(signature, unsummed=(*signature.unsummed, "dsinks")) if sinks_too else signature
    results = run(folded, [fold(name, array) for name, array in named.items()])
    found = [array.reshape(size, batch, *array.shape[1:]) for array in results]
    if sinks_too:
        place = signature.results.index("dsinks")
        found[place] = ordered_sum(found[place].swapaxes(0, 1), named["sinks"].dtype)
    return tuple(found)
