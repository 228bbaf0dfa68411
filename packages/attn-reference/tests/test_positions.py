"""Causal alignment, windows, chunks, decoding and rolling caches."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from attn_reference import attention
from float_bits import differing, same_bits
from torch import Tensor


def _qkv(queries: int, keys: int, *, batch: int = 1, heads: int = 2, dim: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, heads, queries, dim, generator=draw),
        torch.randn(batch, heads, keys, dim, generator=draw),
        torch.randn(batch, heads, keys, dim, generator=draw),
    )


@pytest.mark.parametrize(
    ("left", "wanted"),
    [(0, [1, 2, 4, 8]), (1, [1, 1.5, 3, 6]), (2, [1, 1.5, 7 / 3, 14 / 3]), (3, [1, 1.5, 7 / 3, 3.75]), (None, [1, 1.5, 7 / 3, 3.75])],
)
def test_window_counts_keys_besides_the_diagonal(engine: ModuleType, left: int | None, wanted: list[float]) -> None:
    zeros = torch.zeros(1, 1, 4, 1)
    out, lse = engine.attention(zeros, zeros, torch.tensor([1.0, 2, 4, 8]).view(1, 1, 4, 1), window=(left, 0), return_lse=True)
    assert out.flatten().tolist() == pytest.approx(wanted, rel=1e-6)
    sizes = [min(i + 1, 4 if left is None else left + 1) for i in range(4)]
    assert lse.flatten().tolist() == pytest.approx([math.log(size) for size in sizes], abs=1e-6)


def test_full_window_is_causal(engine: ModuleType) -> None:
    q, k, v = _qkv(65, 65)
    causal = engine.attention(q, k, v)
    for window in ((64, None), (65, None), (None, None), (64, 0), (2**31 - 1, 0)):
        assert same_bits(engine.attention(q, k, v, window=window), causal)
    assert same_bits(engine.attention(q, k, v, causal=False, window=(None, 0)), causal)
    assert not same_bits(engine.attention(q, k, v, window=(63, None)), causal)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_last_rows_alone_are_the_last_rows(engine: ModuleType, rows: int) -> None:
    q, k, v = _qkv(64, 64)
    full, lse = engine.attention(q, k, v, return_lse=True)
    tail, tail_lse = engine.attention(q[:, :, -rows:], k, v, return_lse=True)
    assert same_bits(tail, full[:, :, -rows:]) and same_bits(tail_lse, lse[:, :, -rows:])
    top_left = engine.attention(q[:, :, -rows:], k, v, q_start=0)
    assert not same_bits(top_left, full[:, :, -rows:])
    torch.testing.assert_close(top_left[:, :, 0], v[:, :, 0], rtol=0, atol=0)


def test_chunks_are_the_whole(engine: ModuleType) -> None:
    q, k, v = _qkv(300, 300, dim=8)
    whole = engine.attention(q, k, v)
    pieces, begin = [], 0
    for size in (100, 1, 156, 43):
        end = begin + size
        pieces.append(engine.attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], q_start=begin))
        begin = end
    assert same_bits(torch.cat(pieces, 2), whole)
    # Negative control: split keys and averaged parts do not have these bits.
    halves = [
        engine.attention(q[:, :, -1:], k[:, :, part], v[:, :, part], causal=False, return_lse=True)
        for part in (slice(0, 150), slice(150, 300))
    ]
    weight = torch.sigmoid(halves[0][1] - halves[1][1]).unsqueeze(-1)
    merged = halves[0][0] * weight + halves[1][0] * (1 - weight)
    torch.testing.assert_close(merged, whole[:, :, -1:], rtol=1e-4, atol=1e-5)
    assert differing(merged, whole[:, :, -1:]) > 0


def test_rolling_cache_keeps_the_bits(engine: ModuleType) -> None:
    q, k, v = _qkv(1, 700, dim=8)
    wanted = engine.attention(q, k, v, window=(299, 0))
    for first in (400, 256, 300):
        kept = slice(first, 700)
        assert same_bits(engine.attention(q, k[:, :, kept], v[:, :, kept], window=(299, 0), k_start=first), wanted)
    without = engine.attention(q, k[:, :, 300:], v[:, :, 300:], window=(299, 0))
    torch.testing.assert_close(without, wanted, rtol=1e-4, atol=1e-5)
    assert not same_bits(without, wanted), "negative control: without k_start the tiles lie elsewhere"


@pytest.mark.parametrize("where", ["left", "middle", "right"])
def test_padding_moves_no_bit(engine: ModuleType, where: str) -> None:
    q, k, v = _qkv(5, 290, batch=2, dim=8)
    order = {"left": [*[-1] * 40, *range(290)], "middle": [*range(100), *[-1] * 40, *range(100, 290)], "right": [*range(290), *[-1] * 40]}[
        where
    ]
    index = torch.tensor(order)
    mask = (index >= 0).expand(2, -1)
    padded = [torch.where(mask.view(2, 1, -1, 1), tensor[:, :, index.clamp(min=0)], math.nan) for tensor in (k, v)]
    leaves = [tensor.clone().requires_grad_() for tensor in (q, *padded)]
    alone = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, wanted = engine.attention(*leaves, causal=False, key_padding_mask=mask), engine.attention(*alone, causal=False)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, reference = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, alone, dout)
    assert same_bits(out, wanted) and same_bits(found[0], reference[0])
    for padded_gradient, gradient in zip(found[1:], reference[1:], strict=True):
        assert same_bits(padded_gradient[:, :, mask[0]], gradient)


def test_positions_beyond_32_bits_are_refused(engine: ModuleType) -> None:
    q, k, v = _qkv(3, 5)
    with pytest.raises(ValueError, match="position"):
        engine.attention(q, k, v, q_start=2**31 - 2)
    with pytest.raises(ValueError, match="position"):
        engine.attention(q, k, v, k_start=torch.tensor([2**31 - 4]))


def test_a_start_that_is_a_number_is_checked_whatever_the_device() -> None:
    q, k, v = (tensor.to("meta") for tensor in _qkv(3, 5))
    with pytest.raises(ValueError, match=r"attention: positions must stay below 2\*\*31; got q_start=2147483646 with 3 rows"):
        attention(q, k, v, q_start=2**31 - 2)
    with pytest.raises(ValueError, match=r"got k_start=2147483644 with 5 rows"):
        attention(q, k, v, k_start=2**31 - 4)
