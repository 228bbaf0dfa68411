"""Launches of the softmax kernels: layout, output tensors and the logical key index; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _softmax_kernel as kernel
from attn_triton._interpreter import ieee_mode

__all__ = ["CONFIGS", "Config", "TritonKernels", "key_index"]


@dataclass(frozen=True)
class Config:
    """How a kernel is launched. No field moves a bit; they are data, not the result of a search at run time.

    ``rows`` is the number of rows of one program, a power of two. ``enable_fp_fusion`` stays False: the contract rounds every product.
    """

    rows: int
    num_warps: int
    num_stages: int = 1
    enable_fp_fusion: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}


CONFIGS = {
    "cuda": Config(rows=1, num_warps=1),
    "rocm": Config(rows=1, num_warps=1),
    "cpu": Config(rows=32, num_warps=1),
}
"""By device. One warp owns a row, so no reduction crosses warps; an interpreted program costs much, so there they are few and wide."""


@dataclass(frozen=True)
class KeyIndex:
    """Logical keys of ``key_padding_mask``.

    ``keep`` [B, T] uint8; ``index`` [B, T] int32, the stored position of each logical key; ``counts`` [B] int32, how many there are.
    """

    keep: Tensor
    index: Tensor
    counts: Tensor


def key_index(mask: Tensor) -> KeyIndex:
    """The logical keys of a bool mask [B, T], built on its device without a host synchronisation.

    Kept keys come first, in order, dropped ones after them: a permutation, so that no two writes of the scatter meet.
    """
    kept = torch.cumsum(mask, dim=1, dtype=torch.int64)
    counts = kept[:, -1:]
    stored = torch.arange(mask.shape[1], device=mask.device, dtype=torch.int64).expand(mask.shape)
    place = torch.where(mask, kept - 1, counts + (stored - kept))
    index = torch.empty(mask.shape, dtype=torch.int32, device=mask.device).scatter_(1, place, stored.to(torch.int32))
    return KeyIndex(mask.to(torch.uint8).contiguous(), index, counts.squeeze(1).to(torch.int32))


class TritonKernels:
    """Kernels of the engine ``triton`` (``attn_spec.torch.Kernels``). Inputs that are not contiguous are copied once."""

    def softmax_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """scores [..., T], mask [B, T] or None -> probs of ``out_dtype``, row max and row sum (float32, ``scores.shape[:-1]``)."""
        scores = scores.contiguous()
        probs = torch.empty_like(scores, dtype=out_dtype)
        row_max = torch.empty(scores.shape[:-1], dtype=torch.float32, device=scores.device)
        row_sum = torch.empty_like(row_max)
        _launch(kernel.softmax_forward, scores, mask, (scores,), (probs, row_max, row_sum))
        return probs, row_max, row_sum

    def softmax_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        """dprobs (any float dtype) -> dscores, shape and dtype of ``scores``."""
        scores = scores.contiguous()
        dscores = torch.empty_like(scores)
        state = (row_max.contiguous(), row_sum.contiguous())
        _launch(kernel.softmax_backward, scores, mask, (dprobs.contiguous(), scores), (*state, dscores))
        return dscores


def _launch(function: Any, scores: Tensor, mask: Tensor | None, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> None:
    """Run ``function(*before, keep, index, counts, *after, rows, keys, rows_per_batch, ...)`` over every row of ``scores``."""
    keys = scores.shape[-1]
    rows = scores.numel() // keys
    if rows == 0:
        return
    keep = index = counts = None
    if mask is not None:
        logical = key_index(mask)
        keep, index, counts = logical.keep, logical.index, logical.counts
    config = CONFIGS[platform(scores.device)]
    rows_per_batch = rows // scores.shape[0] if scores.dim() > 1 else 1
    with _on_device(scores):
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


@contextmanager
def _on_device(tensor: Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be the tensor's."""
    with ExitStack() as stack:
        if tensor.is_cuda:
            stack.enter_context(torch.cuda.device(tensor.device))
        if kernel.INTERPRETED:
            stack.enter_context(ieee_mode())
        yield
