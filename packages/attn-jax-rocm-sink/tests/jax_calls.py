"""Calls of ``attention`` that the tests share: one small base call and every feature that can be added to it, alone or together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from attn_jax_rocm_sink._arrays import from_numpy
from attn_spec import Call, bfloat16
from attn_spec._arrays import from_float32

B, H, K, S, T, D, V = 2, 4, 2, 5, 9, 6, 3

Feature = Callable[[np.random.Generator, str], tuple[dict[str, np.ndarray], dict[str, object]]]

FEATURES: dict[str, Feature] = {
    "plain": lambda rng, dtype: ({}, {}),
    "full": lambda rng, dtype: ({}, {"causal": False}),
    "scale": lambda rng, dtype: ({}, {"scale": -0.7}),
    "scale_zero": lambda rng, dtype: ({}, {"scale": 0.0}),
    "key_padding_mask": lambda rng, dtype: ({"key_padding_mask": rng.random((B, T)) < 0.6}, {}),
    "kv_lengths": lambda rng, dtype: ({"kv_lengths": np.array([4, 0])}, {}),
    "q_start": lambda rng, dtype: ({"q_start": np.array([0, 3], np.int32)}, {}),
    "k_start": lambda rng, dtype: ({"k_start": np.array([250, 2])}, {"q_start": 254}),
    "window": lambda rng, dtype: ({}, {"window": (2, 1), "causal": False}),
    "window_left": lambda rng, dtype: ({}, {"window": (1, None)}),
    "sinks": lambda rng, dtype: ({"sinks": np.array([0.5, -np.inf, 2.0, -3.0], np.float32)}, {}),
    "sinks_low": lambda rng, dtype: ({"sinks": from_float32(np.array([0.5, 20.0, 2.0, -3.0], np.float32), dtype)}, {}),
    "bias": lambda rng, dtype: ({"bias": _bias(rng, (1, H, S, T), dtype)}, {}),
    "bias_keys": lambda rng, dtype: ({"bias": _bias(rng, (B, 1, 1, T), "float32")}, {"causal": False}),
    "dropout": lambda rng, dtype: ({}, {"dropout_p": 0.4, "dropout_seed": 2**63 + 12345}),
    "dropout_all": lambda rng, dtype: ({}, {"dropout_p": 1.0, "dropout_seed": 1}),
    "no_visible_key": lambda rng, dtype: ({"kv_lengths": np.array([0, 2], np.int32)}, {"q_start": -20}),
}


def _bias(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    values[rng.random(shape) < 0.2] = -np.inf
    return from_float32(values, dtype)


def make_call(*features: str, dtype: str = "float32", seed: int = 0, gradient: bool = True) -> Call:
    """The base call with ``features``, a cotangent for out and lse, and every gradient asked for."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, name: str = dtype) -> np.ndarray:
        return from_float32(rng.standard_normal(shape).astype(np.float32), name)

    arrays = {"q": normal(B, H, S, D), "k": normal(B, K, T, D), "v": normal(B, K, T, V)}
    cotangents = {"out": normal(B, H, S, V), "lse": normal(B, H, S, name="float32")}
    options: dict[str, object] = {"return_lse": True}
    for feature in features:
        more_arrays, more_options = FEATURES[feature](rng, dtype)
        arrays |= more_arrays
        options |= more_options
    wrt = tuple(name for name in ("q", "k", "v", "sinks", "bias") if name in arrays)
    call = Call("attention", arrays, options, cotangents, wrt)
    return call if gradient else replace(call, cotangents=None, wrt=())


SM90 = "sm90-v1"
SM90_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full, float16": {"causal": False, "dtype": "float16"},
    "D 128": {"head_dim": 128},
    "window and sinks": {"window": (30, None), "sinks": True, "scale": 0.3},
    "lengths and starts": {"kv_lengths": np.array([140, 33], np.int32), "k_start": np.array([100, 0], np.int32)},
}


def sm90_call(case: str) -> Call:
    """A call of contract sm90-v1 with gradients of everything, through out and LSE."""
    options = dict(SM90_CASES[case])
    rng = np.random.default_rng(7)
    dtype, width = options.pop("dtype", "bfloat16"), options.pop("head_dim", 64)

    def normal(*sizes: int, name: str = dtype) -> np.ndarray:
        return from_float32(rng.standard_normal(sizes).astype(np.float32), name)

    arrays = {"q": normal(2, 4, 20, width), "k": normal(2, 2, 140, width), "v": normal(2, 2, 140, width)}
    if options.pop("sinks", False):
        arrays["sinks"] = np.array([0.5, -np.inf, 2.0, -3.0], np.float32)
    arrays |= {name: options.pop(name) for name in ("kv_lengths", "k_start") if name in options}
    wrt = tuple(name for name in ("q", "k", "v", "sinks") if name in arrays)
    cotangents = {"out": normal(2, 4, 20, width), "lse": normal(2, 4, 20, name="float32")}
    return Call("attention", arrays, {**options, "return_lse": True}, cotangents, wrt, contract=SM90)


def jax_arrays(call: Call) -> dict[str, jnp.ndarray]:
    """The call's arrays as JAX arrays."""
    return {name: jnp.asarray(from_numpy(array)) for name, array in call.arrays.items()}


def bits(array: object) -> np.ndarray:
    """numpy array with the bits of a JAX array, bfloat16 as ``attn_spec.bfloat16``."""
    host = np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array))
    return host.view(np.uint16).view(bfloat16) if host.dtype.name == "bfloat16" else host
