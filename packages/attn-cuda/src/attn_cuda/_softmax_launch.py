"""Kernel calls of ``joint_attn_softmax``: checks, allocation, the mask compaction and the launch."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from attn_cuda._arrays import dtype_code, module_for, place

__all__ = ["SoftmaxKernels"]

_AXES = 3
"""Outer axes that the kernels address; more are collapsed, or copied when their strides do not allow it."""


class SoftmaxKernels:
    """Kernels of the ``cuda`` engine, on the current stream of the tensors' device. Results are fresh and contiguous.

    Inputs may have any strides; a copy is made when the last axis is not contiguous or when the outer axes do not collapse to three.
    """

    def softmax_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """scores [..., T], mask bool [B, T] or None -> probs of ``out_dtype``, row max and row sum (float32, scores.shape[:-1])."""
        module = _module(scores, mask)
        stored = out_dtype if out_dtype in (scores.dtype, torch.float32) else torch.float32
        probs = scores.new_empty(scores.shape, dtype=stored)
        row_max = scores.new_empty(scores.shape[:-1], dtype=torch.float32)
        row_sum = torch.empty_like(row_max)
        if probs.numel():
            sizes, (rows,) = _rows(module, scores)
            with torch.cuda.device(scores.device):
                device, stream = place(scores)
                keys, keep_alive = _compact(module, scores, mask, device, stream)
                module.softmax_forward(
                    device,
                    stream,
                    sizes,
                    scores.shape[-1],
                    (rows.data_ptr(), dtype_code(module, rows.dtype), _strides(rows)),
                    keys,
                    probs.data_ptr(),
                    dtype_code(module, stored),
                    row_max.data_ptr(),
                    row_sum.data_ptr(),
                )
                del keep_alive
        return probs.to(out_dtype), row_max, row_sum

    def softmax_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        """dprobs (any float dtype) -> dscores in the dtype of scores."""
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
            sizes, (rows, cotangent) = _rows(module, scores, dprobs)
            with torch.cuda.device(scores.device):
                device, stream = place(scores)
                keys, keep_alive = _compact(module, scores, mask, device, stream)
                module.softmax_backward(
                    device,
                    stream,
                    sizes,
                    scores.shape[-1],
                    (rows.data_ptr(), dtype_code(module, rows.dtype), _strides(rows)),
                    (cotangent.data_ptr(), dtype_code(module, cotangent.dtype), _strides(cotangent)),
                    keys,
                    row_max.data_ptr(),
                    row_sum.data_ptr(),
                    dscores.data_ptr(),
                )
                del keep_alive
        return dscores


def _module(scores: Tensor, mask: Tensor | None, *others: Tensor) -> ModuleType:
    """The compiled module, once the operator's own arguments are known to be ones that it can address."""
    module = module_for(scores, mask, *others)
    if scores.ndim < 1 or not 1 <= scores.shape[-1] < 2**31:
        raise ValueError(f"attn_cuda: scores must be [..., T] with 1 <= T < 2**31; got shape {list(scores.shape)}")
    dtype_code(module, scores.dtype)
    if mask is not None and (scores.ndim < 2 or mask.dtype != torch.bool or mask.shape != (scores.shape[0], scores.shape[-1])):
        raise ValueError(f"attn_cuda: mask must be bool [B, T] of scores {list(scores.shape)}; got {mask.dtype} {list(mask.shape)}")
    return module


def _rows(module: ModuleType, *tensors: Tensor) -> tuple[tuple[int, int, int], list[Tensor]]:
    """Views [a, b, c, T] of tensors of one shape, with contiguous keys; copies where strides do not allow a view."""
    shape = tensors[0].shape
    inputs = [tensor if tensor.stride(-1) == 1 or shape[-1] == 1 else tensor.contiguous() for tensor in tensors]
    axes = _collapsed(shape[:-1], inputs)
    if len(axes) > _AXES:
        inputs = [tensor.contiguous() for tensor in inputs]
        axes = [math.prod(shape[:-1])]
    sizes = (1,) * (_AXES - len(axes)) + tuple(axes)
    return (sizes[0], sizes[1], sizes[2]), [tensor.view(*sizes, shape[-1]) for tensor in inputs]


def _collapsed(sizes: tuple[int, ...], tensors: list[Tensor]) -> list[int]:
    """Sizes of the outer axes after merging neighbours that every tensor steps through evenly; axes of size 1 are dropped."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        strides = tuple(tensor.stride(axis) for tensor in tensors)
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    return [size for size, _ in merged]


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Strides of the outer axes; 0 for an axis of size 1, whose stride torch leaves open."""
    found = [0 if size == 1 else stride for size, stride in zip(rows.shape[:-1], rows.stride()[:-1], strict=True)]
    return found[0], found[1], found[2]


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
