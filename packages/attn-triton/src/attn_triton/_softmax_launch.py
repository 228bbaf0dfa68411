"""Launches of the softmax kernels: layout, output tensors and the logical key index; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _softmax_kernel as kernel
from attn_triton import _softmax_v2_kernel as kernel_v2
from attn_triton._configuration import Config, TileConfig, on_device
from attn_triton._key_index import key_index

__all__ = [
    "CONFIGS",
    "CONFIGS_V2",
    "softmax_backward",
    "softmax_forward",
    "softmax_v2_backward",
    "softmax_v2_forward",
]

Configs = Mapping[str, Config] | Mapping[str, TileConfig]

CONFIGS = {
    "cuda": Config(rows=1, num_warps=1),
    "rocm": Config(rows=1, num_warps=1),
    "cpu": Config(rows=32, num_warps=1),
}
"""Of ordered-v1, by device. One warp owns a row, so no reduction crosses warps; an interpreted program costs much, so there they are few
and wide."""

CONFIGS_V2 = {
    "cuda": TileConfig(rows=1, groups=(1, 2, 4, 8), kept=2560, few=128),
    "rocm": TileConfig(rows=1, groups=(1, 2, 4, 8), kept=2560, lanes=64, few=128),
    "cpu": TileConfig(rows=8, groups=(1,), kept=2048),
}
"""Of ordered-v2, by device. More slots a warp need more registers, and fewer rows are then under way: on one H200 (2026-11-30, share of a
copy) the forward of 4608 float32 keys had 0.96 with two warps a row and 0.84 with one, of 7401 keys 0.86 with four and 0.68 with two. Rows
that are fewer than multiprocessors take as many warps as they have tiles: 24 of 4608 float32 keys took 7.7 us with eight, 8.4 with four."""


def softmax_forward(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scores [..., T], mask [B, T] or None -> probs of ``out_dtype``, row max and row sum (float32, ``scores.shape[:-1]``)."""
    return _forward(kernel.softmax_forward, CONFIGS, scores, mask, out_dtype)


def softmax_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """dprobs (any float dtype) -> dscores, shape and dtype of ``scores``."""
    return _backward(kernel.softmax_backward, CONFIGS, dprobs, scores, mask, row_max, row_sum)


def softmax_v2_forward(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax_forward`` of contract ordered-v2."""
    return _forward(kernel_v2.softmax_forward, CONFIGS_V2, scores, mask, out_dtype)


def softmax_v2_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """``softmax_backward`` of contract ordered-v2."""
    return _backward(kernel_v2.softmax_backward, CONFIGS_V2, dprobs, scores, mask, row_max, row_sum)


def _forward(function: Any, configs: Configs, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores.contiguous()
    probs = torch.empty_like(scores, dtype=out_dtype)
    row_max = torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device)
    row_sum = torch.empty_like(row_max)
    _launch(function, configs, scores, mask, (scores,), (probs, row_max, row_sum))
    return probs, row_max, row_sum


def _backward(
    function: Any, configs: Configs, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor
) -> Tensor:
    scores = scores.contiguous()
    dscores = torch.empty_like(scores)
    state = (row_max.contiguous(), row_sum.contiguous())
    _launch(function, configs, scores, mask, (dprobs.contiguous(), scores), (*state, dscores))
    return dscores


def _launch(
    function: Any,
    configs: Configs,
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
    if isinstance(config, TileConfig):
        vector = (
            1 if mask is not None or keys % 16 or any(array.data_ptr() % 16 for array in (*before, *after)) else 16 // scores.element_size()
        )
        constants = config.constants(rows <= config.few, keys, vector, mask is not None)
        options = config.options(constants)
    else:
        constants, options = {"ROWS": config.rows}, config.options
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
            **constants,
            INTEGER_ROUNDING=kernel.INTERPRETED,
            **options,
        )
