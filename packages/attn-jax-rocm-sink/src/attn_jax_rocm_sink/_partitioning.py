"""Sharding of a kernel call over batch and heads, in automatic (Shardy) and explicit mode.

Each device runs the kernels on its batch items and its whole groups of heads. Only sums over the batch, or over heads for a bias that they
share, need the other devices: their terms are gathered and added in the order of the contract, so that the bytes are those of one device.
An all-reduce would add them in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attn_jax_rocm_sink._arrays import device_name
from attn_jax_rocm_sink._kernel import dbias_of, dropout_at, kernel, ordered_sum
from attn_jax_rocm_sink._lowering import require_usable
from attn_jax_rocm_sink._signature import AXES, Signature

__all__ = ["explicit", "partitioned"]

Function = Callable[..., Sequence[jax.Array]]
Axes = tuple[str, ...]


def partitioned(signature: Signature) -> Function:
    """The kernel call with its rule for automatic sharding."""
    whole = custom_partitioning(lambda *values: tuple(kernel(signature, signature.named(values)).values()))

    def layout_of(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> Layout:
        specs = {name: (argument.shape, _spec(argument)) for name, argument in signature.named(arguments).items()}
        return Layout.of(signature, dict(mesh.shape), specs, _spec(results[0]))

    def partition(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        layout = layout_of(mesh, arguments, results)
        return mesh, layout.local, layout.shardings(mesh, signature.results), layout.shardings(mesh, signature.operands)

    def infer(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[NamedSharding, ...]:
        return layout_of(mesh, arguments, results).shardings(mesh, signature.results)

    def rule(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        if not mesh.empty:  # the kernels are lowered inside XLA, which would wrap the refusal
            require_usable(signature, device_name(mesh.devices.flat[0]))
        return _rule(signature, operands, results)

    whole.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return whole


def explicit(signature: Signature, function: Function) -> Function:
    """``function`` where axes of the mesh are explicit: the types of the operands decide the sharding of the results."""

    def run(*values: jax.Array) -> Sequence[jax.Array]:
        mesh = jax.typeof(values[0]).sharding.mesh
        axes = tuple(mesh.explicit_axes)
        if not axes:
            return function(*values)
        specs = {name: (value.shape, jax.typeof(value).sharding.spec) for name, value in signature.named(values).items()}
        layout = Layout.of(signature, dict(mesh.shape), specs, PartitionSpec())
        out = layout.shardings(mesh, signature.results)
        return jax.sharding.auto_axes(function, axes=axes, out_sharding=out)(*values)

    return run


@dataclass(frozen=True)
class Layout:
    """The mesh axes over which the batch and the heads of one call are cut, and the shapes of its whole operands."""

    signature: Signature
    batch: Axes
    heads: Axes
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, signature: Signature, mesh: Mapping[str, int], operands: Mapping[str, Any], wanted: PartitionSpec) -> Layout:
        """The layout for operands of these shapes and specs, and for a first result that is wanted as ``wanted``.

        Raises ValueError with every reason why the operands cannot stay where they are.
        """
        specs = [operands[name][1] for name in ("q", "k", "v")]
        shapes = {name: shape for name, (shape, _) in operands.items()}
        items, kv_heads = shapes["q"][0], shapes["k"][1]
        reasons = [_refusal(name, axis, _axes(spec, axis)) for name, spec in zip("qkv", specs, strict=True) for axis in (2, 3)]
        heads = next(filter(None, (_axes(spec, 1) for spec in specs)), ())
        if kv_heads % _size(mesh, heads):
            reasons.append(
                f"heads are sharded {_size(mesh, heads)} ways over mesh axis {', '.join(heads)} and there are {kv_heads} kv heads: "
                f"the {shapes['q'][1] // kv_heads} query heads of a kv head must stay on one device"
            )
        if any(reasons):
            raise ValueError(f"attn_jax_rocm_sink: attention is sharded over batch and kv heads alone; {'; '.join(filter(None, reasons))}")
        heads = heads or (_axes(wanted, 1) if kv_heads % _size(mesh, _axes(wanted, 1)) == 0 else ())
        batch = next(filter(None, (_axes(spec, 0) for spec in (*specs, wanted))), ())
        batch = () if items % _size(mesh, batch) or set(batch) & set(heads) else batch
        return cls(signature, batch, heads, shapes)

    def shardings(self, mesh: Any, names: Sequence[str]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, self.spec(name)) for name in names)

    def spec(self, name: str) -> PartitionSpec:
        cut = {"b": self.batch, "h": self.heads, "g": self.heads}
        whole_bias = name == "dbias" and name in self.signature.unsummed
        shape = self.shapes["bias"] if AXES[name] == AXES["bias"] and not whole_bias else None
        entries = [cut.get(axis, ()) if shape is None or shape[i] != 1 else () for i, axis in enumerate(self.signature.axes(name))]
        return PartitionSpec(*(entry or None for entry in entries))

    def local(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        """The call on one device, from its parts of the operands to its parts of the results."""
        named = self.signature.named(values)
        if "dropout_seed" in named and (self.batch or self.heads):
            shape = named["q"].shape
            item, head = (jax.lax.axis_index(axes) * size if axes else 0 for axes, size in ((self.batch, shape[0]), (self.heads, shape[1])))
            named["dropout_seed"] = dropout_at(self.signature, named["dropout_seed"], item, head)
        sums = self._sums()
        found = kernel(replace(self.signature, unsummed=(*self.signature.unsummed, *sums)), named)
        if "dsinks" in sums:
            found["dsinks"] = ordered_sum(_gathered(found["dsinks"], self.batch, 0), named["sinks"].dtype)
        if "dbias" in sums:
            terms = _gathered(found["dbias"], self.batch if self.shapes["bias"][0] == 1 else (), 0)
            terms = _gathered(terms, self.heads if self.shapes["bias"][1] == 1 else (), 1)
            found["dbias"] = dbias_of(terms, named["bias"].shape, named["bias"].dtype)
        return tuple(found.values())

    def _sums(self) -> tuple[str, ...]:
        """Results that are sums over more than one device."""
        left = [name for name in self.signature.results if name not in self.signature.unsummed]
        bias = self.shapes.get("bias", (0, 0))
        across = {"dsinks": bool(self.batch), "dbias": (bool(self.batch) and bias[0] == 1) or (bool(self.heads) and bias[1] == 1)}
        return tuple(name for name in left if across.get(name, False))


def _rule(signature: Signature, operands: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The rule for Shardy: forward lets a sharded sequence through, so that ``Layout.of`` can refuse it; nothing else asks for one."""
    shapes = {name: tuple(kind.shape) for name, kind in zip(signature.operands, operands, strict=True)}
    heads, kv_heads = shapes["q"][1], shapes["k"][1]
    group = "h" if kv_heads == 1 else "g" if heads == kv_heads else "(g r)"
    outputs = {"s": "z", "e": "y"} if signature.direction == "forward" else {}
    fresh: list[str] = []

    def factors(name: str, shape: tuple[int, ...], renamed: Mapping[str, str]) -> str:
        found = []
        for axis, size in zip(signature.axes(name), shape, strict=True):
            if size == 1 and AXES[name] == AXES["bias"]:
                fresh.append(f"u{len(fresh)}")
                found.append(fresh[-1])
            else:
                found.append(group if axis == "h" else renamed.get(axis, axis))
        return " ".join(found)

    left = ", ".join(factors(name, shapes[name], {}) for name in signature.operands)
    right = ", ".join(factors(name, tuple(kind.shape), outputs) for name, kind in zip(signature.results, results, strict=True))
    whole = {*fresh, *(outputs.values() if outputs else ("r", "s", "t", "d", "e"))}
    order = dict.fromkeys(re.findall(r"\w+", f"{left} {right}"))  # Shardy wants them as they first appear
    sizes = {"r": heads // kv_heads} if "r" in order else {}
    return f"{left} -> {right}", {"need_replication_factors": tuple(name for name in order if name in whole), **sizes}


def _refusal(name: str, axis: int, axes: Axes) -> str:
    meaning = "head dim" if axis == 3 else "sequence axis"
    return f"the {meaning} of {name} is sharded over mesh axis {', '.join(axes)}" if axes else ""


def _spec(argument: Any) -> PartitionSpec:
    if not isinstance(argument.sharding, NamedSharding):
        raise ValueError(
            "attn_jax_rocm_sink: attention on several devices needs shardings with a mesh (jax.sharding.NamedSharding); "
            f"got {type(argument.sharding).__name__}"
        )
    return argument.sharding.spec


def _axes(spec: PartitionSpec, axis: int) -> Axes:
    entry = spec[axis] if axis < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _size(mesh: Mapping[str, int], axes: Axes) -> int:
    size = 1
    for axis in axes:
        size *= mesh[axis]
    return size


def _gathered(array: jax.Array, axes: Axes, axis: int) -> jax.Array:
    return jax.lax.all_gather(array, axes, axis=axis, tiled=True) if axes else array
