"""Streams, graphs, devices, co-running work and torch's own checks."""

from __future__ import annotations

from collections.abc import Callable

import attn_cuda
import pytest
import torch
from attn_reference import pytorch as reference
from attn_spec import UnsupportedProblem
from torch import Tensor

Same = Callable[..., None]


def _inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def _wanted(scores: Tensor, dprobs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    probs = reference.joint_attn_softmax(leaf, key_padding_mask=mask)
    return probs.detach(), torch.autograd.grad(probs, leaf, dprobs)[0]


def _both(scores: Tensor, dprobs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = scores.detach().requires_grad_()
    probs = attn_cuda.joint_attn_softmax(leaf, key_padding_mask=mask)
    return probs.detach(), torch.autograd.grad(probs, leaf, dprobs)[0]


def test_a_side_stream_orders_the_work(cuda: torch.device, assert_same_bits: Same) -> None:
    scores, dprobs = _inputs(64, 4608)
    wanted = _wanted(scores, dprobs)
    on_device = torch.full_like(scores, float("nan"), device=cuda)
    cotangent = dprobs.to(cuda)
    source = scores.to(cuda)
    torch.cuda.synchronize(cuda)
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a kernel on another stream would read the NaNs before the copy
        on_device.copy_(source)
        found = _both(on_device, cotangent)
    stream.synchronize()
    assert_same_bits(found[0], wanted[0])
    assert_same_bits(found[1], wanted[1])


@pytest.mark.parametrize("masked", [False, True])
def test_a_cuda_graph_replays_the_bits(cuda: torch.device, assert_same_bits: Same, masked: bool) -> None:
    scores, dprobs = _inputs(2, 8, 1500, dtype=torch.bfloat16)
    mask = torch.rand(2, 1500, generator=torch.Generator().manual_seed(3)) < 0.8 if masked else None
    static, cotangent = scores.to(cuda), dprobs.to(cuda)
    static_mask = None if mask is None else mask.to(cuda)
    _both(static, cotangent, static_mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _both(static, cotangent, static_mask)
    for seed in (1, 2):
        scores, dprobs = _inputs(2, 8, 1500, dtype=torch.bfloat16, seed=seed)
        static.copy_(scores)
        cotangent.copy_(dprobs)
        for result in found:
            result.fill_(float("nan"))
        graph.replay()
        wanted = _wanted(scores, dprobs, mask)
        assert_same_bits(found[0], wanted[0], f"seed {seed}: probs")
        assert_same_bits(found[1], wanted[1], f"seed {seed}: dscores")


def test_another_device_than_the_current_one(cuda: torch.device, assert_same_bits: Same) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    other = torch.device("cuda", (cuda.index + 1) % torch.cuda.device_count())
    scores, dprobs = _inputs(3, 5000)
    found = _both(scores.to(other), dprobs.to(other))
    assert torch.cuda.current_device() == cuda.index
    wanted = _wanted(scores, dprobs)
    assert found[0].device == other
    assert_same_bits(found[0], wanted[0])
    assert_same_bits(found[1], wanted[1])
    again = torch.empty(1, device="cuda")
    assert again.device.index == cuda.index


def test_repeated_backward_beside_other_work(cuda: torch.device, assert_same_bits: Same) -> None:
    scores, dprobs = (tensor.to(cuda) for tensor in _inputs(256, 6544))
    first = _both(scores, dprobs)
    busy, factor = torch.cuda.Stream(cuda), torch.randn(2048, 2048, device=cuda)
    for _ in range(20):
        with torch.cuda.stream(busy):
            factor = torch.tanh(factor @ factor)
        again = _both(scores, dprobs)
        assert_same_bits(again[0], first[0])
        assert_same_bits(again[1], first[1])
    torch.cuda.synchronize(cuda)


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


def test_opcheck(cuda: torch.device) -> None:
    scores, dprobs = (tensor.to(cuda) for tensor in _inputs(2, 3, 300))
    mask = torch.rand(2, 300, device=cuda) < 0.8
    op = torch.ops.attn_cuda.joint_attn_softmax.default
    torch.library.opcheck(op, (scores.requires_grad_(), mask, torch.float32))
    torch.library.opcheck(op, (scores.detach(), None, torch.bfloat16))
    _, row_max, row_sum = op(scores.detach(), mask, torch.float32)
    backward = torch.ops.attn_cuda.joint_attn_softmax_backward.default
    torch.library.opcheck(backward, (dprobs, scores.detach(), mask, row_max, row_sum))


def test_compile_fullgraph(cuda: torch.device, assert_same_bits: Same) -> None:
    scores, dprobs = _inputs(2, 3, 700)
    mask = torch.rand(2, 700, generator=torch.Generator().manual_seed(7)) < 0.8
    compiled = torch.compile(lambda x, keep: attn_cuda.joint_attn_softmax(x, key_padding_mask=keep), fullgraph=True)
    leaf = scores.to(cuda).requires_grad_()
    probs = compiled(leaf, mask.to(cuda))
    wanted = _wanted(scores, dprobs, mask)
    assert_same_bits(probs, wanted[0])
    assert_same_bits(torch.autograd.grad(probs, leaf, dprobs.to(cuda))[0], wanted[1])


def test_a_second_derivative_is_refused_by_name(cuda: torch.device) -> None:
    leaf = torch.randn(2, 30, device=cuda, requires_grad=True)
    (gradient,) = torch.autograd.grad(attn_cuda.joint_attn_softmax(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_tensors_of_two_devices_are_refused(cuda: torch.device) -> None:
    with pytest.raises((ValueError, UnsupportedProblem), match="device"):
        attn_cuda.joint_attn_softmax(torch.zeros(2, 3, device=cuda), key_padding_mask=torch.ones(2, 3, dtype=torch.bool))
