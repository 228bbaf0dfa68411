"""What may not move a bit: rows of a program, batch, place in the batch; and the offsets of large tensors."""

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import to_numpy
from attn_triton import _key_index, _softmax_launch, joint_attn_softmax
from attn_triton import _softmax_kernel as kernel
from attn_triton._configuration import TileConfig


def run(scores, upstream, mask=None):
    scores = scores.detach().requires_grad_()
    probs = joint_attn_softmax(scores, key_padding_mask=mask)
    (gradient,) = torch.autograd.grad(probs, scores, upstream)
    return to_numpy(probs), to_numpy(gradient)


@pytest.fixture
def data(device):
    generator = torch.Generator().manual_seed(3)
    scores, upstream = (torch.randn(4, 3, 600, generator=generator, device="cpu").to(device) for _ in range(2))
    return scores * 6, upstream, (torch.rand(4, 600, generator=generator) < 0.7).to(device)


@pytest.mark.parametrize("rows", (1, 2, 8))
def test_rows_of_a_program(device, data, monkeypatch, rows):
    expected = run(*data)
    monkeypatch.setitem(_softmax_launch.CONFIGS, device, dataclasses.replace(_softmax_launch.CONFIGS[device], rows=rows))
    for name, a, b in zip(("probs", "dscores"), run(*data), expected, strict=True):
        assert_bytes(a, b, name)


@pytest.mark.parametrize(
    ("few", "keys", "vector", "masked", "expected"),
    [
        (False, 2560, 8, False, (1, 2, 512)),
        (False, 2561, 1, False, (2, 1, 1024)),
        (False, 4608, 4, False, (2, 2, 512)),
        (False, 7401, 1, False, (4, 1, 1024)),
        (True, 4608, 4, False, (8, 0, 1024)),
        (True, 40, 1, False, (1, 0, 64)),
        (False, 4608, 1, True, (1, 0, 0)),
        (False, 40000, 4, False, (1, 0, 0)),
        (True, 40000, 4, False, (8, 0, 0)),
    ],
)
def test_warps_of_a_row(few, keys, vector, masked, expected):
    """GROUP, FULL and TAIL: the fewest warps that keep the row, of few rows the most that have work; 0 is kept where none can."""
    config = TileConfig(rows=1, groups=(1, 2, 4, 8), kept=2560)
    constants = config.constants(few, keys, vector, masked)
    assert tuple(constants[name] for name in ("GROUP", "FULL", "TAIL")) == expected


def test_batch_and_neighbours(data):
    scores, upstream, mask = data
    expected = run(*data)
    for item in range(4):
        alone = run(*(tensor[item : item + 1] for tensor in data))
        for name, a, b in zip(("probs", "dscores"), alone, expected, strict=True):
            assert_bytes(a[0], b[item], f"{name} of item {item} alone")
    scores[2], mask[3] = float("nan"), False
    order = torch.tensor([1, 3, 2, 0])
    for name, a, b in zip(("probs", "dscores"), run(scores[order], upstream[order], mask[order]), expected, strict=True):
        assert_bytes(a[0], b[1], f"{name} in another place")
        assert_bytes(a[3], b[0], f"{name} in another place")


def test_another_order_of_the_sum_moves_bits(device, data):
    """Control: the comparisons above see the order. Reversing the keys keeps every exp and changes only the sums."""
    scores, upstream, _ = data
    expected, reverse = run(scores, upstream)[0], run(scores.flip(-1), upstream.flip(-1))[0][..., ::-1]
    assert (expected.view(np.int32) != reverse.view(np.int32)).any()


def test_key_index():
    mask = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
    found = _key_index.key_index(mask)
    assert found.counts.tolist() == [3, 0, 5]
    assert found.index.tolist() == [[0, 2, 3, 1, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert found.keep.tolist() == mask.int().tolist()


@triton.jit
def _places(out, tiles, rows, keys, rows_per_batch, ROWS: tl.constexpr):
    _row, _batch, stored, row_start, mask_start = kernel._offsets(rows, keys, rows_per_batch, ROWS)
    tl.store(out + tl.arange(0, ROWS), row_start)
    tl.store(out + ROWS + tl.arange(0, ROWS), mask_start)
    tl.store(tiles + tl.arange(0, ROWS), kernel._tiles(stored, 256))


def test_offsets_do_not_overflow(device):
    keys = 2**31 - 1
    out, tiles = torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    _places[(1,)](out, tiles, 3, keys, 2, ROWS=4)
    assert out.tolist()[:3] == [0, keys, 2 * keys]
    assert out.tolist()[4:7] == [0, 0, keys]
    assert tiles.tolist() == [2**23] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
def test_more_than_two_to_the_31_elements():
    rows, keys = 70001, 31001
    scores = torch.randn(1, rows, keys, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(1, keys, device="cuda") < 0.9
    probs = joint_attn_softmax(scores, key_padding_mask=mask)
    last = slice(rows - 3, rows)
    assert_bytes(to_numpy(probs[:, last]), to_numpy(joint_attn_softmax(scores[:, last], key_padding_mask=mask)), "last rows")
