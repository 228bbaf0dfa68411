"""One kernel call as static data: which operands and results it has, and the named axes of each.

Batching folds into the axis named ``b`` and partitioning cuts the axes named ``b``, ``h`` and ``g``; both read the one table here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

__all__ = ["AXES", "Signature"]

AXES: Mapping[str, str] = {
    "q": "bhsd",
    "k": "bgtd",
    "v": "bgte",
    "key_padding_mask": "bt",
    "kv_lengths": "b",
    "q_start": "b",
    "k_start": "b",
    "sinks": "h",
    "bias": "bhst",
    "dropout_seed": "w",
    "row_max": "bhs",
    "row_sum": "bhs",
    "dout": "bhse",
    "dlse": "bhs",
    "out": "bhse",
    "lse": "bhs",
    "dq": "bhsd",
    "dk": "bgtd",
    "dv": "bgte",
    "dsinks": "h",
    "dbias": "bhst",
}
"""b batch, h query heads, g kv heads, s queries, t keys, d head dim, e value dim, w words. An axis of size 1 of bias broadcasts."""


@dataclass(frozen=True)
class Signature:
    """A kernel call without its arrays.

    ``unsummed`` names results of backward that are left for ``ordered_sum``: dsinks is then float32 [B, H], a row for each batch item, and
    dbias is dS, float32 [B, H, S, T].
    """

    direction: Literal["forward", "backward"]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]
    out_dtype: str
    unsummed: tuple[str, ...] = ()

    def named(self, values: Any) -> dict[str, jax.Array]:
        return dict(zip(self.operands, values, strict=True))

    def structs(self, operands: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each result for operands of these shapes, whole or local to a device."""
        rows = operands["q"].shape[:3]
        found: dict[str, jax.ShapeDtypeStruct] = {}
        for name in self.results:
            if name == "out":
                found[name] = jax.ShapeDtypeStruct((*rows, operands["v"].shape[3]), jnp.dtype(self.out_dtype))
            elif name in ("lse", "row_max", "row_sum"):
                found[name] = jax.ShapeDtypeStruct(rows, jnp.float32)
            elif name == "dsinks" and name in self.unsummed:
                found[name] = jax.ShapeDtypeStruct(rows[:2], jnp.float32)
            elif name == "dbias" and name in self.unsummed:
                found[name] = jax.ShapeDtypeStruct((*rows, operands["k"].shape[2]), jnp.float32)
            else:
                operand = operands[name.removeprefix("d")]
                found[name] = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
        return found

    def axes(self, name: str) -> str:
        return "bh" if name == "dsinks" and name in self.unsummed else AXES[name]
