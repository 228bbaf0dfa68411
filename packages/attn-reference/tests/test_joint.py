"""Joint text and image attention: its three operators, prompt padding, and the products."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from float_bits import bits, same_bits
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
B, H, K, TEXT, IMAGE, D, V = 2, 4, 2, 9, 21, 16, 8


def _joint(dtype: torch.dtype, text: int = TEXT) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, heads, length, dim, generator=draw).to(dtype).requires_grad_()
        for length in (text, IMAGE)
        for heads, dim in ((H, D), (K, D), (K, V))
    ]


def _cotangents(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(B, H, TEXT, V, generator=draw).to(dtype), torch.randn(B, H, IMAGE, V, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
def test_joint_attention_is_its_three_operators(engine: ModuleType, padded: bool, dtype: torch.dtype) -> None:
    prompt = None
    if padded:
        prompt = torch.ones(B, TEXT, dtype=torch.bool)
        prompt[0, 4:], prompt[1, 2] = False, False
    keep = torch.ones(B, TEXT + IMAGE, dtype=torch.bool)
    if prompt is not None:
        keep[:, :TEXT] = prompt
    douts = [
        torch.where(keep[:, part].view(B, 1, -1, 1), dout, 0)
        for part, dout in zip((slice(0, TEXT), slice(TEXT, None)), _cotangents(dtype), strict=True)
    ]

    fused = _joint(dtype)
    outs = engine.joint_attention(*fused, prompt_mask=prompt)
    gradients = torch.autograd.grad(outs, fused, douts)

    apart = _joint(dtype)
    q, k, v = (torch.cat((apart[index], apart[index + 3]), 2) for index in range(3))
    probs = engine.joint_attn_softmax(engine.joint_attn_qk_gemm(q, k), key_padding_mask=None if prompt is None else keep)
    out = engine.joint_attn_av_gemm(probs, v)
    wanted = torch.autograd.grad(out, apart, torch.cat(douts, 2))

    assert outs[0].dtype == outs[1].dtype == dtype
    rows = keep.view(B, 1, -1, 1).expand_as(out)
    joined = torch.cat(outs, 2)
    assert same_bits(joined[rows], out[rows]) and not bits(joined[~rows]).any()
    for found, reference in zip(gradients, wanted, strict=True):
        assert same_bits(found, reference)


def test_padded_prompts_move_no_bit(engine: ModuleType) -> None:
    prompt = torch.zeros(B, TEXT, dtype=torch.bool)
    prompt[:, :5] = True
    padded = [leaf.detach() for leaf in _joint(torch.bfloat16)]
    for index in range(3):
        padded[index][:, :, 5:] = 1000 * torch.randn_like(padded[index][:, :, 5:])
    padded[1][:, :, 7] = torch.nan
    text, image = engine.joint_attention(*padded, prompt_mask=prompt)
    alone = engine.joint_attention(*(tensor[:, :, :5] for tensor in padded[:3]), *padded[3:])
    assert same_bits(text[:, :, :5], alone[0]) and same_bits(image, alone[1])
    assert not bits(text[:, :, 5:]).any()
    padded[1][:, :, 7] = 0
    unmasked = engine.joint_attention(*padded)
    assert not same_bits(unmasked[1], image), "negative control: an ignored mask is noticed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_agree_with_float64(engine: ModuleType, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    q, k = (torch.randn(B, heads, length, D, generator=draw).to(dtype).requires_grad_() for heads, length in ((H, 5), (K, 40)))
    scores = engine.joint_attn_qk_gemm(q, k, scale=0.3)
    upstream = torch.randn(scores.shape, generator=draw)
    found = torch.autograd.grad(scores, (q, k), upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k)]
    reference = 0.3 * exact[0] @ exact[1].repeat_interleave(H // K, 1).transpose(-1, -2)
    wanted = torch.autograd.grad(reference, exact, upstream.double())
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), reference, rtol=1e-5, atol=1e-5)
    for gradient, value in zip(found, wanted, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), value, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_scores_are_rounded_once(engine: ModuleType, out_dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 2, 3, D, generator=draw), torch.randn(1, 2, 7, D, generator=draw)
    assert same_bits(engine.joint_attn_qk_gemm(q, k, out_dtype=out_dtype), engine.joint_attn_qk_gemm(q, k).to(out_dtype))


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 129])
def test_a_row_of_a_product_knows_no_other_row(engine: ModuleType, rows: int) -> None:
    draw = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 1, 129, 64, generator=draw), torch.randn(1, 1, 65, 64, generator=draw)
    whole = engine.joint_attn_qk_gemm(q, k)
    assert same_bits(engine.joint_attn_qk_gemm(q[:, :, :rows], k), whole[:, :, :rows])
    probs = torch.rand(1, 1, 129, 65, generator=draw)
    assert same_bits(engine.joint_attn_av_gemm(probs[:, :, :rows], k), engine.joint_attn_av_gemm(probs, k)[:, :, :rows])
    reversed_dims = engine.joint_attn_qk_gemm(q.flip(-1), k.flip(-1))
    assert not same_bits(reversed_dims, whole), "negative control: the order of the sum is fixed"


def test_double_backward_raises_by_name(engine: ModuleType) -> None:
    scores = torch.randn(2, 9, requires_grad=True)
    (gradient,) = torch.autograd.grad(engine.joint_attn_softmax(scores)[:, 0].sum(), scores, create_graph=True)
    with pytest.raises(NotImplementedError, match="joint_attn_softmax has no second derivative"):
        gradient.sum().backward()
