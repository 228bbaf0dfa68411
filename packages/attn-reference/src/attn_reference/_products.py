"""``joint_attn_qk_gemm`` and ``joint_attn_av_gemm`` of ``ordered-v1``: one FMA chain for each output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_reference._chain import chain
from attn_reference._rounding import stored

__all__ = ["av_gemm_backward", "av_gemm_forward", "qk_gemm_backward", "qk_gemm_forward"]


def qk_gemm_forward(q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """q [B, H, S, D], k [B, K, T, D] -> ``scale * q k^T`` [B, H, S, T] of ``out_dtype``."""
    scores = q.new_empty((*q.shape[:3], k.shape[2]), dtype=out_dtype)
    for index, rows, keys in _items(q, k):
        products = chain(rows, keys.transpose(-1, -2)) * _binary32(scale, q)
        scores[index] = stored(products, out_dtype).reshape(scores.shape[1:])
    return scores


def qk_gemm_backward(dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """dscores [B, H, S, T] -> dq, dk as needed, each in the dtype of its input."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if needs[0] else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if needs[1] else None
    for index, rows, keys in _items(q, k):
        upstream = _grouped(dscores[index], keys.shape[0])
        if dq is not None:
            dq[index] = stored(chain(upstream, keys) * _binary32(scale, q), q.dtype).reshape(q.shape[1:])
        if dk is not None:
            dk[index] = stored(chain(upstream.transpose(-1, -2), rows) * _binary32(scale, q), k.dtype)
    return dq, dk


def av_gemm_forward(probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
    """probs [B, H, S, T], v [B, K, T, V] -> ``probs v`` [B, H, S, V] of ``out_dtype``."""
    out = probs.new_empty((*probs.shape[:3], v.shape[3]), dtype=out_dtype)
    for index, rows, values in _items(probs, v):
        out[index] = stored(chain(rows, values), out_dtype).reshape(out.shape[1:])
    return out


def av_gemm_backward(dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """dout [B, H, S, V] -> dprobs, dv as needed, each in the dtype of its input."""
    dprobs = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device) if needs[0] else None
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if needs[1] else None
    for index, rows, values in _items(probs, v):
        upstream = _grouped(dout[index], values.shape[0])
        if dprobs is not None:
            dprobs[index] = stored(chain(upstream, values.transpose(-1, -2)), probs.dtype).reshape(probs.shape[1:])
        if dv is not None:
            dv[index] = stored(chain(rows.transpose(-1, -2), upstream), v.dtype)
    return dprobs, dv


def _items(rows: Tensor, keys: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Batch index, float32 query rows grouped by kv head [K, R, X], and float32 key rows [K, T, X]."""
    for index in range(rows.shape[0]):
        yield index, _grouped(rows[index], keys.shape[1]), keys[index].float()


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """[H, S, X] to float32 [K, G * S, X]: ascending rows are "head in its group, then query"."""
    return tensor.float().reshape(kv_heads, tensor.shape[0] // kv_heads * tensor.shape[1], tensor.shape[2])


def _binary32(scale: float, like: Tensor) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32, device=like.device)
