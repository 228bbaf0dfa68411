"""Attention and its gradients in float64, from the definition, and dropout's mask from Philox: what cells of the matrix are held to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Problem", "kept_pairs", "solve"]


@dataclass(frozen=True)
class Problem:
    """float64 arrays of one batch. ``visible`` bool [B, S, T]; ``bias`` [B, H, S, T] added after scaling; ``keep`` bool [B, H, S, T]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray
    scale: float
    sinks: np.ndarray | None
    bias: np.ndarray | None
    keep: np.ndarray | None
    dropout_p: float
    dout: np.ndarray
    dlse: np.ndarray


def solve(problem: Problem) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv, dsinks [B, H] (unsummed over the batch) and ds [B, H, S, T]."""
    group = problem.q.shape[1] // problem.k.shape[1]
    k, v = (np.repeat(array, group, axis=1) for array in (problem.k, problem.v))
    scores = np.einsum("bhsd,bhtd->bhst", problem.q, k) * problem.scale
    if problem.bias is not None:
        scores = scores + problem.bias
    masked = np.broadcast_to(~problem.visible[:, None], scores.shape) | np.isneginf(scores)
    scores = np.where(masked, -np.inf, scores)
    sinks = np.full(scores.shape[1], -np.inf) if problem.sinks is None else problem.sinks
    top = np.maximum(scores.max(-1, initial=-np.inf), sinks[:, None])
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(masked, 0.0, np.exp(scores - top[..., None]))
        sink_weight = np.where(np.isneginf(sinks)[:, None], 0.0, np.exp(sinks[:, None] - top))
        total = weights.sum(-1) + sink_weight
        lse = top + np.log(total)
        alive = total > 0
        p = np.where(alive[..., None], weights / total[..., None], 0.0)
        p_sink = np.where(alive, sink_weight / total, 0.0)
    kept = 1.0 if problem.keep is None else problem.keep / (1.0 - problem.dropout_p)
    out = np.einsum("bhst,bhtv->bhsv", p * kept, v)
    dp = np.einsum("bhsv,bhtv->bhst", problem.dout, v) * kept
    delta = (p * dp).sum(-1) - problem.dlse
    ds = p * (dp - delta[..., None])
    dk = np.einsum("bhst,bhsd->bhtd", ds, problem.q) * problem.scale
    dv = np.einsum("bhst,bhsv->bhtv", p * kept, problem.dout)
    return {
        "out": out,
        "lse": lse,
        "dq": np.einsum("bhst,bhtd->bhsd", ds, k) * problem.scale,
        "dk": _over_groups(dk, group),
        "dv": _over_groups(dv, group),
        "dsinks": -(p_sink * delta).sum(-1),
        "ds": ds,
    }


def _over_groups(gradient: np.ndarray, group: int) -> np.ndarray:
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // group, group, *rest).sum(2)


def kept_pairs(seed: int, p: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Pairs [B, H, S, T] that dropout keeps: word 0 of Philox4x32-10 (Salmon et al., SC 2011) reaches floor(p * 2^32)."""
    counters = [np.broadcast_to(index, shape).astype(np.uint64) for index in np.ogrid[tuple(slice(size) for size in shape)]]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first, second = counters[0] * np.uint64(0xD2511F53), counters[2] * np.uint64(0xCD9E8D57)
        counters = [(second >> word) ^ counters[1] ^ key[0], second & low, (first >> word) ^ counters[3] ^ key[1], first & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return counters[0] >= np.uint64(int(p * 2**32))
