"""Softmax rows among others and under padding, on long rows; every pair of devices that must be refused.

Streams, graphs, other devices, co-running work and torch's own checks are in the shared suite (test_torch_*.py), for every operator.
"""

from __future__ import annotations

from collections.abc import Callable

import attn_cuda
import pytest
import torch
from attn_spec import UnsupportedProblem
from torch import Tensor

Same = Callable[..., None]


def _inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def _both(scores: Tensor, dprobs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = scores.detach().requires_grad_()
    probs = attn_cuda.joint_attn_softmax(leaf, key_padding_mask=mask)
    return probs.detach(), torch.autograd.grad(probs, leaf, dprobs)[0]


@pytest.mark.parametrize("keys", [600, 4608, 7401])
def test_a_row_does_not_depend_on_its_neighbours_or_place(cuda: torch.device, assert_same_bits: Same, keys: int) -> None:
    scores, dprobs = (tensor.to(cuda) for tensor in _inputs(300, keys, dtype=torch.bfloat16))
    whole = _both(scores, dprobs)
    for rows in (slice(0, 1), slice(7, 8), slice(100, 237), slice(299, 300)):
        part = _both(scores[rows], dprobs[rows])
        assert_same_bits(part[0], whole[0][rows])
        assert_same_bits(part[1], whole[1][rows])


def test_padding_moves_no_bit_of_the_kept_keys(cuda: torch.device, assert_same_bits: Same) -> None:
    scores, dprobs = (tensor.to(cuda) for tensor in _inputs(1, 4, 900))
    compact = _both(scores, dprobs)
    keep = torch.zeros(1, 1300, dtype=torch.bool, device=cuda)
    keep[0, torch.randperm(1300, generator=torch.Generator().manual_seed(5))[:900].sort().values.to(cuda)] = True
    padded_scores = torch.full((1, 4, 1300), float("nan"), device=cuda)
    padded_dprobs = torch.full((1, 4, 1300), float("nan"), device=cuda)
    padded_scores[..., keep[0]], padded_dprobs[..., keep[0]] = scores, dprobs
    padded = _both(padded_scores, padded_dprobs, keep)
    for found, wanted in zip(padded, compact, strict=True):
        assert_same_bits(found[..., keep[0]], wanted)
        assert_same_bits(found[..., ~keep[0]], torch.zeros(1, 4, 400))


def test_tensors_of_two_devices_are_refused(cuda: torch.device) -> None:
    with pytest.raises((ValueError, UnsupportedProblem), match="device"):
        attn_cuda.joint_attn_softmax(torch.zeros(2, 3, device=cuda), key_padding_mask=torch.ones(2, 3, dtype=torch.bool))


def test_registered_operators_refuse_two_devices(cuda: torch.device) -> None:
    """Checks of the launch stand behind the registered operators too, which nothing else guards."""
    scores, mask = torch.zeros(2, 3, device=cuda), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        torch.ops.attn_cuda.joint_attn_softmax(scores, mask, torch.float32)
    q, k = torch.zeros(1, 2, 3, 8, device=cuda), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        torch.ops.attn_cuda.joint_attn_qk_gemm(q, k, 1.0, torch.float32)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        torch.ops.attn_cuda.attention(q, k, q, *(None,) * 12, True, 1.0, -1, -1, 0.0, torch.float32)
