"""``qat_attention``: the faults that 4-bit attention kernels have had, each with the faulty formula as a control, and what moves no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_reference import attention, attention_fp32, nvfp4, qat_attention, qat_attention_varlen
from attn_reference.nvfp4 import fake_quantize, quantize
from attn_spec import QATConfig, UnsupportedProblem
from float_bits import same_bits
from torch import Tensor

ONLY_P = QATConfig(quantize_q=False, quantize_k=False, quantize_v=False)
FASTVIDEO = QATConfig.fastvideo()
CONFIGS = (QATConfig(), FASTVIDEO, QATConfig(smooth_q=True, smooth_k=True), QATConfig(qkv_outer="row", p_outer="row"))
SWITCHES = ("quantize_q", "quantize_k", "quantize_v", "quantize_p", "smooth_q", "smooth_k", "high_precision_delta", "quantized_backward")


def qkv(heads: int = 1, kv_heads: int = 1, queries: int = 8, keys: int = 40, dim: int = 16, *, seed: int = 0) -> tuple[Tensor, ...]:
    """One batch item and an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    return tuple(torch.randn(1, *shape, dim, generator=generator) for shape in shapes)


def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, function: Any = qat_attention, **keywords: Any) -> tuple[Tensor, ...]:
    """out, dq, dk, dv."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = function(*leaves, **keywords)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


@pytest.mark.parametrize("keys", (192, 1024, 4096))
def test_dv_does_not_collapse_with_length(keys: int) -> None:
    q, k, v, dout = qkv(queries=4, keys=keys)
    uniform = run(q * 0, k, v, dout, config=ONLY_P)[3]
    expected = (dout.sum(2, keepdim=True) / keys).expand_as(v)
    assert cosine(uniform, expected) > 0.9999 and abs(float(uniform.norm() / expected.norm()) - 1) < 1e-4
    rounded = run(q * 0, k, v, dout, config=replace(ONLY_P, p_outer=2048.0))[3]
    assert float(rounded.norm() / expected.norm()) > 1.03, "a constant that is no 6 * 448 rounds the scale of P = 1"
    probs = torch.softmax(torch.randn(4, keys, generator=torch.Generator().manual_seed(1)), -1)
    assert not fake_quantize(torch.full((4, keys), 1 / keys)).any(), "the faulty formula: normalised P with block scales alone is 0"
    found, exact = run(q, k, v, dout, config=ONLY_P)[3], run(q, k, v, dout, attention_fp32, causal=False)[3]
    assert cosine(found, exact) >= 0.99
    if keys == 4096:
        assert cosine(fake_quantize(probs).T @ dout[0, 0], probs.T @ dout[0, 0]) < 0.5, "and loses most of dV at logit std 1"


def test_dv_at_the_length_of_a_video() -> None:
    """31,200 keys, logit std 1: normalised P of about 3e-5 a key has no 4-bit value with block scales alone."""
    q, k, v, dout = qkv(queries=1, keys=31_200)
    (found,) = torch.autograd.grad(qat_attention(q, k, v.requires_grad_(), config=ONLY_P), v, dout)
    probs = torch.softmax(q.double() @ k.double().mT / 4, -1)
    exact = probs.mT @ dout.double()
    assert cosine(found, exact) >= 0.99 and abs(float(found.double().norm() / exact.norm()) - 1) < 0.01
    faulty = fake_quantize(probs[0, 0].float()).double().mT @ dout[0, 0].double()
    assert cosine(faulty, exact) < 0.6, "the faulty formula quantizes normalised P"


def test_a_small_block_underflows_by_rule() -> None:
    """A block whose largest value is 0.00585 has scale 0 and is +0, one of 0.0059 has scale 2^-9; a uniform row of P keeps its mass."""
    for largest, scale in ((0.00585, 0), (0.0059, 1)):
        packed = quantize(torch.full((1, 16), largest))
        assert int(packed.scales) == scale and bool(packed.codes.any()) == bool(scale)
    q, k, _, _ = qkv(keys=4096)
    out = qat_attention(q * 0, k, torch.ones_like(k), config=ONLY_P)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=0)
    assert not fake_quantize(torch.full((1, 4096), 1 / 4096)).any(), "the faulty formula: O = 0"


def test_the_outer_scale_of_p_does_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale 2, descale 1/3: O scales by 2/3 and LSE stays. A test in which both sides take the same pair could not see a wrong one."""
    q, k, v, _ = qkv()
    right = qat_attention(q, k, v, config=replace(ONLY_P, p_outer=2.0), return_lse=True)
    values = nvfp4._values
    monkeypatch.setattr(nvfp4, "_values", lambda codes, scales, decoding: values(codes, scales, decoding * (2 / 3)))
    found = qat_attention(q, k, v, config=replace(ONLY_P, p_outer=2.0), return_lse=True)
    assert same_bits(found[1], right[1]) and not same_bits(found[0], right[0])
    assert 0.6 < float((found[0] * right[0]).sum() / right[0].square().sum()) < 0.75


def test_one_large_logit_leaves_the_others_their_mass() -> None:
    """One logit 6 above 1023 equal ones, alone in its block's neighbourhood; v is 1 at the small ones."""
    q, k = torch.full((1, 1, 1, 16), 1.0), torch.zeros(1, 1, 1024, 16)
    k[0, 0, 0] = 6 / 16
    v = torch.ones(1, 1, 1024, 16)
    v[0, 0, 0] = 0
    exact = float(attention_fp32(q, k, v, causal=False, scale=1.0)[0, 0, 0, 0])
    found = float(qat_attention(q, k, v, scale=1.0, config=ONLY_P)[0, 0, 0, 0])
    lost = float(qat_attention(q, k, v, scale=1.0, config=replace(ONLY_P, p_outer="none"))[0, 0, 0, 0])
    assert found > 0.95 * exact and lost == 0, "without an outer scale the small probabilities vanish"


@pytest.mark.parametrize(
    "config", (QATConfig(), FASTVIDEO, QATConfig(smooth_q=True, smooth_k=True), QATConfig(qkv_outer="row", p_outer="row"))
)
@pytest.mark.parametrize("keys", (1, 40, 53))
def test_padding_and_neighbours_move_no_bit(keys: int, config: QATConfig) -> None:
    q, k, v, dout = qkv(4, 2, 5, keys)
    alone = run(q, k, v, dout, config=config)
    assert all(tensor.isfinite().all() for tensor in alone)
    holes = torch.ones(2, keys + 7, dtype=torch.bool)
    holes[0, :7] = False
    padded = []
    for tensor in (k, v):
        both = torch.randn(2, 2, keys + 7, 16)
        both[0, :, :7], both[0, :, 7:] = torch.nan, tensor[0]
        padded.append(both)
    twice = [torch.cat([tensor, torch.randn_like(tensor)]) for tensor in (q, dout)]
    out, dq, dk, dv = run(twice[0], *padded, twice[1], key_padding_mask=holes, config=config)
    for found, expected in zip((out[:1], dq[:1], dk[:1, :, 7:], dv[:1, :, 7:]), alone, strict=True):
        assert same_bits(found, expected)
    assert not dk[0, :, :7].any() and not dv[0, :, :7].any()
    if config.v_axis == "keys" and keys > 16:
        assert not same_bits(run(q, k, v.flip(2), dout, config=config)[0], alone[0]), "the comparison sees another order of V"


def test_very_negative_scores_stay_finite() -> None:
    q, k = torch.full((1, 1, 8, 64), 10.0), torch.full((1, 1, 40, 64), -10.0)
    _, _, v, dout = qkv(dim=64)
    found = run(q, k, v, dout)
    assert all(tensor.isfinite().all() for tensor in found)
    assert torch.exp2(torch.tensor(800.0) * 1.4427).isinf(), "exp2(0 - LSE) of an unmasked tail column, the faulty formula"
    torch.testing.assert_close(found[0], fake_quantize(v.mT).mT.mean(2, keepdim=True).expand(1, 1, 8, 64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), ((5, 37), (37, 5), (33, 33)))
def test_causal_masks_both_passes(queries: int, keys: int) -> None:
    q, k, v, dout = qkv(2, 1, queries, keys)
    found = run(q, k, v, dout, causal=True, config=FASTVIDEO)
    exact = run(q, k, v, dout, attention_fp32, causal=True)
    free = run(q, k, v, dout, config=FASTVIDEO)
    for a, b, other in zip(found, exact, free, strict=True):
        assert cosine(a, b) > 0.96 > cosine(other, b) or queries == 5
    assert not found[0][:, :, : max(0, queries - keys)].any() and not found[1][:, :, : max(0, queries - keys)].any()
    dead = run(q, k, v, torch.cat([dout[:, :, :1], dout[:, :, 1:] * 0], 2), causal=True, config=FASTVIDEO)[3]
    assert not dead[:, :, max(0, keys - queries + 1) :].any(), "dV of keys that no query with an upstream gradient sees"


def test_later_tokens_move_no_bit_of_a_causal_prefix() -> None:
    q, k, v, dout = qkv(2, 1, 40, 40)
    whole = run(q, k, v, dout, causal=True, config=FASTVIDEO)
    for n in (16, 21):
        part = run(*(tensor[:, :, :n] for tensor in (q, k, v, dout)), causal=True, config=FASTVIDEO)
        assert same_bits(part[0], whole[0][:, :, :n]) and same_bits(part[1], whole[1][:, :, :n])
    tile, other = fake_quantize(k, outer="tile"), k.clone()
    other[:, :, 31] *= 100
    assert not torch.equal(tile[:, :, :31], fake_quantize(other, outer="tile")[:, :, :31]), "a scale over a tile reads later tokens"
    for config in (QATConfig(), QATConfig(v_axis="head_dim", smooth_k=True), QATConfig(v_axis="head_dim", qkv_outer="tile")):
        with pytest.raises(UnsupportedProblem, match="causal=True"):
            qat_attention(q, k, v, causal=True, config=config)


def test_views_are_their_copies() -> None:
    packed = torch.randn(1, 40, 3, 2, 16)
    q, k, v = (packed[:, :, index].transpose(1, 2) for index in range(3))
    dout = torch.randn(1, 40, 2, 16).transpose(1, 2)
    copies = [tensor.contiguous() for tensor in (q, k, v, dout)]
    before = packed.clone()
    for a, b in zip(run(q, k, v, dout, config=QATConfig(smooth_k=True)), run(*copies, config=QATConfig(smooth_k=True)), strict=True):
        assert same_bits(a, b)
    assert torch.equal(packed, before), "the inputs are left as they are"


@pytest.mark.parametrize("scale", (0.0, -0.5, 1e-6))
def test_scale_zero_and_negative(scale: float) -> None:
    q, k, v, dout = qkv()
    found, exact = run(q, k, v, dout, scale=scale), run(q, k, v, dout, attention_fp32, causal=False, scale=scale)
    for a, b in zip(found, exact, strict=True):
        assert cosine(a, b) > 0.95 or not b.any()
    mean = fake_quantize(v.mT).mT.mean(2, keepdim=True)
    if scale == 0:
        torch.testing.assert_close(found[0], mean.expand_as(found[0]), rtol=1e-5, atol=1e-6)
        wrong = (mean * 40 / 64).expand_as(found[0])  # a mask added before a scale of 0 counts the tail of the tile
        assert not torch.allclose(found[0], wrong, rtol=1e-2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_grouped_heads_are_repeated_heads(dtype: torch.dtype) -> None:
    q, k, v, dout = (tensor.to(dtype) for tensor in qkv(4, 2))
    out, dq, dk, _ = run(q, k, v, dout)
    wide = run(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), dout)
    assert out.dtype == dq.dtype == dk.dtype == dtype
    assert same_bits(out, wide[0]) and same_bits(dq, wide[1])
    assert not same_bits(out, run(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), dout)[0]), "heads of another order"
    summed = wide[2].float().view(1, 2, 2, 40, 16).sum(2)
    torch.testing.assert_close(dk.float(), summed, rtol=0.02, atol=0.02)


def test_disabled_is_ordered_v1_and_every_option_acts() -> None:
    q, k, v, dout = qkv()
    for a, b in zip(run(q, k, v, dout, config=QATConfig(enabled=False)), run(q, k, v, dout, attention, causal=False), strict=True):
        assert same_bits(a, b)
    base = run(q, k, v, dout)
    for option in (
        "quantize_q",
        "quantize_k",
        "quantize_v",
        "quantize_p",
        "smooth_q",
        "smooth_k",
        "high_precision_delta",
        "quantized_backward",
    ):
        changed = run(q, k, v, dout, config=QATConfig(**{option: not getattr(QATConfig(), option)}))
        assert any(not same_bits(a, b) for a, b in zip(changed, base, strict=True)), option
        assert all(cosine(a, b) > 0.9 for a, b in zip(changed, base, strict=True)), option


def test_a_common_offset_of_the_keys_needs_smoothing() -> None:
    q, k, v, dout = qkv()
    exact = run(q, k + 20, v, dout, attention_fp32, causal=False)[0]
    assert cosine(run(q, k + 20, v, dout, config=QATConfig(smooth_k=True))[0], exact) > 0.95
    assert cosine(run(q, k + 20, v, dout)[0], exact) < 0.9


@pytest.mark.parametrize("mask", (None, torch.zeros(1, 40, dtype=torch.bool)))
def test_no_key_or_no_query(mask: Tensor | None) -> None:
    q, k, v, dout = qkv() if mask is not None else qkv(keys=0)
    found = run(q, k, v, dout, key_padding_mask=mask)
    assert not any(tensor.any() for tensor in found)
    assert qat_attention(q[:, :, :0], k, v).shape == (1, 1, 0, 16)


def test_second_derivatives_and_bad_arguments_are_refused() -> None:
    q, k, v, _ = qkv()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(qat_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="qat_attention: has no second derivative"):
        dq.sum().backward()
    for arguments, error, message in (
        ((q[..., :8], k[..., :8], v[..., :8]), ValueError, "head dim must be a multiple of 16 from 16 to 256; got 8"),
        ((q, k.half(), v), TypeError, "q is float32 and k is float16"),
        ((q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), ValueError, "1 query heads and 2 kv heads"),
        ((q, k[:, :, 1:], v), ValueError, "keys must agree; got k 39, v 40"),
    ):
        with pytest.raises(error, match=message):
            qat_attention(*arguments)
    with pytest.raises(TypeError, match="config must be a QATConfig; got dict"):
        qat_attention(q, k, v, config={})  # type: ignore[arg-type]


def test_torch_func_differentiates_and_names_what_it_cannot() -> None:
    q, k, v, _ = qkv()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = qat_attention(q, k, v, return_lse=True)
        return out.square().sum() + lse.sum()

    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for found, wanted in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected, strict=True):
        assert found.equal(wanted) and found.any()
    mapped = [tensor.unsqueeze(0) for tensor in (q, k, v)]
    for transformed, arguments in (
        (torch.func.vmap(loss), mapped),
        (torch.func.vmap(torch.func.grad(loss)), mapped),
        (torch.func.jacrev(qat_attention), [q, k, v]),
    ):
        with pytest.raises(NotImplementedError, match=r"qat_attention: torch\.func\.vmap is not supported"):
            transformed(*arguments)
    with pytest.raises(NotImplementedError, match="qat_attention: has no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).sum())(q)


@pytest.mark.parametrize("batch", (0, 1))
@pytest.mark.parametrize("scale", (0.0, -1.0))
def test_the_tensor_core_contract_needs_a_positive_scale(scale: float, batch: int) -> None:
    """Before any work, so in an empty call too."""
    q = torch.zeros(batch, 1, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"contract nvfp4-sm90-v1 needs scale .* got scale={scale}"):
        qat_attention(q, q, q, scale=scale, contract="nvfp4-sm90-v1")


def test_padded_segments_are_zero_between_and_equal_their_rows_alone() -> None:
    """What lies in the padding, NaN too, moves no bit: no scale spans rows that are not used."""
    q, k, v = (torch.randn(70, 2, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    offsets, used = torch.tensor([0, 30, 70], dtype=torch.int32), torch.tensor([21, 33], dtype=torch.int32)
    padding = torch.tensor([*range(21, 30), *range(63, 70)])
    dirty = [tensor.index_fill(0, padding, torch.nan).requires_grad_() for tensor in (q, k, v)]
    out, lse = qat_attention_varlen(*dirty, offsets, offsets, seqlens_q=used, seqlens_k=used, return_lse=True)
    gradients = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), dirty)
    assert not out[padding].any() and (lse[:, padding] == -torch.inf).all() and not any(found[padding].any() for found in gradients)
    for begin, end in ((0, 21), (30, 63)):
        alone = [tensor[begin:end].transpose(0, 1).unsqueeze(0).requires_grad_() for tensor in (q, k, v)]
        expected, expected_lse = qat_attention(*alone, return_lse=True)
        assert out[begin:end].equal(expected[0].transpose(0, 1)) and lse[:, begin:end].equal(expected_lse[0])
        for found, wanted in zip(gradients, torch.autograd.grad(expected.sum() + expected_lse.sum(), alone), strict=True):
            assert found[begin:end].equal(wanted[0].transpose(0, 1)) and found[begin:end].any()


def test_bad_offsets_are_named() -> None:
    q, good = torch.zeros(5, 1, 16), torch.tensor([0, 2, 5])
    for offsets, used, message in (
        (torch.tensor([0, 3, 2]), None, r"qat_attention_varlen: cu_seqlens_k must not decrease and must lie in \[0, 5\]"),
        (good, torch.tensor([3, 1]), r"qat_attention_varlen: seqlens_k must lie between 0 and the segment sizes \[2, 3\]; got \[3, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            qat_attention_varlen(q, q, q, good, offsets, seqlens_k=used)
