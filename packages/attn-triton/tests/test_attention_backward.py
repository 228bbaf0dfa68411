"""Gradients of attention, dense and packed: the bytes of the PyTorch definition."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from attn_triton import _pairs_launch
from attn_triton._attention_backward_launch import attention_backward
from attn_triton._configuration import Config
from backward_calls import GRADIENTS, asked, check, cotangents, dense, moved, normal, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", ((1, 4, 2, 37, 130, 16, 24), (1, 3, 1, 5, 300, 20, 8), (1, 1, 1, 130, 3, 4, 1)), ids=str)
def test_grouped_heads_and_head_dims(device, sizes, dtype):
    check(device, dense(*sizes, dtype=dtype, causal=True, sinks=normal(sizes[1])))


def test_wide_heads(device):
    check(device, dense(1, 1, 1, 3, 5, 256, 130, dtype=torch.bfloat16))
    check(device, dense(1, 1, 1, 3, 5, 7, 256))


@pytest.mark.parametrize(
    "options",
    (
        {"window_left": 9, "causal": True},
        {"window_left": 0, "window_right": 0},
        {"window_right": 40},
        {"q_start": torch.tensor([0, 250])},
        {"k_start": torch.tensor([255, 1000]), "causal": True},
        {"q_start": torch.tensor([2**31 - 80, -(2**31)]), "k_start": torch.tensor([2**31 - 700, 0]), "causal": True},
        {"kv_lengths": torch.tensor([0, 261]), "causal": True},
        {"scale": 0.0},
        {"scale": -1.7},
    ),
    ids=" ".join,
)
def test_positions(device, options):
    check(device, dense(2, 1, 1, 40, 280, 8, 8, **options))


def test_no_upstream_of_lse(device):
    check(device, dense(1, 2, 1, 40, 280, 8, 8, causal=True), dlse=False)


def test_padding_with_poison(device):
    """Dropped keys and queries and keys past the used length hold NaN and infinities; nothing of them shows."""
    inputs = dense(3, 2, 1, 9, 300, 8, 8, kv_lengths=torch.tensor([300, 280, 70]), sinks=torch.tensor([0.5, -INF]))
    key_mask = torch.rand(3, 300, generator=torch.Generator().manual_seed(1)) < 0.6
    key_mask[1, 20:] = False
    query_mask = torch.arange(9).expand(3, 9) % 4 != 1
    dout, _ = cotangents(inputs)
    inputs.k[:, 0][~key_mask], inputs.v[:, 0][~key_mask] = float("nan"), INF
    inputs.k[2, :, 70:], inputs.v[2, :, 70:] = INF, float("nan")
    inputs.q[:, :, 1::4], dout[:, :, 1::4] = float("nan"), INF
    padded = dataclasses.replace(inputs, key_mask=key_mask, query_mask=query_mask)
    found = check(device, padded, dout=dout)
    assert all(np.isfinite(gradient).all() for gradient in found.values())
    assert not found["k"][:, 0][~key_mask.numpy()].view(np.int32).any()
    assert not found["q"][:, :, 1::4].view(np.int32).any()


def test_infinities_in_masked_pairs_reach_no_other_row(device, monkeypatch):
    """A key seen by late queries only holds NaN, as does a row of dout: rows that do not see it stay finite, and the rest is NaN.

    Control: without the launch that sums spoiled blocks again they do not.
    """
    inputs = dense(1, 2, 1, 70, 70, 8, 8, causal=True)
    dout, dlse = cotangents(inputs)
    inputs.k[:, :, 50], dout[:, :, 3], inputs.q[:, :, 20, 0] = float("nan"), INF, INF
    found = check(device, inputs, dout=dout)
    assert np.isfinite(np.delete(found["q"][0, :, :50], (3, 20), axis=1)).all()
    assert np.isnan(found["q"][:, :, 50:]).all()
    assert np.isfinite(found["v"][:, :, 51:]).sum() == 0
    monkeypatch.setattr(_pairs_launch, "SELECTIONS", (False,))
    spoiled = run(device, inputs, dout, dlse)
    assert np.isnan(spoiled["q"]).sum() > np.isnan(found["q"]).sum()


@pytest.mark.parametrize(
    "axes", list(itertools.product((False, True), repeat=4)), ids=lambda axes: "".join("BHST"[i] for i in range(4) if axes[i])
)
def test_bias_broadcasts(device, axes):
    """dbias is summed in the order (batch, head, query, key), under compaction that differs by item."""
    sizes = (2, 2, 5, 70)
    bias = normal(*(size if kept else 1 for size, kept in zip(sizes, axes, strict=True)))
    if axes[3]:
        bias[..., 9] = -INF
    mask = torch.arange(70).expand(2, 70) % torch.tensor([[3], [5]]) != 0
    check(
        device,
        dense(2, 2, 1, 5, 70, 8, 8, causal=True, bias=bias, key_mask=mask, k_start=torch.tensor([3, 250])),
        needs=frozenset({"bias"}),
    )


def packed(dtype=torch.float32, **options):
    q, k, v = normal(60, 2, 8, dtype=dtype), normal(330, 1, 8, seed=1, dtype=dtype), normal(330, 1, 12, seed=2, dtype=dtype)
    offsets = {"cu_seqlens_q": torch.tensor([2, 2, 7, 45, 52]), "cu_seqlens_k": torch.tensor([0, 5, 5, 290, 325])}
    return AttentionInputs(q=q, k=k, v=v, scale=0.3, **offsets, **options)


@pytest.mark.parametrize("used", (False, True), ids=("whole", "used"))
def test_packed_segments(device, used):
    """Empty segments, segments without keys, rows before, after and between the used ones."""
    lengths = {"seqlens_q": torch.tensor([0, 5, 30, 7]), "seqlens_k": torch.tensor([5, 0, 270, 34])} if used else {}
    found = check(device, packed(torch.bfloat16 if used else torch.float32, causal=True, window_left=200, sinks=normal(2), **lengths))
    assert not found["q"][:2].view(np.uint8).any()
    assert not found["k"][325:].view(np.uint8).any()


def test_subsets_of_gradients(device):
    inputs = dense(1, 2, 1, 5, 9, 8, 8, sinks=normal(2), bias=normal(1, 2, 5, 9))
    whole = check(device, inputs)
    dout, dlse = cotangents(inputs)
    for names in ((), *itertools.combinations(GRADIENTS, 1), ("q", "v"), ("k", "bias"), ("v", "sinks"), ("q", "k", "sinks")):
        found = run(device, inputs, dout, dlse, frozenset(names))
        assert set(found) == set(names)
        for name in names:
            assert found[name].tobytes() == whole[name].tobytes(), (names, name)


@pytest.fixture
def batch():
    mask = torch.rand(3, 150, generator=torch.Generator().manual_seed(1)) < 0.8
    return dense(3, 2, 1, 40, 150, 8, 8, causal=True, key_mask=mask, sinks=normal(2))


def test_blocks_move_no_bit(device, batch, monkeypatch):
    """Smaller blocks, and one block of rows in memory at a time: the chains of dk and dv wait in memory between them."""
    dout, dlse = cotangents(batch)
    whole = run(device, batch, dout, dlse)
    small = dataclasses.replace(
        _pairs_launch.CONFIGS[device],
        products=Config(rows=32, num_warps=4, keys=64, chunk=16),
        row_sums=Config(rows=32, num_warps=4, keys=32),
        key_sums=Config(rows=16, num_warps=4, keys=64),
        key_select=Config(rows=16, num_warps=4, keys=64),
        elements=Config(rows=8, num_warps=4),
    )
    monkeypatch.setitem(_pairs_launch.CONFIGS, device, small)
    monkeypatch.setattr(_pairs_launch, "WORKSPACE", 1)
    for name, gradient in run(device, batch, dout, dlse).items():
        assert gradient.tobytes() == whole[name].tobytes(), name


def test_batch_neighbours_and_chunks_of_queries(device, batch):
    """An item alone, and its queries in two calls, give the same dq; the item alone the same dk and dv.

    Control: dk of the two calls added together, which is another order of the same sum, has other bits.
    """
    dout, dlse = cotangents(batch)
    whole = run(device, batch, dout, dlse)

    def part(item, queries):
        one = slice(item, item + 1)
        tensors = {name: getattr(batch, name)[one] for name in ("k", "v", "key_mask")}
        start = torch.tensor([110 + queries.start])
        alone = dataclasses.replace(batch, q=batch.q[one, :, queries], q_start=start, **tensors)
        return run(device, alone, dout[one, :, queries], dlse[one, :, queries], frozenset("qkv"))

    for item in (0, 2):
        alone = part(item, slice(0, 40))
        for name in ("q", "k", "v"):
            assert alone[name].tobytes() == whole[name][item : item + 1].tobytes(), (name, item)
        early, late = part(item, slice(0, 17)), part(item, slice(17, 40))
        assert np.concatenate((early["q"], late["q"]), axis=2).tobytes() == alone["q"].tobytes()
        assert (early["k"] + late["k"]).tobytes() != alone["k"].tobytes()


def test_strides(device):
    inputs = dense(2, 2, 1, 9, 70, 8, 8, bias=normal(2, 2, 70, 9).transpose(-1, -2))
    turned = {
        "q": inputs.q.transpose(-1, -2).contiguous().transpose(-1, -2),
        "k": torch.stack((inputs.k, inputs.k), -1)[..., 1],
        "v": inputs.v[:1, :, :1].expand(2, 1, 70, 8),
    }
    dout = normal(1, 1, 1, 1).expand(2, 2, 9, 8)
    check(device, dataclasses.replace(inputs, **turned), dout=dout)


@pytest.mark.parametrize("sizes", ((0, 2, 1, 5, 9, 8, 8), (2, 2, 1, 0, 9, 8, 8), (2, 2, 1, 5, 0, 8, 8), (2, 2, 1, 5, 9, 8, 0)), ids=str)
def test_empty(device, sizes):
    check(device, dense(*sizes, causal=True, sinks=normal(2), bias=normal(1, 2, 1, 1)))


def test_subnormals_and_overflow(device):
    inputs = dense(1, 1, 1, 5, 9, 8, 8)
    dout = normal(1, 1, 5, 8) * 1e-39
    assert np.abs(check(device, inputs, dout=dout, dlse=False)["v"]).min() < np.finfo(np.float32).tiny
    half = dense(1, 1, 1, 40, 2, 8, 8, dtype=torch.float16, scale=0.0)
    assert np.isinf(check(device, half, dout=torch.full((1, 1, 40, 8), 6e4, dtype=torch.float16))["v"]).all()


def test_refusals(device):
    inputs = moved(dense(1, 2, 1, 5, 9, 8, 8), device)
    row = torch.zeros(1, 2, 5, device=device)
    with pytest.raises(ValueError, match=r"dout must have shape \[1, 2, 5, 8\]; got \[1, 2, 5, 7\]"):
        attention_backward(inputs, torch.zeros(1, 2, 5, 7, device=device), None, row, row, asked(inputs))
    with pytest.raises(ValueError, match=r"row_max must have shape \[1, 2, 5\]; got \[2, 5\]"):
        attention_backward(inputs, torch.zeros(1, 2, 5, 8, device=device), None, row[0], row, asked(inputs))
    wide = moved(dense(1, 1, 1, 2, 2, 257, 8), device)
    with pytest.raises(UnsupportedProblem, match="head_dim=257"):
        attention_backward(wide, torch.zeros(1, 1, 2, 8), None, row, row, frozenset({"q"}))
