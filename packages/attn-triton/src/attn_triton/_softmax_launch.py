"""Launches of the softmax kernels: layout, output tensors and the logical key index; no arithmetic happens here."""

from __future__ import annotations

from typing import Any

import torch
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _softmax_kernel as kernel
from attn_triton import _softmax_v2_kernel as kernel_v2
from attn_triton._configuration import Config, on_device
from attn_triton._key_index import key_index

__all__ = [
    "BACKWARD_CONFIGS_V2",
    "CONFIGS",
    "CONFIGS_V2",
    "softmax_backward",
    "softmax_forward",
    "softmax_v2_backward",
    "softmax_v2_forward",
]

CONFIGS = {
    "cuda": Config(rows=1, num_warps=1),
    "rocm": Config(rows=1, num_warps=1),
    "cpu": Config(rows=32, num_warps=1),
}
"""Of ordered-v1, by device. One warp owns a row, so no reduction crosses warps; an interpreted program costs much, so there they are few
and wide."""

CONFIGS_V2 = {
    "cuda": Config(rows=1, num_warps=1),
    "rocm": Config(rows=1, num_warps=1),
    "cpu": Config(rows=8, num_warps=1),
}
"""Of the forward of ordered-v2, by device. A warp by itself needs a third of the instructions an element that eight of them, which meet for
every level of the trees, need. On one H200 (2026-11-30, share of a copy): 0.50 instead of 0.29 at 4608 float32 keys, 0.35 instead of 0.12
in bfloat16."""

BACKWARD_CONFIGS_V2 = CONFIGS_V2 | {"cuda": Config(rows=1, num_warps=8)}
"""Of its backward, and of the forward of float32 rows that do not begin on 16 bytes (0.44 of a copy at 7401 keys, 0.28 with one warp).
Eight warps share a tile of 1024 slots: with fewer, the backward of halves spills on sm_80 (one, two) or sm_100 (four)."""


def softmax_forward(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scores [..., T], mask [B, T] or None -> probs of ``out_dtype``, row max and row sum (float32, ``scores.shape[:-1]``)."""
    return _forward(kernel.softmax_forward, CONFIGS, scores, mask, out_dtype)


def softmax_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """dprobs (any float dtype) -> dscores, shape and dtype of ``scores``."""
    return _backward(kernel.softmax_backward, CONFIGS, dprobs, scores, mask, row_max, row_sum)


def softmax_v2_forward(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax_forward`` of contract ordered-v2."""
    apart = scores.dtype == torch.float32 and scores.shape[-1] % 4 != 0
    return _forward(kernel_v2.softmax_forward, BACKWARD_CONFIGS_V2 if apart else CONFIGS_V2, scores, mask, out_dtype)


def softmax_v2_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """``softmax_backward`` of contract ordered-v2."""
    return _backward(kernel_v2.softmax_backward, BACKWARD_CONFIGS_V2, dprobs, scores, mask, row_max, row_sum)


def _forward(
    function: Any, configs: dict[str, Config], scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores.contiguous()
    probs = torch.empty_like(scores, dtype=out_dtype)
    row_max = torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device)
    row_sum = torch.empty_like(row_max)
    _launch(function, configs, scores, mask, (scores,), (probs, row_max, row_sum))
    return probs, row_max, row_sum


def _backward(
    function: Any, configs: dict[str, Config], dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor
) -> Tensor:
    scores = scores.contiguous()
    dscores = torch.empty_like(scores)
    state = (row_max.contiguous(), row_sum.contiguous())
    _launch(function, configs, scores, mask, (dprobs.contiguous(), scores), (*state, dscores))
    return dscores


def _launch(
    function: Any,
    configs: dict[str, Config],
    scores: Tensor,
    mask: Tensor | None,
    before: tuple[Tensor, ...],
    after: tuple[Tensor, ...],
) -> None:
    """Run ``function(*before, keep, index, counts, *after, rows, keys, rows_per_batch, ...)`` over every row of ``scores``."""
    keys = scores.shape[-1]
    rows = scores.numel() // keys
    if rows == 0:
        return
    keep = index = counts = None
    if mask is not None:
        logical = key_index(mask)
        keep, index, counts = logical.keep, logical.index, logical.counts
    config = configs[platform(scores.device)]
    rows_per_batch = rows // scores.shape[0] if scores.dim() > 1 else 1
    with on_device(scores):
        function[(-(-rows // config.rows),)](
            *before,
            keep,
            index,
            counts,
            *after,
            rows,
            keys,
            rows_per_batch,
            HAS_MASK=mask is not None,
            ROWS=config.rows,
            INTEGER_ROUNDING=kernel.INTERPRETED,
            **config.options,
        )
