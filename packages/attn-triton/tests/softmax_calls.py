"""Calls of joint_attn_softmax beside the PyTorch definition, for the tests of both contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attn_reference import pytorch
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import to_numpy
from attn_triton import joint_attn_softmax
from torch import Tensor

__all__ = ["both", "check", "normal"]

Arrays = tuple[np.ndarray, np.ndarray]


def both(scores: Tensor, upstream: Tensor, mask: Tensor | None = None, function: Any = joint_attn_softmax, **options: Any) -> Arrays:
    """P and dscores as numpy arrays."""
    scores = scores.detach().requires_grad_()
    probs = function(scores, key_padding_mask=mask, **options)
    (gradient,) = torch.autograd.grad(probs, scores, upstream)
    return to_numpy(probs), to_numpy(gradient)


def check(device: str, scores: Tensor, upstream: Tensor, mask: Tensor | None = None, **options: Any) -> Arrays:
    """Compare with the definition, which runs on the CPU; returns P and dscores."""
    expected = both(scores, upstream, mask, pytorch.joint_attn_softmax, **options)
    found = both(scores.to(device), upstream.to(device), None if mask is None else mask.to(device), **options)
    for name, candidate, law in zip(("probs", "dscores"), found, expected, strict=True):
        assert_bytes(candidate, law, name)
    return found


def normal(*shape: int, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Scores and the gradient of P."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype), torch.randn(shape, generator=generator).to(dtype)
