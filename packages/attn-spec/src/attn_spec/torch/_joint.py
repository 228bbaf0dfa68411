"""Joint text and image attention under contract sm90-v1: one call of ``attention`` with masked keys between text and image.

Source: docs/contracts/sm90-v1.md, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_spec._sm90 import SEGMENT, STEP
from attn_spec.torch._kernels import JointKernels

__all__ = ["JointLayout"]


class JointLayout:
    """Where the rows of text and image lie: kept text in order from 0, zeros, and image from the next multiple of ``STEP`` (queries) or
    ``SEGMENT`` (keys).

    ``prompt_mask`` is bool [B, text], True keeps; None keeps all. ``kernels`` copy the rows where torch's operators would, but for what
    must be seen by a tracer or a transform.
    """

    def __init__(self, prompt_mask: Tensor | None, text: int, image: int, kernels: JointKernels | None = None) -> None:
        self.prompt_mask, self.text, self.image = prompt_mask, text, image
        self._copied: tuple[JointKernels, Tensor, Tensor] | None = None
        if prompt_mask is not None and kernels is not None:
            self._copied = kernels, *kernels.joint_places(prompt_mask, self.first_key, image)
        elif prompt_mask is not None:
            kept, dropped = prompt_mask.cumsum(1), (~prompt_mask).cumsum(1)
            self._count = prompt_mask.sum(1, keepdim=True)
            self._places = torch.where(prompt_mask, kept, self._count + dropped) - 1
            self._order = torch.argsort(~prompt_mask, dim=1, stable=True)

    @property
    def first_query(self) -> int:
        """Index of image query 0."""
        return -(-self.text // STEP) * STEP

    @property
    def first_key(self) -> int:
        """Position of image key 0."""
        return -(-self.text // SEGMENT) * SEGMENT

    def queries(self, text: Tensor, image: Tensor) -> Tensor:
        """[B, H, text, D] and [B, H, image, D] to [B, H, first_query + image, D]."""
        return self._joined(text, image, self.first_query)

    def keys(self, text: Tensor, image: Tensor) -> Tensor:
        """[B, K, text, D] and [B, K, image, D] to [B, K, first_key + image, D]."""
        return self._joined(text, image, self.first_key)

    def parts(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Text rows in their places, +0 where the mask drops them, and image rows."""
        if self._copied is not None:
            kernels, places, _ = self._copied
            copied: tuple[Tensor, Tensor] = _Parted.apply(out, kernels, places, self.first_query)
            return copied
        text, image = out[:, :, : self.text], out[:, :, self.first_query :]
        if self.prompt_mask is not None:
            text = torch.where(_column(self.prompt_mask), _reordered(text, self._places, self._order), 0.0)
        return text, image

    def key_mask(self, keys: Tensor) -> Tensor | None:
        """bool [B, T], False between the last kept text key and image key 0; None when none lies there."""
        if self.prompt_mask is None and self.first_key == self.text:
            return None
        if self._copied is not None:
            return self._copied[2]
        place = torch.arange(self.first_key + self.image, device=keys.device)
        kept = self.text if self.prompt_mask is None else self._count
        return ((place < kept) | (place >= self.first_key)).expand(keys.shape[0], -1)

    def _joined(self, text: Tensor, image: Tensor, first: int) -> Tensor:
        if self._copied is not None:
            kernels, places, _ = self._copied
            copied: Tensor = _Joined.apply(text, image, kernels, places, first)
            return copied
        if self.prompt_mask is not None:
            kept = torch.arange(self.text, device=text.device) < self._count
            text = torch.where(_column(kept), _reordered(text, self._order, self._places), 0.0)
        gap = text.new_zeros((*text.shape[:2], first - self.text, text.shape[3]))
        return torch.cat((text, gap, image), dim=2)


def _column(mask: Tensor) -> Tensor:
    return mask[:, None, :, None]


def _reordered(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    found: Tensor = _Reordered.apply(rows, order, inverse)
    return found


class _Joined(torch.autograd.Function):
    """``JointKernels.join_rows``; its gradient is ``_Parted``."""

    @staticmethod
    def forward(ctx: Any, text: Tensor, image: Tensor, kernels: JointKernels, places: Tensor, first: int) -> Tensor:
        ctx.kernels, ctx.places, ctx.first = kernels, places, first
        return kernels.join_rows(text, image, places, first)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return *_Parted.apply(gradients[0], ctx.kernels, ctx.places, ctx.first), None, None, None


class _Parted(torch.autograd.Function):
    """``JointKernels.part_rows``; its gradient is ``_Joined``."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, kernels: JointKernels, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        ctx.kernels, ctx.places, ctx.first = kernels, places, first
        return kernels.part_rows(joined, places, first)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return _Joined.apply(*gradients, ctx.kernels, ctx.places, ctx.first), None, None, None


class _Reordered(torch.autograd.Function):
    """Rows [B, H, S, D] in the order [B, S]. The gradient goes back by the inverse: torch's own adds it to zeros, which loses a -0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return torch.gather(rows, 2, _column(order).expand(rows.shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        order, inverse = ctx.saved_tensors
        return _Reordered.apply(gradients[0], inverse, order), None, None
