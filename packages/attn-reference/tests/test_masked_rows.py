"""Rows without a key, masked NaN, extreme scores: what a masked key may not do, and what a finite score means."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from attn_reference._row import RowState
from float_bits import bits, same_bits
from torch import Tensor

INF, NAN = float("inf"), float("nan")


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def test_one_row_of_two_has_no_key(engine: ModuleType) -> None:
    eye = torch.eye(2).view(1, 1, 2, 2)
    q, k, v = _leaves(eye, eye, torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2))
    bias = torch.tensor([[0.0, -INF], [-INF, -INF]]).view(1, 1, 2, 2)
    out, lse = engine.attention(q, k, v, causal=False, scale=1.0, bias=bias, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out[0, 0].tolist() == [[1, 2], [0, 0]]
    assert lse[0, 0].tolist() == [1, -INF]
    assert dv[0, 0].tolist() == [[1, 1], [0, 0]]
    assert not bits(dq).any() and not bits(dk).any()


def test_more_queries_than_keys(engine: ModuleType) -> None:
    q, k, v = _leaves(torch.ones(1, 1, 5, 1), torch.tensor([0.0, math.log(3)]).view(1, 1, 2, 1), torch.tensor([1.0, 5.0]).view(1, 1, 2, 1))
    out, lse = engine.attention(q, k, v, scale=1.0, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 0, 0, 1, 4]), **close)
    assert lse.flatten()[:3].tolist() == [-INF] * 3
    torch.testing.assert_close(lse.flatten()[3:], torch.tensor([0, math.log(4)]), **close)
    torch.testing.assert_close(dq.flatten(), torch.tensor([0, 0, 0, 0, 0.8239592]), **close)
    torch.testing.assert_close(dk.flatten(), torch.tensor([-0.75, 0.75]), **close)
    torch.testing.assert_close(dv.flatten(), torch.tensor([1.25, 0.75]), **close)


def test_merging_empty_states() -> None:
    empty = RowState(torch.tensor(-INF), torch.tensor(0.0))
    state = RowState(torch.tensor(-80.0), torch.tensor(1.25))
    for merged, wanted in ((empty.merge(empty), empty), (empty.merge(state), state), (state.merge(empty), state)):
        assert same_bits(merged.max, wanted.max) and same_bits(merged.sum, wanted.sum)


def test_finite_minimum_is_a_number(engine: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = _leaves(*(torch.randn(1, 1, 4, 8, generator=draw) for _ in range(3)))
    bias = torch.zeros(1, 1, 4, 4)
    bias[0, 0, 0] = torch.finfo(torch.float32).min
    bias[0, 0, 1, :2] = torch.finfo(torch.float32).min
    out = engine.attention(q, k, v, causal=False, bias=bias)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0), rtol=1e-5, atol=1e-6)
    half = torch.softmax((q[0, 0, 1] @ k[0, 0, 2:].T) / math.sqrt(8), -1) @ v[0, 0, 2:]
    torch.testing.assert_close(out[0, 0, 1], half, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("content", [NAN, INF, 1e4])
@pytest.mark.parametrize("how", ["kv_lengths", "key_padding_mask", "window"])
def test_masked_keys_cannot_matter(engine: ModuleType, how: str, content: float, dtype: torch.dtype) -> None:
    keys, lengths, draw = 70, torch.tensor([1, 49]), torch.Generator().manual_seed(42)
    q, k, v = (
        torch.randn(2, 4, 3, 16, generator=draw),
        torch.randn(2, 2, keys, 16, generator=draw),
        torch.randn(2, 2, keys, 16, generator=draw),
    )
    dout = torch.randn(q.shape, generator=draw).to(dtype)
    used = torch.arange(keys) < lengths.view(-1, 1)
    if how == "window":
        used = (torch.arange(keys) >= 55).expand(2, -1)
        options = {"window": (12, 0)}
    else:
        options = {how: lengths if how == "kv_lengths" else used}

    def run(fill: float) -> list[Tensor]:
        k_, v_ = (torch.where(used.view(2, 1, keys, 1), tensor, fill) for tensor in (k, v))
        leaves = _leaves(*(tensor.to(dtype) for tensor in (q, k_, v_)))
        out, lse = engine.attention(*leaves, return_lse=True, causal=how == "window", **options)
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))]

    clean, dirty = run(0.0), run(content)
    assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))
    unused = ~used.view(2, 1, keys, 1).expand_as(dirty[3])
    assert not bits(dirty[3])[unused].any() and not bits(dirty[4])[unused].any()


def test_masked_upstream_cannot_matter(engine: ModuleType) -> None:
    """A row without a key passes nothing on, whatever its q and upstream gradient hold."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, size, 8, generator=draw) for size in (6, 4, 4))
    dout = torch.randn(1, 2, 6, 8, generator=draw)
    clean = _leaves(q, k, v)
    wanted = torch.autograd.grad(engine.attention(*clean), clean, dout)
    q[:, :, :2], dout[:, :, :2] = NAN, NAN
    dirty = _leaves(q, k, v)
    out = engine.attention(*dirty)
    found = torch.autograd.grad(out, dirty, dout)
    assert not bits(out[:, :, :2]).any()
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


def test_unmasked_nan_spoils_its_row_only(engine: ModuleType) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=draw) for _ in range(3))
    wanted = engine.attention(q, k, v)
    q[0, 1, 3] = NAN
    found = engine.attention(q, k, v)
    assert found[0, 1, 3].isnan().all()
    found[0, 1, 3] = wanted[0, 1, 3]
    assert same_bits(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_equal_inputs(engine: ModuleType, dtype: torch.dtype) -> None:
    q, k, v = _leaves(*(torch.full((1, 2, 20, 16), 1000.0, dtype=dtype) for _ in range(3)))
    out = engine.attention(q, k, v, causal=False)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.full_like(out, 1e-3))
    assert (out.float() - 1000).abs().max() <= 1e-3
    assert torch.isfinite(dv).all()
    # dP - delta is a rounding error of about 1e-7 * 16; its product with 20 keys of 1000 stays small.
    assert dq.float().abs().max() < 1e-1 and dk.float().abs().max() < 1e-1


def test_backward_knows_the_causal_mask(engine: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = _leaves(*(torch.randn(1, 1, 32, 16, generator=draw) for _ in range(3)))
    out = engine.attention(q, k, v)
    dout = torch.zeros_like(out)
    dout[0, 0, 0] = 1
    _, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not bits(dk[:, :, 1:]).any() and not bits(dv[:, :, 1:]).any()
    assert dv[0, 0, 0].tolist() == [1.0] * 16


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 3, 0), (0, 7, 5), (2, 0, 5)])
def test_empty_axes(engine: ModuleType, batch: int, queries: int, keys: int, causal: bool) -> None:
    q, k, v = _leaves(torch.randn(batch, 2, queries, 8), torch.randn(batch, 1, keys, 8), torch.randn(batch, 1, keys, 4))
    out, lse = engine.attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == (batch, 2, queries, 4) and lse.shape == (batch, 2, queries)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert [tuple(gradient.shape) for gradient in gradients] == [tuple(leaf.shape) for leaf in (q, k, v)]
    if keys == 0:
        assert not bits(out).any() and bool((lse == -INF).all())
    assert not any(bits(gradient).any() for gradient in gradients[:2])
