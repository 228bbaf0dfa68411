"""joint_attn_softmax forward and backward: the bytes of the PyTorch definition."""

import numpy as np
import pytest
import torch
from attn_reference import pytorch
from attn_spec._arrays import to_float32
from attn_spec.testing.asserts import assert_bytes
from attn_spec.testing.strategies import softmax_calls
from attn_spec.torch import from_numpy, to_numpy
from attn_triton import _launch
from attn_triton.backend import BACKEND
from hypothesis import given, settings
from softmax_calls import both, check, normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS = (1, 2, 31, 255, 256, 257, 513, 777, 1024)
INF = float("inf")


def test_outputs_start_as_nan():
    assert torch.empty(7).isnan().all()
    assert torch.empty_like(torch.ones(7)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", KEYS)
def test_lengths(device, keys, dtype):
    check(device, *normal(2, 3, keys, seed=keys, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", (31, 256, 769))
def test_padding(device, keys, dtype):
    scores, upstream = normal(5, 2, keys, seed=keys, dtype=dtype)
    mask = torch.rand(5, keys, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1] = False
    mask[2, keys // 8 : keys // 2] = False
    mask[2, : keys // 8] = True
    mask[3] = True
    mask[4, : keys - 1] = False
    dropped = ~mask[:, None, :].expand(scores.shape)
    scores[dropped] = float("nan")
    upstream[dropped] = INF
    probs, gradient = check(device, scores, upstream, mask)
    assert_bytes(probs[1], np.zeros_like(probs[1]), "all keys dropped")
    assert_bytes(gradient[1], np.zeros_like(gradient[1]), "all keys dropped")


def test_padding_moves_no_bit(device):
    """73 text and 257 image keys, alone and with 439 padded text slots between them. The control: -inf in place does move bits."""
    scores, upstream = normal(1, 8, 330, scale=8.0)
    position = torch.cat((torch.arange(73), torch.arange(257) + 512))
    mask = torch.zeros(1, 769, dtype=torch.bool)
    mask[:, position] = True
    wide = [torch.full((1, 8, 769), value) for value in (-INF, 1.0)]
    for padded, compact in zip(wide, (scores, upstream), strict=True):
        padded[..., position] = compact
    alone = check(device, scores, upstream)
    padded = check(device, *wide, mask)
    for name, a, b in zip(("probs", "dscores"), alone, padded, strict=True):
        assert_bytes(b[..., position.numpy()], a, name)
    in_place = check(device, *wide)
    assert any((a.view(np.int32) != b[..., position.numpy()].view(np.int32)).any() for a, b in zip(alone, in_place, strict=True))


@pytest.mark.parametrize("keys", (5, 300, 800))
def test_infinities_and_nan(device, keys):
    scores, upstream = normal(1, 13, keys, seed=keys)
    rows = scores[0]
    rows[0, : keys // 2] = -INF
    rows[1, keys // 2 :] = -INF
    rows[2] = -INF
    rows[3, : (keys - 1) // 256 * 256] = -INF
    rows[4, ::3] = -INF
    rows[5, keys // 2] = float("nan")
    rows[6, -1] = INF
    rows[7, 0], rows[7, -1] = INF, float("nan")
    rows[8, : keys - 1], rows[8, -1] = -INF, float("nan")
    rows[9] = -1e30
    rows[10, ::2] = 3e38
    rows[11, ::2], rows[11, 1::2] = -3e38, -INF
    rows[12, :256], rows[12, 3] = -INF, float("nan")
    upstream[scores == -INF] = float("nan")
    upstream[0, 10, 1] = INF
    probs, gradient = check(device, scores, upstream)
    masked = (scores == -INF).numpy()
    for result in (probs, gradient):
        assert not result[masked].view(np.int32).any()
    spoiled = [5, 6, 7, 8, 12]
    assert np.isnan(probs[0, spoiled][~masked[0, spoiled]]).all()
    assert not np.isnan(probs[0, [0, 1, 2, 3, 4, 9, 10, 11]]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_subnormals(device, dtype):
    scores = torch.tensor([[0.0, -0.0, -87.0, -88.5, -95.0, -103.0, -103.9, -104.0, -104.1, -200.0] * 30], dtype=dtype)
    upstream = torch.tensor([[-0.0, 1e-40, -1e-42, 1e38, -3e38, 1.0, 6e-8, -6e-8, 0.0, 2.0] * 30]).to(dtype)
    upstream[~upstream.isfinite()] = 6e4
    probs, _ = check(device, scores, upstream)
    assert not np.signbit(to_float32(probs)).any()
    if dtype == torch.float32:
        tiny = np.abs(probs[probs != 0]).min()
        assert tiny < np.finfo(np.float32).tiny


def test_a_negative_zero_upstream_gives_positive_zeros(device):
    scores, _ = normal(1, 300)
    _, gradient = check(device, scores, torch.full_like(scores, -0.0))
    assert not gradient.view(np.int32).any()


def test_half_precision_overflows_to_infinity(device):
    scores = torch.zeros(1, 4, dtype=torch.float16)
    _, gradient = check(device, scores, torch.tensor([[6e4, -6e4, 6e4, -6e4]], dtype=torch.float16))
    assert np.isfinite(gradient).all()
    scores = torch.zeros(1, 2, dtype=torch.float16)
    kernels = _launch.TritonKernels()
    _, row_max, row_sum = kernels.softmax_forward(scores.to(device), None, torch.float16)
    gradient = kernels.softmax_backward(torch.tensor([[1e9, -1e9]], device=device), scores.to(device), None, row_max, row_sum)
    assert torch.isinf(gradient).all()


def test_the_caller_may_flush_subnormals(device):
    scores, upstream = torch.tensor([[0.0, -100.0]]), torch.tensor([[1.0, 1e-42]])
    expected = both(scores.to(device), upstream.to(device))
    torch.set_flush_denormal(True)
    try:
        found = both(scores.to(device), upstream.to(device))
    finally:
        torch.set_flush_denormal(False)
    for name, a, b in zip(("probs", "dscores"), found, expected, strict=True):
        assert_bytes(a, b, name)


@pytest.mark.parametrize("shape", ((300,), (4, 300), (2, 3, 2, 300), (0, 300), (2, 0, 300)), ids=str)
def test_shapes(device, shape):
    scores, upstream = normal(*shape)
    check(device, scores, upstream)
    if len(shape) > 1:
        check(device, scores, upstream, torch.arange(300).expand(shape[0], 300) % 3 != 0)


def test_strides(device):
    scores, upstream = normal(3, 260, 2)
    check(device, scores.transpose(1, 2), upstream.transpose(1, 2))
    check(device, scores[:, ::2].transpose(1, 2), upstream[:1, :1, :1].expand(3, 2, 130))
    wide = torch.ones(260, 3, dtype=torch.bool)
    wide[::5] = False
    check(device, scores.transpose(1, 2), upstream.transpose(1, 2), wide.t())


def test_float32_result_of_half_precision_scores(device):
    scores, _ = normal(2, 300, dtype=torch.bfloat16)
    name = "joint_attn_softmax.forward_fp32"
    found = BACKEND.operators()[name](scores.to(device))
    assert found.dtype == torch.float32
    assert_bytes(to_numpy(found), to_numpy(pytorch.FUNCTIONS[name](scores)), "forward_fp32")


@given(softmax_calls())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_random_calls(device, call):
    mask = call.arrays.get("key_padding_mask")
    scores, upstream = from_numpy(call.arrays["scores"]), from_numpy(call.cotangents["probs"])
    check(device, scores, upstream, None if mask is None else from_numpy(mask))
