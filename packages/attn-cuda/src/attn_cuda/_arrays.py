"""Tensors as the kernels of products and attention take them: addresses, dtype codes and strides."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from torch import Tensor

from attn_cuda._extension import build_reason, device_reason, extension

__all__ = ["Array", "Launch", "address", "allocator", "array", "contiguous_strides", "dtype_codes", "module_for", "place"]

Array = tuple[int, int, torch.Size, tuple[int, ...]]
"""Address, dtype code, shape and element strides."""
Launch = Callable[[list[int]], Any]
"""A kernel call on tensors of known shapes, strides, dtypes and alignment: their addresses to fresh results."""


def module_for(first: Tensor, *others: Tensor | None) -> ModuleType:
    """The compiled module, once all tensors are known to lie on one CUDA device that it has code for."""
    device = first.device
    for tensor in others:
        if tensor is not None and tensor.device != device:
            raise ValueError(f"attn_cuda: all tensors must be on one device; got {device} and {tensor.device}")
    return _module(device)


@cache
def _module(device: torch.device) -> ModuleType:
    module, reason = extension(), build_reason()
    if reason is not None or isinstance(module, str):
        raise UnsupportedProblem("attn_cuda", [str(reason)])
    if device.type != "cuda":
        raise UnsupportedProblem("attn_cuda", [f"device {device} (supported: cuda)"])
    reason = device_reason(device.index)
    if reason is not None:
        raise UnsupportedProblem("attn_cuda", [reason])
    return module


class _Codes(dict[torch.dtype, int]):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise TypeError(f"attn_cuda: dtype {dtype}; supported: float32, bfloat16, float16")


@cache
def dtype_codes(module: ModuleType) -> dict[torch.dtype, int]:
    """The code of each dtype that the kernels take; TypeError for any other."""
    return _Codes({torch.float32: module.FLOAT32, torch.bfloat16: module.BFLOAT16, torch.float16: module.FLOAT16})


def allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes contiguous tensors like one that holds no memory: reading a shape from Python takes torch as long as allocating."""
    few = math.prod(shape) <= 1
    like = torch.empty(1, dtype=dtype, device=device).as_strided(shape, contiguous_strides(shape) if few else (0,) * len(shape))
    like.untyped_storage().resize_(0)
    return partial(torch.empty_like, like)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def place(tensor: Tensor) -> tuple[int, int]:
    """Device index and current stream of that device (torch.cuda.current_stream makes an object of it, which costs 2 us)."""
    index = tensor.device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def array(codes: dict[torch.dtype, int], tensor: Tensor) -> Array:
    """A tensor as the extension takes it: [B, H, S, D], or packed [total, H, D]."""
    return tensor.data_ptr(), codes[tensor.dtype], tensor.shape, tensor.stride()
