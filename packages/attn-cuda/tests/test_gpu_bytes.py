"""Bytes of the kernels against the CPU reference: every dtype, row lengths around every block choice, masks, special values, strides."""

from __future__ import annotations

from collections.abc import Callable

import attn_cuda
import pytest
import torch
from attn_cuda.backend import BACKEND
from attn_reference import pytorch as reference
from torch import Tensor

Same = Callable[..., None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")
# Lanes, tiles, a warp a row up to 1024, then blocks whose warps follow the tiles, and rows that exceed shared memory (forward, backward).
LENGTHS = (1, 2, 31, 32, 33, 255, 256, 257, 512, 1000, 1024, 1025, 4608, 5121, 6544, 7401, 10241, 16385, 30001)
# Of ordered-v2: a warp a row up to 1024, then a warp a tile, and rows with more tiles than warps (8 backward, 12 or 16 forward).
LENGTHS_V2 = (1, 33, 255, 1000, 1023, 1024, 1025, 2048, 4608, 6544, 7401, 8193, 12289, 16385, 30001)


def _random(*shape: int, seed: int, dtype: torch.dtype, scale: float = 4.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _compare(
    same: Same, device: torch.device, scores: Tensor, mask: Tensor | None, dprobs: Tensor, what: str, contract: str | None = None
) -> None:
    """Forward and backward of one call; scores may be a strided view, which is kept on the device."""
    wanted_in = scores.detach().clone().requires_grad_()
    wanted = reference.joint_attn_softmax(wanted_in, key_padding_mask=mask, contract=contract)
    (wanted_gradient,) = torch.autograd.grad(wanted, wanted_in, dprobs)
    base = scores.detach()
    storage = torch.empty(base.untyped_storage().size() // base.element_size(), dtype=base.dtype)
    storage.set_(base.untyped_storage())
    found_in = storage.to(device).as_strided(base.shape, base.stride(), base.storage_offset()).requires_grad_()
    _poison(device)
    found = attn_cuda.joint_attn_softmax(found_in, key_padding_mask=None if mask is None else mask.to(device), contract=contract)
    (found_gradient,) = torch.autograd.grad(found, found_in, dprobs.to(device))
    same(found, wanted, f"{what}: probs")
    same(found_gradient, wanted_gradient, f"{what}: dscores")


def _poison(device: torch.device) -> None:
    """Fills memory that the caching allocator hands out next with NaN, so that an element which a kernel misses shows."""
    blocks = [torch.full((1 << size,), float("nan"), device=device) for size in (8, 10, 12, 14, 16, 18, 20, 22) for _ in range(3)]
    del blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", LENGTHS)
def test_bytes_equal_the_reference(cuda: torch.device, assert_same_bits: Same, keys: int, dtype: torch.dtype) -> None:
    for scale in (4.0, 60.0):
        scores = _random(2, 3, keys, seed=keys, dtype=dtype, scale=scale)
        _compare(
            assert_same_bits, cuda, scores, None, _random(2, 3, keys, seed=keys + 1, dtype=dtype, scale=1.0), f"T={keys} scale={scale}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", LENGTHS)
def test_bytes_equal_with_a_padding_mask(cuda: torch.device, assert_same_bits: Same, keys: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(keys)
    mask = torch.rand(4, keys, generator=generator) < 0.7
    mask[1] &= torch.arange(keys) >= keys // 3
    mask[2] = False
    mask[3] = True
    scores = _random(4, 3, keys, seed=keys, dtype=dtype)
    _compare(assert_same_bits, cuda, scores, mask, _random(4, 3, keys, seed=keys + 1, dtype=dtype, scale=1.0), f"T={keys}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 255, 513, 1025, 4609, 30001])
def test_masked_nan_and_infinite_scores(cuda: torch.device, assert_same_bits: Same, keys: int, dtype: torch.dtype) -> None:
    scores = _random(8, keys, seed=keys, dtype=dtype)
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -float("inf")
    scores[0] = -float("inf")  # a dead row
    scores[1, : keys // 2] = -float("inf")  # dead tiles first
    scores[2, keys // 3 :] = -float("inf")
    scores[3, keys // 2] = float("nan")
    scores[4, keys // 2] = float("inf")
    negative_nan = torch.tensor([-4194304 if dtype == torch.float32 else -1], dtype=torch.int32 if dtype == torch.float32 else torch.int16)
    scores[5, keys - 1] = negative_nan.view(dtype)[0]
    scores[6] = -0.0
    dprobs = _random(8, keys, seed=keys + 1, dtype=dtype, scale=1.0)
    dprobs[scores == -float("inf")] = float("nan")  # nothing of dP at a masked key is read
    dprobs[7, keys // 2] = float("inf")
    _compare(assert_same_bits, cuda, scores, None, dprobs, f"T={keys}")


@pytest.mark.parametrize("keys", [300, 4608])
def test_subnormal_probabilities_are_kept(cuda: torch.device, assert_same_bits: Same, keys: int) -> None:
    scores = -torch.linspace(80.0, 110.0, 2 * keys).reshape(2, keys)
    scores[:, keys // 2] = 0.0
    _compare(assert_same_bits, cuda, scores, None, _random(2, keys, seed=2, dtype=torch.float32) * 1e-3, f"T={keys}")
    probs = attn_cuda.joint_attn_softmax(scores.to(cuda)).cpu()
    subnormal = (probs > 0) & (probs < torch.finfo(torch.float32).tiny)
    assert subnormal.any(), "the case must hold subnormals to show that they are kept"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(cuda: torch.device, assert_same_bits: Same, dtype: torch.dtype) -> None:
    base = _random(3, 4, 5, 1201, seed=3, dtype=dtype)
    views = {
        "permuted": base.permute(1, 2, 0, 3),
        "sliced": base[:, 1:3, ::2, 7:1101],
        "odd start": base[..., 1:],
        "even row stride, odd length": base[..., :1200][..., 1:1198],
        "keys not contiguous": base.transpose(1, 3),
        "expanded": base[:1].expand(3, 4, 5, 1201),
        "six axes": base[..., :1200].reshape(3, 2, 2, 5, 2, 600).permute(3, 1, 4, 0, 2, 5),
        "one axis": base[1, 2, 3],
    }
    for what, view in views.items():
        _compare(assert_same_bits, cuda, view, None, _random(*view.shape, seed=4, dtype=dtype, scale=1.0), what)


def test_a_strided_cotangent(cuda: torch.device, assert_same_bits: Same) -> None:
    scores = _random(4, 6, 700, seed=5, dtype=torch.bfloat16)
    for dprobs in (
        _random(6, 4, 700, seed=6, dtype=torch.bfloat16).transpose(0, 1),
        torch.ones((), dtype=torch.bfloat16).expand(4, 6, 700),
    ):
        wanted_in = scores.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(reference.joint_attn_softmax(wanted_in), wanted_in, dprobs)
        found_in = scores.to(cuda).requires_grad_()
        (found,) = torch.autograd.grad(attn_cuda.joint_attn_softmax(found_in), found_in, dprobs.to(cuda))
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [100, 4608, 30001])
def test_a_float32_result_of_half_precision_scores(cuda: torch.device, assert_same_bits: Same, keys: int, dtype: torch.dtype) -> None:
    scores = _random(3, keys, seed=7, dtype=dtype)
    wanted_in = scores.clone().requires_grad_()
    wanted = reference.FUNCTIONS["joint_attn_softmax.forward_fp32"](wanted_in)
    found_in = scores.to(cuda).requires_grad_()
    found = BACKEND.operators()["joint_attn_softmax.forward_fp32"](found_in)
    assert_same_bits(found, wanted)
    dprobs = _random(3, keys, seed=8, dtype=torch.float32)
    assert_same_bits(torch.autograd.grad(found, found_in, dprobs.to(cuda))[0], torch.autograd.grad(wanted, wanted_in, dprobs)[0])


def test_one_wrong_bit_is_seen(cuda: torch.device, assert_same_bits: Same) -> None:
    scores = _random(2, 600, seed=9, dtype=torch.float32)
    wanted = reference.joint_attn_softmax(scores)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(torch.softmax(scores.to(cuda), -1), wanted)
    found = attn_cuda.joint_attn_softmax(scores.to(cuda))
    found[1, 599] = torch.nextafter(found[1, 599], found.new_tensor(1.0))
    with pytest.raises(AssertionError, match="1 of 1200 elements differ"):
        assert_same_bits(found, wanted)


def test_many_rows_and_no_rows(cuda: torch.device, assert_same_bits: Same) -> None:
    scores = _random(70001, 5, seed=10, dtype=torch.float32)
    assert_same_bits(attn_cuda.joint_attn_softmax(scores.to(cuda)), reference.joint_attn_softmax(scores))
    wide = _random(66000, 1, seed=11, dtype=torch.bfloat16).expand(66000, 1030)
    found = attn_cuda.joint_attn_softmax(wide.to(cuda))
    assert_same_bits(found, reference.joint_attn_softmax(wide[:1]).expand(66000, 1030))
    assert attn_cuda.joint_attn_softmax(torch.empty(0, 7, device=cuda)).shape == (0, 7)


def test_offsets_beyond_32_bits(cuda: torch.device, assert_same_bits: Same) -> None:
    rows, keys = 3, 1031
    stride = 2**31 // 2 + 12345  # the last row starts 2 * stride > 2^31 elements in
    storage = torch.empty(stride * (rows - 1) + keys, dtype=torch.float16, device=cuda)
    scores = _random(rows, keys, seed=12, dtype=torch.float16)
    view = storage.as_strided((rows, keys), (stride, 1))
    view.copy_(scores)
    view.requires_grad_()
    wanted_in = scores.clone().requires_grad_()
    wanted = reference.joint_attn_softmax(wanted_in)
    found = attn_cuda.joint_attn_softmax(view)
    assert_same_bits(found, wanted)
    dprobs = _random(rows, keys, seed=13, dtype=torch.float16)
    assert_same_bits(torch.autograd.grad(found, view, dprobs.to(cuda))[0], torch.autograd.grad(wanted, wanted_in, dprobs)[0])


def test_results_beyond_two_to_the_31_elements(cuda: torch.device, assert_same_bits: Same) -> None:
    rows, keys = 2**31 // 4096 + 5, 4096
    block = _random(64, keys, seed=14, dtype=torch.float16)
    scores = block.to(cuda).repeat(rows // 64 + 1, 1)[:rows]
    wanted = reference.joint_attn_softmax(block)
    found = attn_cuda.joint_attn_softmax(scores)
    assert_same_bits(found[:64], wanted)
    last = (rows - 64) // 64 * 64
    assert_same_bits(found[last : last + 64], wanted)
    assert torch.equal(found.view(torch.int16), wanted.to(cuda).repeat(rows // 64 + 1, 1)[:rows].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", LENGTHS_V2)
def test_bytes_of_ordered_v2(cuda: torch.device, assert_same_bits: Same, keys: int, dtype: torch.dtype) -> None:
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(keys)) < 0.7
    dprobs = _random(2, 3, keys, seed=keys + 1, dtype=dtype, scale=1.0)
    for scale in (4.0, 60.0):
        scores = _random(2, 3, keys, seed=keys, dtype=dtype, scale=scale)
        for kept in (None, mask):
            _compare(assert_same_bits, cuda, scores, kept, dprobs, f"T={keys} scale={scale}", "ordered-v2")
        scores[0, 0, : keys // 2], scores[0, 1], scores[1, 0, keys // 3], scores[1, 1, -1] = -INF, -INF, float("nan"), INF
        scores[1, 2, ::3], scores[1, 0, 0] = -INF, -INF
        _compare(assert_same_bits, cuda, scores, None, dprobs, f"T={keys} with specials", "ordered-v2")


def test_strides_of_ordered_v2(cuda: torch.device, assert_same_bits: Same) -> None:
    base = _random(3, 2, 4, 2601, seed=5, dtype=torch.bfloat16)
    for view in (base[..., 1:], base[..., :2600], base.transpose(1, 2), base[:, :1].expand(3, 2, 4, 2601), base[..., ::2]):
        _compare(assert_same_bits, cuda, view, None, _random(*view.shape, seed=6, dtype=torch.bfloat16), f"{view.stride()}", "ordered-v2")
