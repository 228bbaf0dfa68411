"""Launches of the products of joint attention: operands, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

import torch
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _products_kernel as kernel
from attn_triton._configuration import Config, on_device
from attn_triton._products_kernel import Operand
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["CONFIGS", "av_gemm_backward", "av_gemm_forward", "qk_gemm_backward", "qk_gemm_forward"]

CONFIGS = {
    "cuda": Config(rows=128, num_warps=8, keys=128, chunk=16, num_stages=2),
    "rocm": Config(rows=64, num_warps=4, keys=64, chunk=16),
    "cpu": Config(rows=256, num_warps=1, keys=256, chunk=128),
}
"""By device; ``rows`` and ``keys`` are the sides of a block of outputs, ``chunk`` is a part of the chains."""


def qk_gemm_forward(q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """q [B, H, S, D], k [B, K, T, D] -> ``scale * q k^T`` [B, H, S, T] of ``out_dtype``."""
    scores = q.new_empty((*q.shape[:3], k.shape[2]), dtype=out_dtype)
    _multiply_rows(_columns_first(q), _columns_first(k).transpose(2, 3), scores, scale)
    return scores


def qk_gemm_backward(dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """dscores [B, H, S, T] -> dq, dk as needed, each in the dtype of its input."""
    dq = _like(q) if needs[0] else None
    dk = _like(k) if needs[1] else None
    if dq is not None:
        _multiply_rows(dscores, _rows_first(k), dq, scale)
    if dk is not None:
        _multiply_over_rows(dscores, _rows_first(q), dk, scale)
    return dq, dk


def av_gemm_forward(probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
    """probs [B, H, S, T], v [B, K, T, V] -> ``probs v`` [B, H, S, V] of ``out_dtype``."""
    out = probs.new_empty((*probs.shape[:3], v.shape[3]), dtype=out_dtype)
    _multiply_rows(probs, _rows_first(v), out, 1.0)
    return out


def av_gemm_backward(dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """dout [B, H, S, V] -> dprobs, dv as needed, each in the dtype of its input."""
    dprobs = _like(probs) if needs[0] else None
    dv = _like(v) if needs[1] else None
    if dprobs is not None:
        _multiply_rows(_columns_first(dout), _columns_first(v).transpose(2, 3), dprobs, 1.0)
    if dv is not None:
        _multiply_over_rows(probs, _rows_first(dout), dv, 1.0)
    return dprobs, dv


def _like(tensor: Tensor) -> Tensor:
    """A fresh contiguous tensor, whatever the strides of the input."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _uses_dot(tensor: Tensor) -> bool:
    return platform(tensor.device) == "cuda"


def _columns_first(tensor: Tensor) -> Tensor:
    """On NVIDIA a copy whose rows lie side by side in memory, as ``tl.dot`` reads them without bank conflicts."""
    return tensor.transpose(2, 3).contiguous().transpose(2, 3) if _uses_dot(tensor) else tensor


def _rows_first(tensor: Tensor) -> Tensor:
    """On NVIDIA a tensor whose columns lie side by side, copied unless they do."""
    return tensor.contiguous() if _uses_dot(tensor) and tensor.stride(3) != 1 else tensor


def _as_wide(right: Tensor, left: Tensor) -> Tensor:
    """On NVIDIA float32 beside float32, copied if need be: blocks of two widths wait for their step in registers (650 bytes of spills)."""
    return right.float() if _uses_dot(right) and left.dtype == torch.float32 else right


def _multiply_rows(left: Tensor, right: Tensor, out: Tensor, scale: float) -> None:
    """left [B, H, S, X], right [B, K, X, N] -> out [B, H, S, N]."""
    batch, kv_heads, depth, columns = right.shape
    group = left.shape[1] // kv_heads
    rows = group * left.shape[2]
    right = _as_wide(right, left)
    _launch(
        _operand(left, group), _operand(right, 1), out, (batch, kv_heads, rows, columns, depth), scale, grouped=group > 1, over_rows=False
    )


def _multiply_over_rows(left: Tensor, right: Tensor, out: Tensor, scale: float) -> None:
    """left [B, H, S, T], right [B, H, S, N] -> out [B, K, T, N], chains over (head in its group, query)."""
    batch, kv_heads, keys, columns = out.shape
    group = left.shape[1] // kv_heads
    depth = group * left.shape[2]
    _launch(
        _operand(left, group),
        _operand(_as_wide(right, left), group),
        out,
        (batch, kv_heads, keys, columns, depth),
        scale,
        grouped=group > 1,
        over_rows=True,
    )


def _operand(tensor: Tensor, group: int) -> Operand:
    batch, head, row, column = tensor.stride()
    return Operand(tensor, batch, head * group, head, row, column, tensor.shape[2])


def _launch(
    left: Operand, right: Operand, out: Tensor, sizes: tuple[int, int, int, int, int], scale: float, *, grouped: bool, over_rows: bool
) -> None:
    if out.numel() == 0:
        return
    batch, kv_heads, rows, columns, depth = sizes
    config = CONFIGS[platform(out.device)]
    programs = -(-rows // config.rows) * -(-columns // config.keys) * batch * kv_heads
    with on_device(out):
        kernel.product[(programs,)](
            left,
            right,
            out,
            kv_heads,
            rows,
            columns,
            depth,
            scale,
            M=config.rows,
            N=config.keys,
            CHUNK=config.chunk,
            DEPTH_IS_ROWS=over_rows,
            BY_ROWS=not over_rows and left.column == 1,
            GROUPED=grouped,
            DOT=_uses_dot(out),
            INTEGER_ROUNDING=INTERPRETED,
            **config.options,
        )
