"""Kernel calls of ``joint_attn_qk_gemm`` and ``joint_attn_av_gemm``: three products in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_cuda._arrays import Launch, allocator, array, dtype_codes, module_for

__all__ = ["ProductKernels", "over_keys", "over_width"]


class ProductKernels:
    """Products of the ``cuda`` engine on the current stream of the device. Inputs may have any strides; results are contiguous."""

    def qk_gemm_forward(self, q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        """q [B, H, S, D], k [B, K, T, D] -> scores [B, H, S, T] of ``out_dtype``."""
        return _run(over_width(q, k, scale, out_dtype), q, k)

    def qk_gemm_backward(
        self, dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dscores [B, H, S, T] -> dq, dk as needed, in the dtypes of q and k."""
        dq = _run(over_keys(dscores, k, scale, q.dtype), dscores, k) if needs[0] else None
        return dq, _run(_over_queries(dscores, q, k, scale), dscores, q) if needs[1] else None

    def av_gemm_forward(self, probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
        """probs [B, H, S, T], v [B, K, T, V] -> out [B, H, S, V] of ``out_dtype``."""
        return _run(over_keys(probs, v, 1.0, out_dtype), probs, v)

    def av_gemm_backward(self, dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """dout [B, H, S, V] -> dprobs, dv as needed, in the dtypes of probs and v."""
        dprobs = _run(over_width(dout, v, 1.0, probs.dtype), dout, v) if needs[0] else None
        return dprobs, _run(_over_queries(probs, dout, v, 1.0), probs, dout) if needs[1] else None


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


def _over_queries(weights: Tensor, rows: Tensor, like: Tensor, scale: float) -> Launch:
    """weights [B, H, S, T], rows [B, H, S, W] -> a gradient of ``like`` [B, K, T, W]."""
    kind = module_for(weights, rows, like).OVER_QUERIES
    return _launch(kind, like.shape[1], scale, weights, rows, tuple(like.shape), like.dtype)


def _launch(kind: int, kv_heads: int, scale: float, left: Tensor, right: Tensor, shape: tuple[int, ...], out_dtype: torch.dtype) -> Launch:
    module, device = module_for(left, right), left.device
    product, codes, index = module.product, dtype_codes(module), device.index
    _, *of_left = array(codes, left)
    _, *of_right = array(codes, right)
    allocate, stream_of, code = allocator(shape, out_dtype, device), torch._C._cuda_getCurrentRawStream, codes[out_dtype]
    if 0 in shape:
        return lambda addresses: allocate()

    def launch(addresses: list[int]) -> Tensor:
        out = allocate()
        arrays = (addresses[0], *of_left), (addresses[1], *of_right), (out.data_ptr(), code, shape, out.stride())
        product(index, stream_of(index), (kind, kv_heads, *arrays), scale)
        return out

    return launch


def _run(launch: Launch, *tensors: Tensor) -> Tensor:
    out: Tensor = launch([tensor.data_ptr() for tensor in tensors])
    return out
