"""attention of sm90-v1: host kernels against the definition, partial states and their merge, accuracy, and refusals."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import attn_reference
import pytest
import torch
from attn_reference._host_kernels import HostKernels
from attn_reference._pytorch_kernels import KERNELS as DEFINITION
from attn_reference.partials import Partials, attention_partial, merge_partials
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from attn_spec.torch._joint import JointLayout
from sm90_problems import DTYPES, normal, problem, same_bytes
from torch import Tensor

CONTRACT = "sm90-v1"
VARIANTS = HostKernels.variants()


@pytest.mark.parametrize("seed", range(18))
def test_host_kernels_give_the_bytes_of_the_definition(seed: int) -> None:
    inputs, dout, dlse = problem(seed)
    kernels = HostKernels(VARIANTS[seed % len(VARIANTS)], 1 + seed % 3)
    out, lse = DEFINITION.attention_sm90_forward(inputs)
    found = kernels.attention_sm90_forward(inputs)
    assert same_bytes(found[0], out)
    assert same_bytes(found[1], lse)
    needs = frozenset({"q", "k", "v"} | ({"sinks"} if inputs.sinks is not None else set()))
    expected = DEFINITION.attention_sm90_backward(inputs, dout, dlse, out, lse, needs)
    gradients = kernels.attention_sm90_backward(inputs, dout, dlse, out, lse, needs)
    assert gradients.keys() == expected.keys() == needs
    for name, gradient in gradients.items():
        assert same_bytes(gradient, expected[name]), name


def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    return probs @ v, scores.logsumexp(-1)


def rms(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).detach().square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (64, 128, 256))
def test_errors_are_those_of_fused_attention_in_halves(dtype: torch.dtype, width: int) -> None:
    """Against float64, at most 1.1 times the error of torch's fused attention in the same dtype; gradients likewise."""
    q, k, v = (normal(seed, 1, 4, 300, width, dtype=dtype).requires_grad_() for seed in range(3))
    dout = normal(3, 1, 4, 300, width, dtype=dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = exact(*wide)
    gradients = torch.autograd.grad(expected, wide, dout.double())
    found, lse = attn_reference.attention(q, k, v, contract=CONTRACT, return_lse=True)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert rms(found, expected) <= 1.1 * rms(plain, expected)
    assert float((lse.double() - expected_lse).abs().max()) < 2e-6
    for ours, theirs, right in zip(
        torch.autograd.grad(found, (q, k, v), dout), torch.autograd.grad(plain, (q, k, v), dout), gradients, strict=True
    ):
        assert rms(ours, right) <= 1.1 * rms(theirs, right)
    assert rms(torch.zeros_like(found), expected) > 10 * rms(plain, expected)


def test_gradients_of_sinks_and_lse() -> None:
    q, k, v = (normal(seed, 2, heads, 70, 64).requires_grad_() for seed, heads in ((0, 4), (1, 2), (2, 2)))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(5)).requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, sinks)]
    dout, dlse = normal(3, 2, 4, 70, 64), normal(4, 2, 4, 70).float()
    expected = torch.autograd.grad(exact(*wide), wide, (dout.double(), dlse.double()))
    outputs = attn_reference.attention(q, k, v, sinks=sinks, contract=CONTRACT, return_lse=True)
    for found, right in zip(torch.autograd.grad(outputs, (q, k, v, sinks), (dout, dlse)), expected, strict=True):
        assert found.dtype == (torch.float32 if found.ndim == 1 else torch.bfloat16)
        assert rms(found, right) < 0.01 * float(right.square().mean().sqrt())


def test_rows_without_a_key() -> None:
    """Output 0, LSE -inf or the sink itself, gradients 0 but the sink's -dLSE."""
    q, k, v = normal(0, 1, 2, 6, 64), normal(1, 1, 2, 3, 64), normal(2, 1, 2, 3, 64)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    sinks = torch.tensor([0.3, -torch.inf], requires_grad=True)
    out, lse = attn_reference.attention(q, k, v, sinks=sinks, contract=CONTRACT, return_lse=True)
    dead = slice(0, 3)
    assert not out[:, :, dead].any()
    assert same_bytes(lse[0, :, dead], torch.stack((sinks[:1].expand(3), sinks[1:].expand(3))).detach())
    dq, dsinks = torch.autograd.grad((out[:, :, dead].sum(), lse[:, 0, dead].sum()), (q, sinks))
    assert not dq.any()
    assert dsinks.tolist() == [3.0, 0.0]


def cut(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], **keywords: Any) -> list[Partials]:
    start = k.shape[2] - q.shape[2]
    return [
        attention_partial(q, k[:, :, begin:end], v[:, :, begin:end], q_start=start, k_start=begin, **keywords)
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]


@pytest.mark.parametrize("bounds", ((0, 2500), (0, 1024, 2500), (0, 1024, 2048, 2500), (0, 2048, 2500)), ids=str)
def test_any_number_of_partials_gives_the_bits_of_one_call(bounds: tuple[int, ...]) -> None:
    q, k, v = normal(0, 2, 4, 3, 64), normal(1, 2, 2, 2500, 64), normal(2, 2, 2, 2500, 64)
    sinks = torch.tensor([0.0, 1.0, -torch.inf, 5.0])
    out, lse = attn_reference.attention(q, k, v, sinks=sinks, contract=CONTRACT, return_lse=True)
    merged = merge_partials(cut(q, k, v, bounds), sinks=sinks)
    assert same_bytes(merged[0], out)
    assert same_bytes(merged[1], lse)


def test_partials_follow_autocast_as_attention_does() -> None:
    q, k, v = normal(0, 1, 1, 3, 64), normal(1, 1, 1, 40, 64), normal(2, 1, 1, 40, 64)
    with torch.autocast("cpu"):
        (part,) = cut(q.float(), k.float(), v.float(), (0, 40))
    assert part.dtype == torch.bfloat16
    assert same_bytes(merge_partials([part])[0], merge_partials(cut(q, k, v, (0, 40)))[0])


def test_partials_of_the_definition_are_those_of_the_host_kernels() -> None:
    inputs, _, _ = problem(3)
    inputs.k_start = None if inputs.k_start is None else torch.full_like(inputs.k_start, 1000)
    count = 1 + (1000 + inputs.k.shape[2]) // 1024
    for found, expected in zip(
        HostKernels().attention_sm90_states(inputs, count), DEFINITION.attention_sm90_states(inputs, count), strict=True
    ):
        assert same_bytes(found, expected)


def joint_tensors(text: int, image: int, width: int = 64) -> list[Tensor]:
    """q_txt, k_txt, v_txt, q_img, k_img, v_img."""
    sizes = [(heads, rows) for rows in (text, image) for heads in (4, 2, 2)]
    return [normal(seed, 2, *size, width) for seed, size in enumerate(sizes)]


def test_joint_attention_is_a_merge_of_the_states_of_text_and_image() -> None:
    """Text of two segments beside image; the same rows as one call over keys side by side have other bits."""
    tensors = joint_tensors(1100, 300)
    q = torch.cat((tensors[0][:, :, :2], tensors[3]), dim=2)
    text = attention_partial(q, *tensors[1:3], q_start=0, causal=False)
    image = attention_partial(q, *tensors[4:], q_start=0, k_start=2048, causal=False)
    out, _ = merge_partials([text, image])
    found_text, found_image = attn_reference.joint_attention(*tensors, contract=CONTRACT)
    assert same_bytes(found_text[:, :, :2], out[:, :, :2])
    assert same_bytes(found_image, out[:, :, 2:])
    keys, values = (torch.cat((tensors[index], tensors[index + 3]), dim=2) for index in (1, 2))
    assert not same_bytes(attn_reference.attention(q, keys, values, causal=False, contract=CONTRACT)[:, :, 2:], found_image)


def test_host_kernels_mask_between_text_and_image_as_the_definition_does() -> None:
    layout = JointLayout(torch.tensor([[True] * 9, [True, False] * 4 + [True]]), 9, 20)
    tensors = joint_tensors(9, 20)
    q, k, v = layout.queries(tensors[0], tensors[3]), layout.keys(tensors[1], tensors[4]), layout.keys(tensors[2], tensors[5])
    inputs = AttentionInputs(q, k, v, key_mask=layout.key_mask(k), scale=0.125)
    results = [kernels.attention_sm90_forward(inputs) for kernels in (HostKernels(), DEFINITION)]
    dout, needs = normal(7, *q.shape), frozenset({"q", "k", "v"})
    gradients = [kernels.attention_sm90_backward(inputs, dout, None, *results[0], needs) for kernels in (HostKernels(), DEFINITION)]
    for found, expected in zip(*results, strict=True):
        assert same_bytes(found, expected)
    for name in needs:
        assert same_bytes(gradients[0][name], gradients[1][name]), name
    assert not gradients[0]["k"][1, :, 5:1024].any()
    assert gradients[0]["k"][0, :, 5:9].any()


def test_joint_attention_is_near_the_formula() -> None:
    """A prompt with a mask against float64, gradients too; dropped rows are +0."""
    tensors = [tensor.requires_grad_() for tensor in joint_tensors(9, 20)]
    mask = torch.tensor([[True] * 9, [True, False, False, True, True, True, False, True, True]])
    dout = normal(7, 2, 4, 9, 64), normal(8, 2, 4, 20, 64)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    q, k, v = (torch.cat((wide[index], wide[index + 3]), dim=2).repeat_interleave(1 if index == 0 else 2, 1) for index in range(3))
    kept = torch.cat((mask, mask.new_ones(2, 20)), dim=1)
    expected = (q @ k.mT / 8).masked_fill(~kept[:, None, None], -torch.inf).softmax(-1) @ v * kept[:, None, :, None]
    right = torch.autograd.grad(expected, wide, torch.cat(dout, dim=2).double())
    out = attn_reference.joint_attention(*tensors, prompt_mask=mask, contract=CONTRACT)
    assert rms(torch.cat(out, dim=2), expected) < 0.004 * float(expected.square().mean().sqrt())
    for found, exactly in zip(torch.autograd.grad(out, tensors, dout), right, strict=True):
        assert rms(found, exactly) < 0.01 * float(exactly.square().mean().sqrt())
        assert found.shape[2] == 20 or not found.mT[..., ~mask[1]][1].any()


def test_a_merge_is_not_associative() -> None:
    """Merged states on the right give other bits: why the order is part of the contract."""
    from attn_reference._sm90_attention import State, fold

    q, k, v = normal(0, 1, 2, 8, 64), normal(1, 1, 2, 3072, 64), normal(2, 1, 2, 3072, 64)
    (part,) = cut(q, k, v, (0, 3072))
    states = [State(part.n[i], part.l[i], part.o[i]) for i in range(3)]
    assert not same_bytes(fold([states[0], fold(states[1:])]).o, fold(states).o)


def test_partials_out_of_order_are_refused() -> None:
    q, k, v = normal(0, 1, 1, 3, 64), normal(1, 1, 1, 1500, 64), normal(2, 1, 1, 1500, 64)
    parts = cut(q, k, v, (0, 1024, 1500))
    with pytest.raises(ValueError, match="segment 0 comes after segment 1"):
        merge_partials(parts[::-1])
    with pytest.raises(ValueError, match="segment 0 comes after segment 0"):
        merge_partials(cut(q, k, v, (0, 500, 1500)))
    with pytest.raises(ValueError, match="at least one part"):
        merge_partials([])
    with pytest.raises(TypeError, match="parts must be results of attention_partial; got int"):
        merge_partials([parts[0], 1])  # type: ignore[list-item]
    for name, other in (("scale", 0.5), ("dtype", torch.float16), ("q_start", 7), ("causal", False), ("window", (8, None))):
        with pytest.raises(ValueError, match=rf"parts must be of one call over its keys; got {name} .* and {re.escape(str(other))}$"):
            merge_partials([parts[0], replace(parts[1], **{name: other})])
    merge_partials([parts[0], replace(parts[1], q_start=None)])
    for sinks in (torch.zeros(2), torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"sinks must have shape \[H\]"):
            merge_partials(parts, sinks=sinks)
    with pytest.raises(TypeError, match=r"sinks must be a float32, bfloat16 or float16 tensor; got torch\.int64"):
        merge_partials(parts, sinks=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="sinks must be on the device of the parts, cpu; got meta"):
        merge_partials(parts, sinks=torch.zeros(2, device="meta"))
    for places in ({"q_start": None}, {"q_start": 0, "k_start": torch.tensor([0])}, {"q_start": 0, "k_start": None}):
        with pytest.raises(TypeError, match=r"attention_partial: [qk]_start must be an integer.*; got (None|tensor)"):
            attention_partial(q, k, v, **places)
    with pytest.raises(TypeError, match=r"attention_partial: q_start must be an integer or an integer tensor \[B\]; got 1.5"):
        attention_partial(q, k, v, q_start=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_partial: contract sm90-v1 needs scale"):
        attention_partial(q, k, v, q_start=0, scale=-1.0)
    with pytest.raises(TypeError, match="attention_partial: q is bfloat16 and v is float32"):
        attention_partial(q, k, v.float(), q_start=0)
    with pytest.raises(UnsupportedProblem, match="gradients"):
        attention_partial(q.requires_grad_(), k, v, q_start=0)
    with pytest.raises(UnsupportedProblem, match=r"(?s)merge_partials.*gradients"):
        merge_partials(parts, sinks=torch.zeros(1, requires_grad=True))


@pytest.mark.parametrize(
    ("keywords", "reason"),
    (
        ({"bias": torch.zeros(1, 1, 1, 1)}, "bias with contract sm90-v1 .ordered-v1 has them"),
        ({"key_padding_mask": torch.ones(1, 5, dtype=torch.bool)}, "key_padding_mask with contract sm90-v1"),
        ({"dropout_p": 0.1}, "dropout with contract sm90-v1"),
    ),
)
def test_what_it_lacks_is_refused_by_name(engine: ModuleType, keywords: dict[str, Any], reason: str) -> None:
    q = normal(0, 1, 1, 5, 64)
    with pytest.raises(UnsupportedProblem, match=reason):
        engine.attention(q, q, q, contract=CONTRACT, **keywords)


def test_the_scale_of_joint_attention_is_refused_in_its_name() -> None:
    with pytest.raises(ValueError, match=r"^joint_attention: contract sm90-v1 needs scale"):
        attn_reference.joint_attention(*joint_tensors(9, 20), scale=-1.0, contract=CONTRACT)


def test_other_dtypes_widths_and_scales_are_refused(engine: ModuleType) -> None:
    q = normal(0, 1, 1, 5, 64)
    with pytest.raises(UnsupportedProblem, match=r"dtype float32 with contract sm90-v1 .it covers bfloat16, float16; others: ordered-v1"):
        engine.attention(q.float(), q.float(), q.float(), contract=CONTRACT)
    with pytest.raises(UnsupportedProblem, match=r"head_dim=32, value_dim=32 with contract sm90-v1 .it covers 64, 128, 256"):
        engine.attention(q[..., :32], q[..., :32], q[..., :32], contract=CONTRACT)
    with pytest.raises(ValueError, match=r"got scale=-0.5"):
        engine.attention(q, q, q, scale=-0.5, contract=CONTRACT)
    with pytest.raises(UnsupportedProblem, match="a float32 result with contract sm90-v1"):
        engine.FUNCTIONS["attention.forward_fp32"](q, q, q, contract=CONTRACT)


def test_a_call_compiles_to_one_graph() -> None:
    q, k, v = normal(0, 1, 2, 8, 64), normal(1, 1, 2, 40, 64), normal(2, 1, 2, 40, 64)
    compiled = torch.compile(attn_reference.attention, fullgraph=True, backend="eager")
    assert same_bytes(compiled(q, k, v, contract=CONTRACT), attn_reference.attention(q, k, v, contract=CONTRACT))
    with pytest.raises(Exception, match="contract sm90-v1 needs scale"):
        compiled(q, k, v, scale=-1.0, contract=CONTRACT)
