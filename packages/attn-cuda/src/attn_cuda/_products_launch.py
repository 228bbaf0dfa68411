"""Kernel calls of ``joint_attn_qk_gemm`` and ``joint_attn_av_gemm``: three products in both directions."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from attn_cuda._arrays import array, dtype_codes, module_for, place

__all__ = ["ProductKernels"]


class ProductKernels:
    """Products of the ``cuda`` engine on the current stream of the device. Inputs may have any strides; results are contiguous."""

    def qk_gemm_forward(self, q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        """q [B, H, S, D], k [B, K, T, D] -> scores [B, H, S, T] of ``out_dtype``."""
        return _over_width(q, k, scale, out_dtype)

    def qk_gemm_backward(
        self, dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dscores [B, H, S, T] -> dq, dk as needed, in the dtypes of q and k."""
        dq = _over_keys(dscores, k, scale, q.dtype) if needs[0] else None
        return dq, _over_queries(dscores, q, k, scale) if needs[1] else None

    def av_gemm_forward(self, probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
        """probs [B, H, S, T], v [B, K, T, V] -> out [B, H, S, V] of ``out_dtype``."""
        return _over_keys(probs, v, 1.0, out_dtype)

    def av_gemm_backward(self, dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """dout [B, H, S, V] -> dprobs, dv as needed, in the dtypes of probs and v."""
        dprobs = _over_width(dout, v, 1.0, probs.dtype) if needs[0] else None
        return dprobs, _over_queries(probs, dout, v, 1.0) if needs[1] else None


def _over_width(rows: Tensor, keys: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """rows [B, H, S, W], keys [B, K, T, W] -> [B, H, S, T]."""
    module = module_for(rows, keys)
    (batch, heads, queries, _), (_, kv_heads, count, _) = rows.shape, keys.shape
    out = rows.new_empty((batch, heads, queries, count), dtype=out_dtype)
    return _run(module, module.OVER_WIDTH, kv_heads, scale, rows, keys, out)


def _over_keys(weights: Tensor, keys: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """weights [B, H, S, T], keys [B, K, T, W] -> [B, H, S, W]."""
    module = module_for(weights, keys)
    (batch, heads, queries, _), (_, kv_heads, _, width) = weights.shape, keys.shape
    out = weights.new_empty((batch, heads, queries, width), dtype=out_dtype)
    return _run(module, module.OVER_KEYS, kv_heads, scale, weights, keys, out)


def _over_queries(weights: Tensor, rows: Tensor, like: Tensor, scale: float) -> Tensor:
    """weights [B, H, S, T], rows [B, H, S, W] -> a gradient of ``like`` [B, K, T, W]."""
    module = module_for(weights, rows, like)
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return _run(module, module.OVER_QUERIES, like.shape[1], scale, weights, rows, out)


def _run(module: ModuleType, kind: int, kv_heads: int, scale: float, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    if out.numel():
        codes = dtype_codes(module)
        device, stream = place(out)
        module.product(device, stream, (kind, kv_heads, array(codes, left), array(codes, right), array(codes, out)), scale)
    return out
