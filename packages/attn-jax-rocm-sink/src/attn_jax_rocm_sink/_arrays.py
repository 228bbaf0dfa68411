"""JAX arrays: descriptions for validation, integer operands, seeds, and numpy data bit for bit."""

from __future__ import annotations

import numbers
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from attn_spec import bfloat16
from attn_spec._validation import ArrayInfo

__all__ = [
    "are_seed_words",
    "as_array",
    "check_known",
    "check_range",
    "device_name",
    "from_numpy",
    "info",
    "integer_array",
    "integers",
    "is_integer",
    "is_real",
    "number",
    "platform",
    "seed_words",
    "to_numpy",
    "without_key_type",
]

_INT32 = np.iinfo(np.int32)


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def device_name(device: jax.Device) -> str:
    """Device name in problems: "cpu", "cuda", "rocm"; JAX calls both GPU kinds "gpu"."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _own_devices(array: Any) -> set[str]:
    """Devices that an array is bound to; traced, numpy and uncommitted arrays go where the computation goes."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.committed:
        return {device_name(device) for device in array.devices()}
    return set()


def platform(arrays: dict[str, Any], fallback: str | None) -> str:
    """The device that a call runs on: that of its committed arrays, else ``fallback``, else JAX's default device."""
    for array in arrays.values():
        for name in _own_devices(array):
            return name
    if fallback is not None:
        return fallback
    config: Any = jax.config  # its flags have no types
    default = config.jax_default_device
    if isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return device_name(default if default is not None else jax.local_devices()[0])


def as_array(op: str, name: str, value: Any) -> jax.Array:
    """``value`` as ``jnp.asarray`` takes it, as the calls of the dialects do; TypeError with name and value for anything else."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{op}: {name} must be an array or what jnp.asarray makes one of; got {reprlib.repr(value)}") from error


def check_range(op: str, name: str, value: Any, low: int, high: int) -> None:
    """ValueError for integers that are known, in arrays or lists, and outside [low, high]; traced ones and what is no integer pass.

    It comes before any conversion: without JAX's 64-bit mode ``jnp.asarray`` keeps the low 32 bits of numpy's integers.
    """
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, jax.core.Tracer) or not (is_integer(leaf) or _holds_integers(leaf)):
            continue
        known = np.asarray(leaf)
        if known.size and not low <= int(known.min()) <= int(known.max()) <= high:
            outside = known[(known < low) | (known > high)]
            raise ValueError(f"{op}: {name} must lie in [{low}, {high}]; got {outside.flat[0]}")


def _holds_integers(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray)) and bool(jnp.issubdtype(value.dtype, jnp.integer))


def integer_array(op: str, name: str, value: Any) -> jax.Array:
    """``as_array`` of integers. TypeError for other dtypes, ValueError for known values that int32 does not hold."""
    small = _holds_integers(value) and np.can_cast(value.dtype, np.int32)  # nothing of it has to be read, nor waited for
    if not small:
        check_range(op, name, value, _INT32.min, _INT32.max)
    array = as_array(op, name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be integers; got {array.dtype.name}")
    return array


def check_known(op: str, **options: Any) -> None:
    """TypeError for traced options, with what to do about them."""
    traced = [name for name, option in options.items() if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(option))]
    if traced:
        hint = "; for a traced scale, multiply q by it and give 1.0" if {"scale", "scaling_factor"} & set(traced) else ""
        raise TypeError(
            f"{op}: {', '.join(traced)} must be known when traced: name such options in jax.jit's static_argnames, here {traced}, "
            f"or bind them with functools.partial{hint}"
        )


def number(op: str, name: str, value: Any) -> Any:
    """``value``, out of an array without axes where it is in one, which must hold a real number."""
    if not (isinstance(value, (jax.Array, np.ndarray)) and value.shape == ()):
        return value
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{op}: {name} must be a real number; got {value!r}")
    return float(value)


def info(name: str, array: Any, device: str) -> ArrayInfo | None:
    """Shape, dtype and device of an array argument; ``device`` is where an array without a device of its own goes."""
    if array is None:
        return None
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise TypeError(f"attention: {name} must be a jax.Array or a numpy.ndarray; got {type(array).__name__}")
    own = _own_devices(array)
    return ArrayInfo(tuple(array.shape), array.dtype.name, min(own) if own else device)


def integers(name: str, value: Any, batch: int, low: int, high: int) -> jax.Array | None:
    """An integer operand [B] from None, an int or an array [B]; values that are known are checked against [low, high].

    Known values fit int32, so they need no 64-bit mode; traced ones keep their dtype, and the handler checks them.
    """
    if value is None or isinstance(value, jax.core.Tracer):
        return value
    known = np.full((batch,), value, dtype=object) if is_integer(value) else np.asarray(value)
    if known.size and (known.min() < low or known.max() > high):
        raise ValueError(f"attention: {name} must lie in [{low}, {high}]; got {value if is_integer(value) else known.tolist()}")
    return jnp.asarray(known.astype(np.int32))


def without_key_type(seed: Any) -> Any:
    """``seed``; of a key that ``jax.random.key`` makes the words that ``jax.random.PRNGKey`` gives."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(seed)
    return seed


def are_seed_words(seed: Any) -> bool:
    """Whether ``seed`` is uint32 [2], a 64-bit seed as two words, low word first."""
    return isinstance(seed, (jax.Array, np.ndarray)) and seed.shape == (2,) and seed.dtype == np.uint32


def seed_words(seed: Any) -> jax.Array:
    """A 64-bit seed as uint32 [2], low word first. Signed arrays are sign-extended, as ``attn_spec.torch`` does."""
    if are_seed_words(seed):
        return jnp.asarray(seed)
    if is_integer(seed):
        return jnp.asarray(np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32))
    if not isinstance(seed, (jax.Array, np.ndarray)) or seed.shape != () or seed.dtype.name not in ("int32", "int64", "uint32", "uint64"):
        found = f"{seed.dtype.name} {list(seed.shape)}" if isinstance(seed, (jax.Array, np.ndarray)) else repr(seed)
        raise TypeError(
            f"attention: dropout_seed must be an integer, a scalar array of int32, int64, uint32 or uint64, or uint32 [2]; got {found}"
        )
    if not isinstance(seed, jax.core.Tracer):
        return seed_words(int(seed) & (2**64 - 1))
    low = seed.astype(jnp.uint32)
    if seed.dtype.itemsize == 8:
        return jnp.stack([low, (seed >> 32).astype(jnp.uint32)])
    sign = jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return jnp.stack([low, sign])


def from_numpy(array: np.ndarray) -> np.ndarray:
    """numpy data as JAX takes it: ``attn_spec.bfloat16`` becomes ml_dtypes' bfloat16; int64 becomes int32 when every value fits."""
    if array.dtype == bfloat16:
        return np.ascontiguousarray(array)["bfloat16"].view(ml_dtypes.bfloat16)
    if array.dtype == np.int64 and (array.size == 0 or (array.min() >= _INT32.min and array.max() <= _INT32.max)):
        return array.astype(np.int32)
    return array


def to_numpy(array: jax.Array) -> np.ndarray:
    """An array with the bits of ``array``."""
    host = np.asarray(array)
    if host.dtype == ml_dtypes.bfloat16:
        return np.ascontiguousarray(host).view(np.uint16).view(bfloat16)
    return host
