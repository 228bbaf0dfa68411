"""Kernel calls of ``joint_attn_softmax``: checks, allocation, the mask compaction and the launch."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from attn_cuda._arrays import dtype_codes, module_for, place

__all__ = ["SoftmaxKernels"]

Sizes = tuple[int, int, int]
Rows = tuple[int, int, Sizes]
"""Address, dtype code and element strides of the outer axes."""
Axis = tuple[int, tuple[int, ...]]
"""Size, and the stride of each tensor."""

_AXES = 3
"""Outer axes that the kernels address; more are collapsed, or copied when their strides do not allow it."""


class SoftmaxKernels:
    """Kernels of the ``cuda`` engine, on the current stream of the tensors' device. Results are fresh and contiguous.

    Inputs may have any strides; a copy is made when the last axis is not contiguous or when the outer axes do not collapse to three.
    """

    def softmax_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """scores [..., T], mask bool [B, T] or None -> probs of ``out_dtype``, row max and row sum (float32, scores.shape[:-1])."""
        probs, row_max, row_sum = _forward("softmax_forward", scores, mask, out_dtype, True)
        return probs, row_max, row_sum

    def softmax_inference(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """The probabilities of ``softmax_forward`` alone."""
        return _forward("softmax_forward", scores, mask, out_dtype, False)[0]

    def softmax_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        """dprobs (any float dtype) -> dscores in the dtype of scores."""
        return self._backward("softmax_backward", dprobs, scores, mask, row_max, row_sum)

    def softmax_v2_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """``softmax_forward`` of contract ordered-v2."""
        probs, row_max, row_sum = _forward("softmax_v2_forward", scores, mask, out_dtype, True)
        return probs, row_max, row_sum

    def softmax_v2_inference(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """The probabilities of ``softmax_v2_forward`` alone."""
        return _forward("softmax_v2_forward", scores, mask, out_dtype, False)[0]

    def softmax_v2_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        """``softmax_backward`` of contract ordered-v2."""
        return self._backward("softmax_v2_backward", dprobs, scores, mask, row_max, row_sum)

    def _backward(self, kernel: str, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        module = _module(scores, mask, dprobs, row_max, row_sum)
        if dprobs.shape != scores.shape:
            raise ValueError(f"joint_attn_softmax_backward: dprobs has shape {list(dprobs.shape)}; scores have {list(scores.shape)}")
        for name, state in (("row_max", row_max), ("row_sum", row_sum)):
            if state.dtype != torch.float32 or state.shape != scores.shape[:-1]:
                raise ValueError(
                    f"joint_attn_softmax_backward: {name} must be float32 {list(scores.shape[:-1])}; got {state.dtype} {list(state.shape)}"
                )
        if dprobs.dtype not in (scores.dtype, torch.float32):
            dprobs = dprobs.to(torch.float32)
        row_max, row_sum = row_max.contiguous(), row_sum.contiguous()
        dscores = scores.new_empty(scores.shape)
        if dscores.numel():
            sizes, (rows, cotangent), kept = _rows(module, scores, dprobs)
            device, stream = place(scores)
            keys, keep_alive = _compact(module, scores, mask, device, stream)
            getattr(module, kernel)(
                device,
                stream,
                sizes,
                scores.shape[-1],
                rows,
                cotangent,
                keys,
                row_max.data_ptr(),
                row_sum.data_ptr(),
                dscores.data_ptr(),
            )
            del kept, keep_alive
        return dscores


def _forward(kernel: str, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype, keeps_state: bool) -> tuple[Tensor, ...]:
    """probs and, if it is kept, the state of the rows."""
    module = _module(scores, mask)
    stored = out_dtype if out_dtype in (scores.dtype, torch.float32) else torch.float32
    probs = scores.new_empty(scores.shape, dtype=stored)
    state = [scores.new_empty(scores.shape[:-1], dtype=torch.float32) for _ in range(2 if keeps_state else 0)]
    if probs.numel():
        sizes, (rows,), kept = _rows(module, scores)
        device, stream = place(scores)
        keys, keep_alive = _compact(module, scores, mask, device, stream)
        row_max, row_sum = (part.data_ptr() for part in state) if keeps_state else (0, 0)
        code = dtype_codes(module)[stored]
        getattr(module, kernel)(device, stream, sizes, scores.shape[-1], rows, keys, probs.data_ptr(), code, row_max, row_sum)
        del kept, keep_alive
    return probs if stored == out_dtype else probs.to(out_dtype), *state


def _module(scores: Tensor, mask: Tensor | None, *others: Tensor) -> ModuleType:
    """The compiled module, once the operator's own arguments are known to be ones that it can address."""
    module = module_for(scores, mask, *others)
    if scores.ndim < 1 or not 1 <= scores.shape[-1] < 2**31:
        raise ValueError(f"attn_cuda: scores must be [..., T] with 1 <= T < 2**31; got shape {list(scores.shape)}")
    dtype_codes(module)[scores.dtype]
    if mask is not None and (scores.ndim < 2 or mask.dtype != torch.bool or mask.shape != (scores.shape[0], scores.shape[-1])):
        raise ValueError(f"attn_cuda: mask must be bool [B, T] of scores {list(scores.shape)}; got {mask.dtype} {list(mask.shape)}")
    return module


def _rows(module: ModuleType, *tensors: Tensor) -> tuple[Sizes, list[Rows], list[Tensor]]:
    """Sizes of the outer axes, tensors of one shape over them, and what holds them until the kernel is enqueued: copies where the last
    axis is not contiguous or the strides do not collapse to three."""
    shape, codes = tensors[0].shape, dtype_codes(module)
    keys = shape[-1]
    if all(tensor.is_contiguous() for tensor in tensors):
        sizes, step = (1, 1, tensors[0].numel() // keys), (0, 0, keys)
        return sizes, [(tensor.data_ptr(), codes[tensor.dtype], step) for tensor in tensors], list(tensors)
    kept = [tensor if tensor.stride(-1) == 1 or keys == 1 else tensor.contiguous() for tensor in tensors]
    axes = _collapsed(shape, kept)
    if len(axes) > _AXES:
        kept = [tensor.contiguous() for tensor in kept]
        axes = _collapsed(shape, kept)
    axes = [(1, (0,) * len(kept))] * (_AXES - len(axes)) + axes
    sizes = axes[0][0], axes[1][0], axes[2][0]
    steps = zip(axes[0][1], axes[1][1], axes[2][1], strict=True)
    return sizes, [(tensor.data_ptr(), codes[tensor.dtype], step) for tensor, step in zip(kept, steps, strict=True)], kept


def _collapsed(shape: torch.Size, tensors: list[Tensor]) -> list[Axis]:
    """The outer axes after merging neighbours that every tensor steps through evenly; axes of size 1 are dropped."""
    merged: list[Axis] = []
    for axis, size in enumerate(shape[:-1]):
        if size == 1:
            continue
        strides = tuple(tensor.stride(axis) for tensor in tensors)
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    return merged


def _compact(
    module: ModuleType, scores: Tensor, mask: Tensor | None, device: int, stream: int
) -> tuple[tuple[int, int, int, int] | None, tuple[Tensor, ...]]:
    """Logical keys of each batch item, and the tensors that hold them until the kernel is enqueued."""
    if mask is None:
        return None, ()
    kept = mask.contiguous()
    positions = kept.new_empty(kept.shape, dtype=torch.int32)
    counts = kept.new_empty(kept.shape[0], dtype=torch.int32)
    module.compact_keys(device, stream, kept.data_ptr(), kept.shape[0], kept.shape[1], positions.data_ptr(), counts.data_ptr())
    rows_per_batch = math.prod(scores.shape[1:-1])
    return (kept.data_ptr(), positions.data_ptr(), counts.data_ptr(), rows_per_batch), (kept, positions, counts)
