"""Copies of the rows of joint attention under contract sm90-v1 to where the kernels want them, and back."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from attn_cuda._arrays import address, array, dtype_codes, module_for, place

__all__ = ["JointKernels"]

_VECTOR = 8
"""Halves that are read at once."""


class JointKernels:
    """``attn_spec.torch.JointKernels`` on the current stream of the tensors' device; halves of a multiple of eight columns."""

    def joint_places(self, prompt_mask: Tensor, first: int, image: int) -> tuple[Tensor, Tensor]:
        """Slots of the rows and rows of the slots, int32 [2, B, text], -1 for none; bool [B, first + image], whether a key is there."""
        module, (batch, text) = module_for(prompt_mask), prompt_mask.shape
        mask = prompt_mask.contiguous()
        places = mask.new_empty((2, batch, text), dtype=torch.int32)
        kept = mask.new_empty((batch, first + image))
        slots, rows = places
        values = mask.data_ptr(), batch, text, first, image, slots.data_ptr(), rows.data_ptr(), kept.data_ptr()
        module.joint_places(*place(mask), values)
        return places, kept

    def join_rows(self, text: Tensor, image: Tensor, places: Tensor, first: int) -> Tensor:
        """Kept text in order, zeros, and image from row ``first`` on: [B, H, first + image, D], contiguous."""
        module = module_for(text, image, places)
        joined = text.new_empty((*text.shape[:2], first + image.shape[2], text.shape[3]))
        _copy(module, "join_rows", _with_vectors(text), _with_vectors(image), joined, places, first)
        return joined

    def part_rows(self, joined: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The rows of text, +0 where the mask dropped them, and of image: fresh and contiguous."""
        module, joined = module_for(joined, places), _with_vectors(joined.contiguous())
        batch, heads, rows, columns = joined.shape
        text = joined.new_empty((batch, heads, places.shape[2], columns))
        image = joined.new_empty((batch, heads, rows - first, columns))
        _copy(module, "part_rows", text, image, joined, places, first)
        return text, image


def _copy(module: ModuleType, name: str, text: Tensor, image: Tensor, joined: Tensor, places: Tensor, first: int) -> None:
    codes = dtype_codes(module)
    slots, rows = places
    arrays = array(codes, text), array(codes, image), array(codes, joined)
    getattr(module, name)(*place(joined), (*arrays, first, address(slots), address(rows)))


def _with_vectors(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one whose rows cannot be read eight halves at a time."""
    aligned = tensor.stride(3) == 1 and tensor.data_ptr() % (_VECTOR * tensor.element_size()) == 0
    readable = aligned and not any(stride % _VECTOR for stride in tensor.stride()[:3])
    return tensor if readable else tensor.clone(memory_format=torch.contiguous_format)
