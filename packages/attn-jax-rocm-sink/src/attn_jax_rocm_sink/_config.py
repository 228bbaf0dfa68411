"""One attention call as the engines read it: the C struct ``attn::engine::Config`` (csrc/config.h), member by member."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["GRADIENTS", "Config", "Strides", "config_of", "on_device"]

GRADIENTS = {"dq": 1, "dk": 2, "dv": 4, "dsinks": 8, "dbias": 16}
"""Bits of ``Config.gradients``."""

_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
_SOFTMAX = {"vanilla": 0, "off_by_one": 1, "learnable": 2}
_BIAS = {"none": 0, "elementwise": 1}
_ALIGNMENT = {"bottom_right": 0, "top_left": 1, "operands": 2}


class Strides(ctypes.Structure):
    """In elements of [B, H, rows, columns]."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row", "column")]


def _words(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class Config(ctypes.Structure):
    """Sizes, strides, dtypes and options of a call, without a pointer. Equal bytes give the same workspace and the same kernels."""

    _fields_ = [
        *_words("batch heads kv_heads queries keys head_dim value_dim dtype out_dtype"),
        *[(name, Strides) for name in ("q", "k", "v", "out")],
        *_words("softmax bias bias_dtype"),
        ("bias_shape", ctypes.c_int64 * 4),
        *_words("packed key_padding_mask kv_lengths k_start seqlens alignment causal window_left window_right dlse gradients device"),
        ("scale", ctypes.c_double),
        ("dropout_p", ctypes.c_double),
    ]

    def words(self) -> np.ndarray:
        """The struct as int64 words, an attribute of the custom call."""
        return np.frombuffer(bytes(self), np.int64)


def config_of(operands: Mapping[str, Any], results: Mapping[str, Any], attributes: Mapping[str, Any]) -> Config:
    """The configuration of a call, from the shapes and dtypes of its named operands and results.

    Sinks and bias exist iff their operands do; ``attributes`` has causal, window_left, window_right, scale and dropout_p.
    """
    q, k, v = (operands[name] for name in ("q", "k", "v"))
    packed = "cu_seqlens_q" in operands
    config = Config(packed=int(packed), dtype=_DTYPES[q.dtype.name])
    if packed:
        (config.queries, config.heads, config.head_dim), (config.keys, config.kv_heads) = q.shape, k.shape[:2]
        config.batch = operands["cu_seqlens_q"].shape[0] - 1
    else:
        (config.batch, config.heads, config.queries, config.head_dim), (config.kv_heads, config.keys) = q.shape, k.shape[1:3]
    config.value_dim = v.shape[-1]
    out = results["out"] if "out" in results else operands["dout"]
    config.out_dtype = _DTYPES[out.dtype.name]
    for name, array in {"q": q, "k": k, "v": v, "out": out}.items():
        setattr(config, name, _dense(array.shape))
    config.softmax = _SOFTMAX["learnable" if "sinks" in operands else "vanilla"]
    config.bias = _BIAS["elementwise" if "bias" in operands else "none"]
    if "bias" in operands:
        config.bias_dtype = _DTYPES[operands["bias"].dtype.name]
        config.bias_shape = (ctypes.c_int64 * 4)(*operands["bias"].shape)
    for name in ("key_padding_mask", "kv_lengths", "k_start", "dlse"):
        setattr(config, name, int(name in operands))
    config.seqlens = int("seqlens_q" in operands)
    config.alignment = _ALIGNMENT["operands" if "q_start" in operands else "bottom_right"]
    config.gradients = _gradients(results)
    for name, value in attributes.items():
        setattr(config, name, float(value) if name in ("scale", "dropout_p") else int(value))
    return config


def _gradients(results: Iterable[str]) -> int:
    return sum(GRADIENTS[name] for name in results if name in GRADIENTS)


def _dense(shape: tuple[int, ...]) -> Strides:
    if len(shape) == 3:
        _, heads, columns = shape
        return Strides(0, columns, heads * columns, 1)
    _, heads, rows, columns = shape
    return Strides(heads * rows * columns, rows * columns, columns, 1)


def on_device(operands: Mapping[str, jax.Array], as_float32: Iterable[str]) -> dict[str, jax.Array]:
    """Operands as an engine on a device takes them: those named as float32, and integers as int64 or pairs of int32 (low word first)."""
    found = dict(operands)
    for name, array in operands.items():
        if name in as_float32:
            found[name] = array.astype(np.float32)
        elif array.dtype == np.int32:
            found[name] = jax.numpy.stack([array, array >> 31], axis=-1)
    return found
