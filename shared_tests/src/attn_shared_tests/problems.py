"""Calls on random data, and the edits that clauses are made of: take some batch items, queries or keys; poison elements; swap options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from attn_spec import Call
from attn_spec._arrays import dtype_name, from_float32
from attn_spec._operators import operator

AXES = {
    "q": "BHSD",
    "k": "BKTD",
    "v": "BKTV",
    "key_padding_mask": "BT",
    "kv_lengths": "B",
    "q_start": "B",
    "k_start": "B",
    "sinks": "H",
    "bias": "BHST",
    "out": "BHSV",
    "lse": "BHS",
    "dq": "BHSD",
    "dk": "BKTD",
    "dv": "BKTV",
    "dsinks": "H",
    "dbias": "BHST",
}
"""Axis letters of the arrays of ``attention``: arguments, results and gradients."""

QKV = ("q", "k", "v")
ROWS = ("out", "lse", "dq")


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", spread: float = 1.0) -> np.ndarray:
    """Normal values in a dtype by name."""
    return from_float32(rng.standard_normal(shape, dtype=np.float32) * np.float32(spread), dtype)


def scalar(value: float, like: np.ndarray) -> np.ndarray:
    """``value`` in the dtype of ``like``, shape []."""
    return from_float32(np.array([value], np.float32), dtype_name(like.dtype))[0]


def poisoned(array: np.ndarray, where: Any, value: float) -> np.ndarray:
    """A copy with ``value`` at the index ``where``."""
    copy = array.copy()
    copy[where] = scalar(value, array)
    return copy


def attention(
    *,
    seed: int = 0,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 5,
    keys: int = 7,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: str = "float32",
    spread: float = 1.0,
    with_sinks: bool = False,
    bias_shape: tuple[int, int, int, int] | None = None,
    wrt: tuple[str, ...] = (),
    **keywords: Any,
) -> Call:
    """An ``attention`` call on normal data that returns LSE; with ``wrt`` both results have a cotangent. Keywords are the operator's."""
    rng = np.random.default_rng(seed)
    value_dim = head_dim if value_dim is None else value_dim
    arrays = {
        "q": normal(rng, (batch, heads, queries, head_dim), dtype, spread),
        "k": normal(rng, (batch, kv_heads, keys, head_dim), dtype, spread),
        "v": normal(rng, (batch, kv_heads, keys, value_dim), dtype),
    }
    if with_sinks:
        arrays["sinks"] = normal(rng, (heads,))
    if bias_shape is not None:
        arrays["bias"] = normal(rng, bias_shape, dtype)
    cotangents = {"out": normal(rng, (batch, heads, queries, value_dim), dtype), "lse": normal(rng, (batch, heads, queries))}
    return _call("attention", arrays, {"return_lse": True, **keywords}, cotangents, wrt)


def varlen(
    lengths_q: Iterable[int],
    lengths_k: Iterable[int] | None = None,
    *,
    seed: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: str = "float32",
    trailing: int = 0,
    with_sinks: bool = False,
    wrt: tuple[str, ...] = (),
    **keywords: Any,
) -> Call:
    """An ``attention_varlen`` call; ``trailing`` rows lie past the last segment."""
    rng = np.random.default_rng(seed)
    sizes_q = list(lengths_q)
    sizes_k = sizes_q if lengths_k is None else list(lengths_k)
    total_q, total_k = sum(sizes_q) + trailing, sum(sizes_k) + trailing
    arrays = {
        "q": normal(rng, (total_q, heads, head_dim), dtype),
        "k": normal(rng, (total_k, kv_heads, head_dim), dtype),
        "v": normal(rng, (total_k, kv_heads, head_dim), dtype),
        "cu_seqlens_q": np.cumsum([0, *sizes_q]).astype(np.int32),
        "cu_seqlens_k": np.cumsum([0, *sizes_k]).astype(np.int32),
    }
    if with_sinks:
        arrays["sinks"] = normal(rng, (heads,))
    cotangents = {"out": normal(rng, (total_q, heads, head_dim), dtype), "lse": normal(rng, (heads, total_q))}
    return _call("attention_varlen", arrays, {"return_lse": True, **keywords}, cotangents, wrt)


def softmax(
    shape: tuple[int, ...], *, seed: int = 0, dtype: str = "float32", spread: float = 4.0, gradient: bool = False, **arrays: Any
) -> Call:
    """A ``joint_attn_softmax`` call over the last axis of ``shape``."""
    rng = np.random.default_rng(seed)
    scores = normal(rng, shape, dtype, spread)
    return _call(
        "joint_attn_softmax", {"scores": scores, **arrays}, {}, {"probs": normal(rng, shape, dtype)}, ("scores",) if gradient else ()
    )


def joint(
    *,
    seed: int = 0,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    text: int = 8,
    image: int = 16,
    head_dim: int = 8,
    dtype: str = "float32",
    gradient: bool = False,
    **arrays: Any,
) -> Call:
    """A ``joint_attention`` call."""
    rng = np.random.default_rng(seed)
    names = operator("joint_attention").inputs
    sizes = {"txt": text, "img": image}
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    data = {name: normal(rng, (batch, counts[name[0]], sizes[name[2:]], head_dim), dtype) for name in names}
    cotangents = {f"out_{side}": normal(rng, (batch, heads, sizes[side], head_dim), dtype) for side in sizes}
    return _call("joint_attention", {**data, **arrays}, {}, cotangents, names if gradient else ())


def take(call: Call, axis: str, index: Any) -> Call:
    """An ``attention`` call on some batch items ("B"), queries ("S") or keys ("T"); ``index`` is a slice or a list."""
    arrays = {name: _take(name, array, axis, index) for name, array in call.arrays.items()}
    cotangents = {name: _take(name, array, axis, index) for name, array in (call.cotangents or {}).items()}
    return replace(call, arrays=arrays, cotangents=cotangents if call.cotangents is not None else None)


def part(results: Mapping[str, np.ndarray], axis: str, index: Any, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """The same part of results; names without that axis are left out."""
    names = results if names is None else names
    return {name: _take(name, results[name], axis, index) for name in names if axis in AXES[name] and name in results}


def edited(call: Call, *, drop: Iterable[str] = (), cotangents: Any = None, **changes: Any) -> Call:
    """A copy with arrays and options replaced by name, and those in ``drop`` removed, with their gradients."""
    spec = operator(call.op)
    arrays = {name: array for name, array in call.arrays.items() if name not in set(drop) | set(changes)}
    options = {name: value for name, value in call.options.items() if name not in set(drop) | set(changes)}
    for name, value in changes.items():
        (arrays if isinstance(value, np.ndarray) and name in spec.arrays else options)[name] = value
    wrt = tuple(name for name in call.wrt if name in arrays)
    return replace(call, arrays=arrays, options=options, wrt=wrt, cotangents=call.cotangents if cotangents is None else cotangents)


def some_heads(call: Call, index: slice) -> Call:
    """The query heads of ``index``, in q, sinks, bias and cotangents."""
    cotangents = {name: array[:, index] for name, array in (call.cotangents or {}).items()}
    arrays = {"q": call.arrays["q"][:, index]}
    if "sinks" in call.arrays:
        arrays["sinks"] = call.arrays["sinks"][index]
    if "bias" in call.arrays and call.arrays["bias"].shape[1] > 1:
        arrays["bias"] = call.arrays["bias"][:, index]
    return edited(call, cotangents=cotangents, **arrays)


def shifted(call: Call, shift: int | np.ndarray) -> Call:
    """The same pairs and numbers with every position moved by ``shift``, hence another tiling."""
    if call.op != "attention":
        return call
    batch, queries, keys = call.arrays["q"].shape[0], call.arrays["q"].shape[2], call.arrays["k"].shape[2]
    lengths = call.arrays.get("kv_lengths", np.full(batch, keys)).astype(np.int64)
    given = {name: call.arrays.get(name, call.options.get(name)) for name in ("q_start", "k_start")}
    k_start = np.broadcast_to(np.asarray(0 if given["k_start"] is None else given["k_start"], np.int64), (batch,))
    q_start = k_start + lengths - queries if given["q_start"] is None else np.broadcast_to(np.asarray(given["q_start"], np.int64), (batch,))
    return edited(call, q_start=q_start + shift, k_start=k_start + shift)


def mask_of(lengths: Iterable[int], size: int) -> np.ndarray:
    """Key mask [B, size] that keeps the first ``length`` keys of each item."""
    return np.arange(size)[None, :] < np.array(list(lengths))[:, None]


def _take(name: str, array: np.ndarray, axis: str, index: Any) -> np.ndarray:
    if axis not in AXES[name]:
        return array
    place = AXES[name].index(axis)
    if name == "bias" and array.shape[place] == 1:
        return array
    return array[(slice(None),) * place + (index,)]


def _call(
    op: str, arrays: dict[str, np.ndarray], keywords: dict[str, Any], cotangents: dict[str, np.ndarray], wrt: tuple[str, ...]
) -> Call:
    spec = operator(op)
    given = {name: value for name, value in keywords.items() if isinstance(value, np.ndarray) and name in spec.arrays}
    options = {name: value for name, value in keywords.items() if name not in given}
    return Call(op, {**arrays, **given}, options, cotangents if wrt else None, wrt)
