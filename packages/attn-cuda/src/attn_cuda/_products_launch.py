"""Kernel calls of ``joint_attn_qk_gemm`` and ``joint_attn_av_gemm``: three products in both directions."""

from __future__ import annotations

import torch
from attn_spec.torch import Launches
from torch import Tensor

from attn_cuda._arrays import Launch, allocator, array, contiguous_strides, dtype_codes, module_for
from attn_cuda._describer import describer

__all__ = ["ProductKernels", "over_keys", "over_width"]


class ProductKernels:
    """Products of the ``cuda`` engine on the current stream of the device. Inputs may have any strides; results are contiguous."""

    def qk_gemm_forward(self, q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        """q [B, H, S, D], k [B, K, T, D] -> scores [B, H, S, T] of ``out_dtype``."""
        found: Tensor = _OVER_WIDTH(q, k, scale, out_dtype)
        return found

    def qk_gemm_backward(
        self, dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dscores [B, H, S, T] -> dq, dk as needed, in the dtypes of q and k."""
        dq = _OVER_KEYS(dscores, k, scale, q.dtype) if needs[0] else None
        return dq, _OVER_QUERIES(dscores, q, tuple(k.shape), scale, k.dtype) if needs[1] else None

    def av_gemm_forward(self, probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
        """probs [B, H, S, T], v [B, K, T, V] -> out [B, H, S, V] of ``out_dtype``."""
        found: Tensor = _OVER_KEYS(probs, v, 1.0, out_dtype)
        return found

    def av_gemm_backward(self, dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """dout [B, H, S, V] -> dprobs, dv as needed, in the dtypes of probs and v."""
        dprobs = _OVER_WIDTH(dout, v, 1.0, probs.dtype) if needs[0] else None
        return dprobs, _OVER_QUERIES(probs, dout, tuple(v.shape), 1.0, v.dtype) if needs[1] else None


def over_width(rows: Tensor, keys: Tensor, scale: float, out_dtype: torch.dtype) -> Launch:
    """rows [B, H, S, W], keys [B, K, T, W] -> [B, H, S, T]."""
    kind = module_for(rows, keys).OVER_WIDTH
    (batch, heads, queries, _), (_, kv_heads, count, _) = rows.shape, keys.shape
    return _launch(kind, kv_heads, scale, rows, keys, (batch, heads, queries, count), out_dtype)


def over_keys(weights: Tensor, keys: Tensor, scale: float, out_dtype: torch.dtype) -> Launch:
    """weights [B, H, S, T], keys [B, K, T, W] -> [B, H, S, W]."""
    kind = module_for(weights, keys).OVER_KEYS
    (batch, heads, queries, _), (_, kv_heads, _, width) = weights.shape, keys.shape
    return _launch(kind, kv_heads, scale, weights, keys, (batch, heads, queries, width), out_dtype)


def _over_queries(weights: Tensor, rows: Tensor, shape: tuple[int, ...], scale: float, out_dtype: torch.dtype) -> Launch:
    """weights [B, H, S, T], rows [B, H, S, W] -> a gradient of ``shape`` [B, K, T, W]."""
    return _launch(module_for(weights, rows).OVER_QUERIES, shape[1], scale, weights, rows, shape, out_dtype)


def _launch(kind: int, kv_heads: int, scale: float, left: Tensor, right: Tensor, shape: tuple[int, ...], out_dtype: torch.dtype) -> Launch:
    module, device = module_for(left, right), left.device
    codes, index = dtype_codes(module), device.index
    allocate, stream_of = allocator(shape, out_dtype, device), torch._C._cuda_getCurrentRawStream
    if 0 in shape:
        return lambda addresses: allocate()
    out_array = 0, codes[out_dtype], torch.Size(shape), contiguous_strides(shape)
    run = module.Product(index, (kind, kv_heads, array(codes, left), array(codes, right), out_array), scale).run

    def launch(addresses: list[int]) -> Tensor:
        out = allocate()
        run(stream_of(index), *addresses, out.data_ptr())
        return out

    return launch


_OVER_WIDTH, _OVER_KEYS, _OVER_QUERIES = (Launches(prepare, describer) for prepare in (over_width, over_keys, _over_queries))
