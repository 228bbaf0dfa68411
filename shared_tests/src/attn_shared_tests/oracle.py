"""Attention and its gradients in float64, written from the formulas: an answer that shares no code and no order with any backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attn_spec import Call
from attn_spec._arrays import to_float32

__all__ = ["attention", "visible"]


def visible(call: Call) -> np.ndarray:
    """Pairs that masks, lengths, causality and window leave: bool [B, 1, S, T]."""
    arrays, options = call.arrays, call.options
    batch, queries, keys = arrays["q"].shape[0], arrays["q"].shape[2], arrays["k"].shape[2]
    lengths = np.asarray(arrays.get("kv_lengths", np.full(batch, keys))).astype(np.int64)
    k_start = _starts(call, "k_start", np.zeros(batch, np.int64))
    q_start = _starts(call, "q_start", k_start + lengths - queries)
    key = np.arange(keys)[None, None, :]
    behind = (q_start[:, None] + np.arange(queries)[None, :])[:, :, None] - (k_start[:, None, None] + key)
    keep = np.broadcast_to(key < lengths[:, None, None], behind.shape).copy()
    if options.get("causal", True):
        keep &= behind >= 0
    left, right = options.get("window") or (None, None)
    if left is not None:
        keep &= behind <= left
    if right is not None:
        keep &= -behind <= right
    if "key_padding_mask" in arrays:
        keep &= arrays["key_padding_mask"][:, None, :]
    return keep[:, None]


def attention(call: Call) -> dict[str, np.ndarray]:
    """out, lse and, with cotangents, dq, dk, dv, dsinks and dbias of an ``attention`` call (without dropout), float64."""
    arrays = {name: to_float32(array).astype(np.float64) for name, array in call.arrays.items() if name in ("q", "k", "v", "sinks", "bias")}
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scale = call.options.get("scale")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    scores = np.einsum("bhsd,bhtd->bhst", q, k) * scale + arrays.get("bias", 0.0)
    scores = np.where(visible(call), scores, -np.inf)
    sinks = arrays.get("sinks", np.full(heads, -np.inf))[None, :, None, None]
    peak = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    weights, sink_weight = np.exp(scores - peak), np.exp(sinks - peak)
    total = weights.sum(axis=-1, keepdims=True) + sink_weight
    live = total > 0.0
    total = np.where(live, total, 1.0)
    probs, sink_prob = weights / total, np.where(live, sink_weight / total, 0.0)
    lse = np.where(live, np.log(total) + peak, -np.inf)[..., 0]
    found = {"out": np.einsum("bhst,bhtv->bhsv", probs, v), "lse": lse}
    if call.cotangents is not None:
        found |= _gradients(call, arrays, probs, sink_prob, k, v, scale)
    return found


def _gradients(
    call: Call, arrays: dict[str, np.ndarray], probs: np.ndarray, sink_prob: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> dict[str, np.ndarray]:
    cotangents = {name: to_float32(array).astype(np.float64) for name, array in (call.cotangents or {}).items()}
    dout = cotangents.get("out", np.zeros((*probs.shape[:3], v.shape[3])))
    dlse = cotangents.get("lse", np.zeros(probs.shape[:3]))[..., None]
    dprobs = np.einsum("bhsv,bhtv->bhst", dout, v)
    delta = (probs * dprobs).sum(axis=-1, keepdims=True) - dlse
    dscores = probs * (dprobs - delta)
    kv_heads = arrays["k"].shape[1]
    found = {
        "dq": np.einsum("bhst,bhtd->bhsd", dscores, k) * scale,
        "dk": _groups(np.einsum("bhst,bhsd->bhtd", dscores, arrays["q"]) * scale, kv_heads),
        "dv": _groups(np.einsum("bhst,bhsv->bhtv", probs, dout), kv_heads),
    }
    if "sinks" in arrays:
        found["dsinks"] = (-sink_prob * delta).sum(axis=(0, 2, 3))
    if "bias" in arrays:
        axes = tuple(axis for axis, size in enumerate(arrays["bias"].shape) if size == 1)
        found["dbias"] = dscores.sum(axis=axes, keepdims=True) if axes else dscores
    return {name: array for name, array in found.items() if name[1:] in call.wrt}


def _groups(array: np.ndarray, kv_heads: int) -> np.ndarray:
    batch, heads, *rest = array.shape
    return array.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(axis=2)


def _starts(call: Call, name: str, default: np.ndarray) -> np.ndarray:
    given: Any = call.arrays.get(name, call.options.get(name))
    return default if given is None else np.broadcast_to(np.asarray(given, np.int64), default.shape)
