"""attention forward, dense and packed: the bytes of the PyTorch definition, whatever the configuration and the strides."""

import dataclasses

import attention_calls as calls
import numpy as np
import pytest
import torch
from attn_reference._pytorch_kernels import KERNELS
from attn_spec import UnsupportedProblem
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import AttentionInputs, to_numpy
from attn_triton import _pairs_launch, attention
from attn_triton._configuration import Config
from attn_triton._launch import TritonKernels
from attn_triton._problem import attention_problem

RESULTS = ("out", "lse", "row_max", "row_sum")


def forward(call, kernels=TritonKernels, out_dtype=None):
    found = kernels.attention_forward(call, out_dtype or call.v.dtype)
    # The zero rule is for what is stored for the user; the sign of a zero maximum shows nowhere.
    return {name: to_numpy(tensor + 0.0 if name == "row_max" else tensor) for name, tensor in zip(RESULTS, found, strict=True)}


def assert_equal(found, expected):
    for name in RESULTS:
        assert_bytes(found[name], expected[name], name)


@pytest.mark.parametrize("kind", calls.CALLS)
def test_the_definition(device, kind):
    call = calls.CALLS[kind]()
    assert_equal(forward(calls.on(device, call)), forward(call, KERNELS))


def test_float32_result_of_half_precision(device):
    call = calls.inputs(dtype=torch.bfloat16)
    assert_equal(forward(calls.on(device, call), out_dtype=torch.float32), forward(call, KERNELS, torch.float32))


def test_strides(device):
    call = calls.inputs(batch=2, heads=4, kv_heads=2, keys=40, bias=calls.normal(1, 4, 1, 1, seed=8).expand(2, 4, 5, 40))
    moved = {
        "q": call.q.transpose(1, 3).contiguous().transpose(1, 3),
        "k": call.k.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "v": torch.stack((call.v, call.v), dim=-1)[..., 0],
    }
    assert not any(tensor.is_contiguous() for tensor in moved.values())
    assert_equal(forward(calls.on(device, dataclasses.replace(call, **moved))), forward(call, KERNELS))


@pytest.mark.parametrize("keys", (64, 256))
@pytest.mark.parametrize("rows", (16, 64))
def test_configurations_move_no_bit(device, monkeypatch, rows, keys):
    """Quarters of a tile or whole tiles, blocks of any number of rows, steps of a few columns, one block of rows in memory at a time."""
    call = calls.on(device, calls.inputs(queries=21, keys=300, head_dim=20, causal=True, sinks=calls.normal(2, seed=9)))
    expected = forward(call)
    configs = dataclasses.replace(
        _pairs_launch.CONFIGS[device],
        products=Config(rows=rows, num_warps=4, keys=keys, chunk=16),
        elements=Config(rows=8, num_warps=4),
        row_sums=Config(rows=rows, num_warps=4, keys=32),
        columns=16,
    )
    monkeypatch.setitem(_pairs_launch.CONFIGS, device, configs)
    monkeypatch.setattr(_pairs_launch, "WORKSPACE", 1)
    assert_equal(forward(call), expected)


def test_another_order_of_keys_moves_bits(device):
    """Control: the comparisons above see the order of the sums."""
    call = calls.inputs(keys=300)
    reverse = dataclasses.replace(call, k=call.k.flip(2), v=call.v.flip(2))
    expected, found = forward(calls.on(device, call)), forward(calls.on(device, reverse))
    assert (expected["out"].view(np.int32) != found["out"].view(np.int32)).any()


def test_a_visible_nan_is_seen(device):
    """Control: in the poisoned call, rows that see the NaN are NaN and rows that do not are finite."""
    out = forward(calls.on(device, calls.poisoned_future()))["out"][0, 0]
    assert np.isnan(out[35:]).all()
    assert np.isfinite(out[:20]).all()


def test_more_keys_than_a_grid_axis_has_blocks(device):
    """The numbers of pairs are a grid with 65535 programs along the keys: one key more is refused before anything is allocated."""
    most = 65535 * (_pairs_launch.CONFIGS[device].products.keys // 2)
    call = calls.on(device, calls.inputs(heads=1, queries=100, keys=1))
    keys = {name: getattr(call, name).expand(1, 1, most + 1, 8) for name in ("k", "v")}
    with pytest.raises(ValueError, match=f"attention: at most {most} keys are supported on {device}; got {most + 1}"):
        forward(dataclasses.replace(call, **keys))
    fewer = dataclasses.replace(call, **{name: tensor[:, :, 1:] for name, tensor in keys.items()})
    assert _pairs_launch.pairs_of(fewer, attention_problem(fewer)).tiles == -(-most // 256)


def test_refusals(device):
    q = torch.zeros(1, 1, 2, 300, device=device)
    with pytest.raises(UnsupportedProblem, match=r"head_dim=300 .supported: up to 256."):
        attention(q, q, q)
    with pytest.raises(UnsupportedProblem, match="dropout"):
        attention(q[..., :8], q[..., :8], q[..., :8], dropout_p=0.5, dropout_seed=1)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    with pytest.raises(UnsupportedProblem, match="dropout") as refusal:
        TritonKernels.attention_forward(AttentionInputs(q=q, k=q, v=q, dropout_p=0.5, dropout_seed=seed), torch.float32)
    assert "head_dim=300" in str(refusal.value)


@pytest.mark.parametrize(("name", "start"), (("q_start", 2**40), ("q_start", -(2**31) - 1), ("k_start", -300), ("k_start", 2**31 - 2)))
def test_positions_that_can_be_read_are_checked(name, start):
    with pytest.raises(ValueError, match=f"attention: positions from {name} must be"):
        attention_problem(calls.inputs(**{name: torch.tensor([start])}))
