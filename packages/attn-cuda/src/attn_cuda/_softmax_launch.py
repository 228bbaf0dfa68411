"""Kernel calls of ``joint_attn_softmax``: checks, allocation, the mask compaction and the launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from attn_spec.torch import Launches
from torch import Tensor

from attn_cuda._arrays import Launch, allocator, dtype_codes, module_for, place
from attn_cuda._describer import describer

__all__ = ["SoftmaxKernels", "prepare_softmax"]

Sizes = tuple[int, int, int]
Rows = tuple[int, int, Sizes]
"""Address, dtype code and element strides of the outer axes."""
Compacted = tuple[int, int, int, int]
"""Addresses of the kept bits, positions and counts of a mask, and how many rows share a batch item."""
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
            mask = None if mask is None else mask.contiguous()
            keys, held = (None, None) if mask is None else _compaction(module, scores, mask)(mask.data_ptr(), stream)
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
            del kept, held
        return dscores


def _forward(kernel: str, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype, keeps_state: bool) -> tuple[Tensor, ...]:
    """probs and, if it is kept, the state of the rows."""
    module = _module(scores, mask)
    mask = None if mask is None else mask.contiguous()
    _, _, (scores,) = _rows(module, scores)
    stored = out_dtype if out_dtype in (scores.dtype, torch.float32) else torch.float32
    found: Tensor | tuple[Tensor, ...] = _FORWARD(kernel, scores, mask, stored, keeps_state)
    probs, *state = (found,) if isinstance(found, Tensor) else found
    return probs if stored == out_dtype else probs.to(out_dtype), *state


def prepare_softmax(kernel: str, arguments: tuple[Any, ...]) -> Launch | None:
    """The call of the registered operator for its probabilities, or None for one that needs copies or a conversion."""
    scores, mask, out_dtype = arguments
    module = _module(scores, mask)
    _, _, (addressed,) = _rows(module, scores)
    if addressed is not scores or (mask is not None and not mask.is_contiguous()) or out_dtype not in (scores.dtype, torch.float32):
        return None
    return _forward_launch(kernel, scores, mask, out_dtype, False)


def _forward_launch(kernel: str, scores: Tensor, mask: Tensor | None, stored: torch.dtype, keeps_state: bool) -> Launch:
    """probs of dtype ``stored`` alone, or with the state of the rows if it is kept, of scores that need no copy and a contiguous mask."""
    module = _module(scores, mask)
    sizes, (rows,), _ = _rows(module, scores)
    device, index, keys = scores.device, scores.device.index, scores.shape[-1]
    probs_of, state_of = allocator(scores.shape, stored, device), allocator(scores.shape[:-1], torch.float32, device)
    empty = scores.numel() == 0
    run, stream_of, code = getattr(module, kernel), torch._C._cuda_getCurrentRawStream, dtype_codes(module)[stored]
    compact = None if mask is None else _compaction(module, scores, mask)
    _, *of_scores = rows

    def enqueue(addresses: list[int], probs: int, row_max: int, row_sum: int) -> None:
        if empty:
            return
        stream = stream_of(index)
        compacted, held = (None, None) if compact is None else compact(addresses[1], stream)
        run(index, stream, sizes, keys, (addresses[0], *of_scores), compacted, probs, code, row_max, row_sum)
        del held

    def launch_alone(addresses: list[int]) -> Tensor:
        probs = probs_of()
        enqueue(addresses, probs.data_ptr(), 0, 0)
        return probs

    def launch(addresses: list[int]) -> tuple[Tensor, ...]:
        probs, row_max, row_sum = probs_of(), state_of(), state_of()
        enqueue(addresses, probs.data_ptr(), row_max.data_ptr(), row_sum.data_ptr())
        return probs, row_max, row_sum

    return launch if keeps_state else launch_alone


_FORWARD = Launches(_forward_launch, describer)


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


def _compaction(module: ModuleType, scores: Tensor, mask: Tensor) -> Callable[[int, int], tuple[Compacted, Tensor]]:
    """From the address of a contiguous mask and a stream: the logical keys of each batch item, and the tensor that holds positions and
    counts until the kernel is enqueued."""
    batch, keys, index = mask.shape[0], mask.shape[1], mask.device.index
    held_of = allocator((batch * keys + batch,), torch.int32, mask.device)
    rows_per_batch, counts_offset = math.prod(scores.shape[1:-1]), batch * keys * torch.int32.itemsize

    def compact(kept: int, stream: int) -> tuple[Compacted, Tensor]:
        held = held_of()
        positions = held.data_ptr()
        counts = positions + counts_offset
        module.compact_keys(index, stream, kept, batch, keys, positions, counts)
        return (kept, positions, counts, rows_per_batch), held

    return compact
