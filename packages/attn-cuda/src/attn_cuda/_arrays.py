"""Tensors as the kernels of products and attention take them: addresses, dtype codes and strides."""

from __future__ import annotations

from types import ModuleType

import torch
from attn_spec import UnsupportedProblem
from torch import Tensor

from attn_cuda._extension import extension

__all__ = ["Array", "address", "array", "dtype_code", "module_for", "place"]

Array = tuple[int, int, tuple[int, int, int, int]]
"""Address, dtype code and element strides over [B, H, S, D]."""


def module_for(first: Tensor, *others: Tensor | None) -> ModuleType:
    """The compiled module, once all tensors are known to lie on one CUDA device."""
    module = extension()
    if isinstance(module, str):
        raise UnsupportedProblem("attn_cuda", [module])
    for tensor in (first, *others):
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"attn_cuda: all tensors must be on one device; got {first.device} and {tensor.device}")
    if first.device.type != "cuda":
        raise UnsupportedProblem("attn_cuda", [f"device {first.device} (supported: cuda)"])
    return module


def dtype_code(module: ModuleType, dtype: torch.dtype) -> int:
    codes: dict[torch.dtype, int] = {torch.float32: module.FLOAT32, torch.bfloat16: module.BFLOAT16, torch.float16: module.FLOAT16}
    if dtype not in codes:
        raise TypeError(f"attn_cuda: dtype {dtype}; supported: float32, bfloat16, float16")
    return codes[dtype]


def place(tensor: Tensor) -> tuple[int, int]:
    """Device index and current stream of that device."""
    index = tensor.device.index
    return index, torch.cuda.current_stream(index).cuda_stream


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def array(module: ModuleType, tensor: Tensor) -> Array:
    """Of [B, H, S, D], or packed [total, H, D]; an axis of size 1 has stride 0, since torch leaves its stride open."""
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = tensor.stride(-1) if tensor.shape[-1] > 1 else 1
    if len(strides) == 3:
        strides = [0, strides[1], strides[0], strides[2]]
    return tensor.data_ptr(), dtype_code(module, tensor.dtype), (strides[0], strides[1], strides[2], strides[3])
