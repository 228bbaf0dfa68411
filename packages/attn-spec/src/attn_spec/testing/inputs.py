"""Random calls of every operator from plain sizes, and the rearrangement of a call's batch items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attn_spec._arrays import from_float32
from attn_spec._backend import Call
from attn_spec._operators import QAT
from attn_spec._qat import QATConfig

__all__ = ["Sizes", "outputs_of", "random_call", "select"]

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and features of a random call; axes as in ``attn_spec``."""

    batch: int = 2
    heads: int = 4
    kv_heads: int | None = None
    queries: int = 16
    keys: int | None = None
    head_dim: int = 64
    value_dim: int | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    sinks: bool = False
    padding: bool = False


def random_call(op: str, dtype: str, sizes: Sizes, seed: int = 0, *, gradients: bool = False) -> Call:
    """Normal data for ``op``. With ``gradients`` the call has a cotangent for every output and asks for every gradient."""
    generator = np.random.default_rng(seed)

    def normal(shape: Shape, name: str = dtype) -> np.ndarray:
        return from_float32(generator.standard_normal(shape).astype(np.float32), name)

    keys = sizes.queries if sizes.keys is None else sizes.keys
    kv_heads = sizes.heads if sizes.kv_heads is None else sizes.kv_heads
    value_dim = sizes.head_dim if sizes.value_dim is None else sizes.value_dim
    q = (sizes.batch, sizes.heads, sizes.queries, sizes.head_dim)
    k = (sizes.batch, kv_heads, keys, sizes.head_dim)
    v = (*k[:3], value_dim)
    rows = (*q[:3], keys)
    mask = generator.random((sizes.batch, keys)) < 0.7 if sizes.padding else None
    if op == "joint_attn_qk_gemm":
        call = Call(op, {"q": normal(q), "k": normal(k)}, {}, {"scores": normal(rows, "float32")}, ("q", "k"))
    elif op == "joint_attn_softmax":
        arrays = {"scores": from_float32((3.0 * generator.standard_normal(rows)).astype(np.float32), dtype)}
        call = Call(op, arrays, {}, {"probs": normal(rows)}, ("scores",))
    elif op == "joint_attn_av_gemm":
        probs = generator.random(rows).astype(np.float32) / np.float32(max(keys, 1))
        call = Call(op, {"probs": probs, "v": normal(v)}, {}, {"out": normal((*q[:3], value_dim))}, ("probs", "v"))
    elif op == "joint_attention":
        shapes = {name: (*shape[:2], length, shape[3]) for name, shape in (("q", q), ("k", k), ("v", v)) for length in (sizes.queries,)}
        arrays = {f"{name}_{side}": normal(shape) for side in ("txt", "img") for name, shape in shapes.items()}
        out = (*q[:3], value_dim)
        call = Call(op, arrays, {}, {"out_txt": normal(out), "out_img": normal(out)}, tuple(arrays))
        mask = generator.random((sizes.batch, sizes.queries)) < 0.7 if sizes.padding else None
    elif op in ("attention", "qat_attention"):
        arrays = {"q": normal(q), "k": normal(k), "v": normal(v)}
        call = _attention(op, arrays, sizes, {"out": normal((*q[:3], value_dim)), "lse": normal(q[:3], "float32")}, normal)
    elif op in ("attention_varlen", "qat_attention_varlen"):
        call = _varlen(op, sizes, keys, kv_heads, value_dim, normal)
    else:
        raise ValueError(f"no random call for operator {op!r}")
    if mask is not None:
        name = "prompt_mask" if op == "joint_attention" else "key_padding_mask"
        if op in ("joint_attn_softmax", "joint_attention", "attention", "qat_attention"):
            call = replace(call, arrays={**call.arrays, name: mask})
    return call if gradients else replace(call, cotangents=None, wrt=())


def _attention(op: str, arrays: dict[str, np.ndarray], sizes: Sizes, cotangents: dict[str, np.ndarray], normal: object) -> Call:
    wrt: tuple[str, ...] = ("q", "k", "v")
    if sizes.sinks:
        arrays["sinks"] = np.linspace(-2.0, 3.0, sizes.heads, dtype=np.float32)
        wrt = (*wrt, "sinks")
    options: dict[str, Any] = {"causal": sizes.causal, "return_lse": True}
    options |= {"config": QATConfig.training(causal=sizes.causal)} if op in QAT else {"window": sizes.window}
    return Call(op, arrays, options, cotangents, wrt)


def _varlen(op: str, sizes: Sizes, keys: int, kv_heads: int, value_dim: int, normal: object) -> Call:
    """Segment b has about ``queries`` and ``keys`` rows, each segment a different number."""
    assert callable(normal)
    lengths_q = [max(0, sizes.queries - item) for item in range(sizes.batch)]
    lengths_k = [max(0, keys - item) for item in range(sizes.batch)]
    offsets = {name: np.concatenate([[0], np.cumsum(part)]).astype(np.int32) for name, part in (("q", lengths_q), ("k", lengths_k))}
    total_q, total_k = int(offsets["q"][-1]), int(offsets["k"][-1])
    arrays = {
        "q": normal((total_q, sizes.heads, sizes.head_dim)),
        "k": normal((total_k, kv_heads, sizes.head_dim)),
        "v": normal((total_k, kv_heads, value_dim)),
        "cu_seqlens_q": offsets["q"],
        "cu_seqlens_k": offsets["k"],
    }
    cotangents = {"out": normal((total_q, sizes.heads, value_dim)), "lse": normal((sizes.heads, total_q), "float32")}
    return _attention(op, arrays, sizes, cotangents, normal)


def select(call: Call, items: Sequence[int]) -> Call:
    """The call on the batch items (packed: segments) ``items``, in that order; items may repeat."""
    if call.op.endswith("_varlen"):
        return _select_packed(call, items)
    keep = np.asarray(items, dtype=np.int64)
    arrays = {name: array if name == "sinks" or _broadcast(call, name) else array[keep] for name, array in call.arrays.items()}
    cotangents = {name: array[keep] for name, array in call.cotangents.items()} if call.cotangents else None
    return replace(call, arrays=arrays, cotangents=cotangents)


def _broadcast(call: Call, name: str) -> bool:
    return name == "bias" and call.arrays["bias"].shape[0] == 1 and call.arrays["q"].shape[0] != 1


def _packed_rows(offsets: np.ndarray, items: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    rows = [np.arange(offsets[item], offsets[item + 1]) for item in items]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(offsets.dtype)
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64), starts


def _select_packed(call: Call, items: Sequence[int]) -> Call:
    arrays = dict(call.arrays)
    rows_q, arrays["cu_seqlens_q"] = _packed_rows(call.arrays["cu_seqlens_q"], items)
    rows_k, arrays["cu_seqlens_k"] = _packed_rows(call.arrays["cu_seqlens_k"], items)
    for name, rows in (("q", rows_q), ("k", rows_k), ("v", rows_k)):
        arrays[name] = call.arrays[name][rows]
    for name in ("seqlens_q", "seqlens_k"):
        if name in arrays:
            arrays[name] = call.arrays[name][np.asarray(items, dtype=np.int64)]
    cotangents = None
    if call.cotangents:
        cotangents = {name: array[:, rows_q] if name == "lse" else array[rows_q] for name, array in call.cotangents.items()}
    return replace(call, arrays=arrays, cotangents=cotangents)


def outputs_of(call: Call, results: dict[str, np.ndarray], item: int) -> dict[str, np.ndarray]:
    """The part of ``results`` that belongs to batch item (segment) ``item``; sums over the batch (dsinks, dbias) are left out."""
    if not call.op.endswith("_varlen"):
        return {name: array[item] for name, array in results.items() if name not in ("dsinks", "dbias")}
    rows = {name: slice(*call.arrays[f"cu_seqlens_{name}"][item : item + 2]) for name in ("q", "k")}
    found = {}
    for name, array in results.items():
        if name in ("dk", "dv"):
            found[name] = array[rows["k"]]
        elif name in ("out", "dq"):
            found[name] = array[rows["q"]]
        elif name == "lse":
            found[name] = array[:, rows["q"]]
    return found
