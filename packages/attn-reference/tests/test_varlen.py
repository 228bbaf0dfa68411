"""Packed segments: each is a call of its own, and rows outside every segment are zeros."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from float_bits import bits, same_bits
from torch import Tensor

INF = float("inf")


def _packed(
    queries: int, keys: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim), (queries, heads, dim))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def _run(engine: ModuleType, arrays: list[Tensor], cu_q: list[int], cu_k: list[int], **options: Any) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in arrays[:3]]
    out, lse = engine.attention_varlen(*leaves, torch.tensor(cu_q), torch.tensor(cu_k), return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, arrays[3])


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": (3, 0)}, {"sinks": torch.tensor([0.0, 1.0, -1.0, 3.0])}, {"scale": 0.1}]
)
def test_each_segment_is_a_call_of_its_own(engine: ModuleType, options: dict[str, Any]) -> None:
    cu_q, cu_k = [0, 3, 3, 10, 12], [0, 5, 9, 290, 290]
    arrays = _packed(12, 290)
    out, lse, dq, dk, dv = _run(engine, arrays, cu_q, cu_k, **options)
    for rows, keys in zip(map(slice, cu_q[:-1], cu_q[1:]), map(slice, cu_k[:-1], cu_k[1:]), strict=True):
        dense = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (arrays[0][rows], arrays[1][keys], arrays[2][keys], arrays[3][rows])]
        leaves = [tensor.clone().requires_grad_() for tensor in dense[:3]]
        alone, alone_lse = engine.attention(*leaves, return_lse=True, **options)
        gradients = torch.autograd.grad(alone, leaves, dense[3])
        for packed, wanted in ((out[rows], alone), (dq[rows], gradients[0]), (dk[keys], gradients[1]), (dv[keys], gradients[2])):
            assert same_bits(packed, wanted[0].transpose(0, 1))
        assert same_bits(lse[:, rows], alone_lse[0])


def test_rows_past_the_last_segment(engine: ModuleType) -> None:
    arrays = _packed(7, 7, heads=1, kv_heads=1, dtype=torch.bfloat16)
    for tensor in arrays:
        tensor[5:] = math.nan
    found = _run(engine, arrays, [0, 2, 5], [0, 2, 5])
    wanted = _run(engine, [tensor[:5] for tensor in arrays], [0, 2, 5], [0, 2, 5])
    for position, (full, short) in enumerate(zip(found, wanted, strict=True)):
        if position == 1:
            assert same_bits(full[:, :5], short) and bool((full[:, 5:] == -INF).all())
        else:
            assert same_bits(full[:5], short) and not bits(full[5:]).any()


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_empty_query_segments(engine: ModuleType, dim: int) -> None:
    out, _, dq, dk, dv = _run(engine, _packed(2, 8, heads=2, kv_heads=1, dim=dim), [0, 0, 2, 2], [0, 3, 5, 8])
    assert torch.isfinite(out).all() and torch.isfinite(dq).all()
    for gradient in (dk, dv):
        assert not bits(gradient[:3]).any() and not bits(gradient[5:]).any()
    assert bits(dv[3:5]).any()


def test_every_segment_empty(engine: ModuleType) -> None:
    out, lse, dq, dk, dv = _run(engine, _packed(3, 4), [0, 0, 0], [0, 2, 4])
    assert not any(bits(tensor).any() for tensor in (out, dq, dk, dv))
    assert bool((lse == -INF).all())


def test_used_lengths_within_padded_segments(engine: ModuleType) -> None:
    arrays = _packed(10, 12)
    for tensor, unused in ((arrays[0], [2, 3, 9]), (arrays[3], [2, 3, 9]), (arrays[1], [4, 5, 11]), (arrays[2], [4, 5, 11])):
        tensor[unused] = math.nan
    found = _run(engine, arrays, [0, 4, 10], [0, 6, 12], seqlens_q=torch.tensor([2, 5]), seqlens_k=torch.tensor([4, 5]))
    rows, keys = [0, 1, 4, 5, 6, 7, 8], [0, 1, 2, 3, 6, 7, 8, 9, 10]
    wanted = _run(engine, [arrays[0][rows], arrays[1][keys], arrays[2][keys], arrays[3][rows]], [0, 2, 7], [0, 4, 9])
    assert same_bits(found[0][rows], wanted[0]) and same_bits(found[1][:, rows], wanted[1]) and same_bits(found[2][rows], wanted[2])
    assert same_bits(found[3][keys], wanted[3]) and same_bits(found[4][keys], wanted[4])
    assert not bits(found[0][[2, 3, 9]]).any() and not bits(found[3][[4, 5, 11]]).any()


def test_boundaries_are_not_ignored(engine: ModuleType) -> None:
    cu = [0, 3, 7, 12]
    arrays = _packed(12, 12, heads=1, kv_heads=1)
    arrays[2] = torch.repeat_interleave(torch.arange(3.0), torch.diff(torch.tensor(cu))).view(12, 1, 1).expand(12, 1, 16)
    out = _run(engine, arrays, cu, cu, causal=False)[0]
    torch.testing.assert_close(out, arrays[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_any_stride_and_integer(engine: ModuleType, dtype: torch.dtype) -> None:
    arrays = _packed(5, 5)
    wide = torch.tensor([0, 9, 2, 9, 5, 9], dtype=dtype)[::2]
    wanted = _run(engine, arrays, [0, 2, 5], [0, 2, 5])[0]
    assert same_bits(engine.attention_varlen(*arrays[:3], wide, wide), wanted)


def test_sink_gradients_add_over_segments(engine: ModuleType) -> None:
    arrays = _packed(5, 5)
    sinks = torch.zeros(4, requires_grad=True)

    def gradient(cu: list[int], part: slice) -> Tensor:
        tensors = [tensor[part] for tensor in arrays]
        out = engine.attention_varlen(*tensors[:3], torch.tensor(cu), torch.tensor(cu), sinks=sinks)
        return torch.autograd.grad(out, sinks, tensors[3])[0]

    assert same_bits(gradient([0, 2, 5], slice(0, 5)), gradient([0, 2], slice(0, 2)) + gradient([0, 3], slice(2, 5)))
