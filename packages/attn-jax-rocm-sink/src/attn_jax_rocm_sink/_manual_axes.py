"""Manual mesh axes, those of ``jax.shard_map``: over which of them a value differs from device to device."""

from __future__ import annotations

from collections.abc import Iterable

import jax

__all__ = ["missing_axes", "vary", "varying_axes"]


def varying_axes(arrays: Iterable[jax.Array]) -> tuple[str, ...]:
    """Axes over which one of the arrays differs, in the order of the mesh. None outside ``shard_map`` and under ``check_vma=False``."""
    found = frozenset().union(*(_axes(array) for array in arrays))
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in found)


def missing_axes(array: jax.Array, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in axes if name not in _axes(array))


def vary(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """``array`` with the type of one that differs over ``axes``. Results of ``jax.ffi.ffi_call`` come without any such axis."""
    return jax.lax.pcast(array, missing_axes(array, axes), to="varying")


def _axes(array: jax.Array) -> frozenset[str]:
    found: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return found
