"""How the host kernels use memory: any strides, every output element, offsets beyond 32 bits, the caller's floating-point mode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attn_reference._host_kernels import KERNELS
from attn_spec.torch import AttentionInputs
from host_problems import dense, packed, results
from test_host_fuzz import assert_same, describe
from torch import Tensor


def _problem(seed: int = 0) -> AttentionInputs:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, size, 24, generator=g) for heads, size in ((4, 33), (2, 270), (2, 270)))
    return AttentionInputs(
        q=q, k=k, v=v, causal=True, scale=0.2, sinks=torch.randn(4, generator=g), bias=torch.randn(2, 4, 33, 270, generator=g)
    )


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _columns_apart(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _rows_apart(tensor: Tensor) -> Tensor:
    tall = torch.full((*tensor.shape[:2], 3 * tensor.shape[2], tensor.shape[3]), torch.nan, dtype=tensor.dtype)
    tall[:, :, 1::3] = tensor
    return tall[:, :, 1::3]


@pytest.mark.parametrize("layout", [_transposed, _columns_apart, _rows_apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_move_no_bit(layout: object, dtype: torch.dtype) -> None:
    inputs = _problem()
    inputs = replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in "qkv"})
    strided = replace(inputs, **{name: layout(getattr(inputs, name)) for name in ("q", "k", "v", "bias")})
    assert_same(results(KERNELS, strided), results(KERNELS, inputs), layout.__name__)


def test_expanded_inputs_and_cotangents() -> None:
    inputs = _problem()
    head = replace(inputs, k=inputs.k[:, :1].expand(-1, 2, -1, -1), q=inputs.q[:1].expand(2, -1, -1, -1))
    assert_same(results(KERNELS, head), results(KERNELS, replace(head, q=head.q.contiguous(), k=head.k.contiguous())), "stride 0")
    out, _, row_max, row_sum = KERNELS.attention_forward(inputs, torch.float32)
    needs = frozenset({"q", "k", "v"})
    found = [
        KERNELS.attention_backward(inputs, dout, None, row_max, row_sum, needs)
        for dout in (torch.ones(()).expand(out.shape), torch.ones(out.shape))
    ]
    assert_same(found[0], found[1], "expanded cotangent")


@pytest.mark.parametrize("layout", [_transposed, _columns_apart, _rows_apart])
def test_joint_operators_with_strides(layout: object) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, scores = (torch.randn(2, 2, *shape, generator=g) for shape in ((20, 40), (270, 40), (20, 270)))
    probs, row_max, row_sum = KERNELS.softmax_forward(scores, None, torch.float32)
    pairs = [
        (KERNELS.softmax_forward(layout(scores), None, torch.float32)[0], probs),
        (
            KERNELS.softmax_backward(layout(scores), layout(scores), None, row_max, row_sum),
            KERNELS.softmax_backward(scores, scores, None, row_max, row_sum),
        ),
        (KERNELS.qk_gemm_forward(layout(q), layout(k), 0.5, torch.float32), KERNELS.qk_gemm_forward(q, k, 0.5, torch.float32)),
        (KERNELS.av_gemm_forward(layout(probs), layout(k), torch.float32), KERNELS.av_gemm_forward(probs, k, torch.float32)),
        (
            KERNELS.qk_gemm_backward(layout(scores), layout(q), k, 0.5, (False, True))[1],
            KERNELS.qk_gemm_backward(scores, q, k, 0.5, (False, True))[1],
        ),
    ]
    for index, (found, expected) in enumerate(pairs):
        assert_same({"result": found}, {"result": expected}, f"{layout.__name__} {index}")


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("build", [dense, packed])
def test_every_element_is_written(build: object) -> None:
    assert torch.empty(4).isnan().all(), "control: the allocator poisons"
    for seed in range(200, 240):
        inputs = build(seed)
        finite = replace(inputs, **{name: getattr(inputs, name).nan_to_num(0.5, 2.0, -2.0).clamp(-2, 2) for name in "qkv"}, scale=0.1)
        for name, found in results(KERNELS, finite, seed).items():
            assert not found.isnan().any(), f"{name} of {describe(finite)}"


def test_flush_to_zero_of_the_caller_moves_no_bit() -> None:
    inputs = [replace(dense(seed), scale=1e-3) for seed in range(300, 306)]
    tiny = torch.finfo(torch.float32).tiny
    inputs = [replace(each, **{name: getattr(each, name).float() * tiny for name in "qkv"}) for each in inputs]
    expected = [results(KERNELS, each, 1) for each in inputs]
    assert torch.set_flush_denormal(True), "torch can set no flush-to-zero mode on this CPU"
    try:
        control = bool(torch.full((64,), tiny).mul(0.5).view(torch.int32).eq(0).all())
        found = [results(KERNELS, each, 1) for each in inputs]
        after = bool(torch.full((64,), tiny).mul(0.5).view(torch.int32).eq(0).all())
    finally:
        torch.set_flush_denormal(False)
    assert control, "control: the caller flushes"
    assert after, "the caller's mode is restored"
    for a, b, each in zip(found, expected, inputs, strict=True):
        assert_same(a, b, describe(each))


def test_offsets_beyond_32_bits() -> None:
    """The last key lies more than 2^31 elements after the first; the pages in between are never touched."""
    g = torch.Generator().manual_seed(0)
    step = 2**29 + 64
    k = torch.as_strided(torch.empty(4 * step + 8, dtype=torch.bfloat16), (1, 1, 5, 8), (0, 0, step, 1))
    k.copy_(torch.randn(1, 1, 5, 8, generator=g))
    q = torch.randn(1, 1, 3, 8, generator=g).bfloat16()
    inputs = AttentionInputs(q=q, k=k, v=k, causal=False, scale=1 / math.sqrt(8))
    plain = replace(inputs, k=k.contiguous(), v=k.contiguous())
    assert_same(results(KERNELS, inputs), results(KERNELS, plain), "far keys")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lengths": torch.tensor([271, 3])}, "kv_lengths must lie between 0 and the number of keys"),
        ({"k_start": torch.tensor([-1, 0])}, "k_start must not be negative"),
        ({"k_start": torch.tensor([0, 2**31 - 5])}, "key positions must stay below"),
        ({"q_start": torch.tensor([2**31, 0])}, "query positions must stay within"),
    ],
)
def test_values_out_of_range_are_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KERNELS.attention_forward(replace(_problem(), **change), torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 9, 4, 40])}, "must not decrease"),
        ({"cu_seqlens_k": torch.tensor([0, 1, 2, 10_000])}, "must lie within the packed array"),
        ({"seqlens_k": torch.tensor([1, 2, 300])}, "used lengths must lie between"),
        ({"q_start": torch.zeros(3, dtype=torch.int64)}, "packed input takes no masks"),
    ],
)
def test_packed_offsets_out_of_range_are_named(change: dict[str, Tensor], message: str) -> None:
    q, k = torch.randn(40, 2, 8), torch.randn(30, 2, 8)
    offsets = {"cu_seqlens_q": torch.tensor([0, 4, 9, 40]), "cu_seqlens_k": torch.tensor([0, 1, 2, 30])}
    with pytest.raises(ValueError, match=message):
        KERNELS.attention_forward(AttentionInputs(**{"q": q, "k": k, "v": k, **offsets, **change}), torch.float32)
