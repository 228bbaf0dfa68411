"""Dropout: Philox known answers, the identity that ties forward to backward, rates and seeds."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from attn_reference._dropout import kept_pairs, philox_word
from float_bits import bits, same_bits
from torch import Tensor


@pytest.mark.parametrize(
    ("seed", "counter", "word"),
    [
        (0, (0, 0, 0, 0), 0x6627E8D5),
        (-1, (0xFFFFFFFF,) * 4, 0x408F276D),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
    ],
)
def test_philox_known_answers(seed: int, counter: tuple[int, ...], word: int) -> None:
    """The published vectors of Random123."""
    assert philox_word(torch.tensor(seed), *(torch.tensor(value) for value in counter)).item() == word


def _qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 33, 16, generator=draw).to(dtype).requires_grad_() for heads in (4, 2, 2)]


@pytest.mark.parametrize("p", [0.1, 0.48, 0.9])
def test_backward_uses_the_mask_of_the_forward(engine: ModuleType, p: float) -> None:
    """out is linear in v, so <dv, v> = <dout, out>."""
    q, k, v = _qkv()
    out = engine.attention(q, k, v, dropout_p=p, dropout_seed=7)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (dv,) = torch.autograd.grad(out, v, dout)
    left, right = (dv.double() * v.double()).sum(), (dout.double() * out.double()).sum()
    scale = (dout.double() * out.double()).abs().sum()
    assert (left - right).abs() <= 1e-6 * scale
    other = engine.attention(q, k, v, dropout_p=p, dropout_seed=8)
    assert (left - (dout.double() * other.double()).sum()).abs() > 1e-4 * scale, "negative control: another mask breaks the identity"


def test_no_and_full_dropout(engine: ModuleType) -> None:
    q, k, v = _qkv()
    assert same_bits(engine.attention(q, k, v, dropout_p=0.0, dropout_seed=7), engine.attention(q, k, v))
    out, lse = engine.attention(q, k, v, dropout_p=1.0, dropout_seed=7, return_lse=True)
    assert not bits(out).any()
    assert not any(bits(gradient).any() for gradient in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    assert same_bits(lse, engine.attention(q, k, v, return_lse=True)[1])


def test_seeds(engine: ModuleType) -> None:
    q, k, v = _qkv()
    first = engine.attention(q, k, v, dropout_p=0.3, dropout_seed=2**64 - 5)
    assert same_bits(first, engine.attention(q, k, v, dropout_p=0.3, dropout_seed=torch.tensor(-5)))
    assert not same_bits(first, engine.attention(q, k, v, dropout_p=0.3, dropout_seed=4))
    torch.manual_seed(3)
    drawn = engine.attention(q, k, v, dropout_p=0.3)
    assert not same_bits(drawn, engine.attention(q, k, v, dropout_p=0.3))
    torch.manual_seed(3)
    assert same_bits(drawn, engine.attention(q, k, v, dropout_p=0.3))


def test_rate_and_independence() -> None:
    axes = (torch.arange(8).view(-1, 1, 1), torch.arange(128).view(-1, 1), torch.arange(256))
    kept = torch.stack([kept_pairs(0.3, torch.tensor(1), batch, *axes) for batch in range(2)]).double()
    assert abs(kept.mean().item() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    for a, b in ((kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept[..., 0, :], kept[..., 1, :]), (kept[..., 0], kept[..., 1])):
        assert abs(((a - 0.7) * (b - 0.7)).mean().item()) < 5 * 0.21 / a.numel() ** 0.5


def test_a_masked_key_stays_out(engine: ModuleType) -> None:
    q, k, v = (tensor.detach() for tensor in _qkv())
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[:, 20:] = False
    wanted = engine.attention(q, k, v, causal=False, key_padding_mask=mask, dropout_p=0.3, dropout_seed=1)
    k[:, :, 20:], v[:, :, 20:] = torch.nan, torch.nan
    assert same_bits(engine.attention(q, k, v, causal=False, key_padding_mask=mask, dropout_p=0.3, dropout_seed=1), wanted)
