"""attention forward of few rows, whose keys are read as they are: the bytes of the PyTorch definition."""

import dataclasses

import attention_calls as calls
import pytest
import torch
from attn_reference._pytorch_kernels import KERNELS
from attn_triton import _pairs_launch
from attn_triton._configuration import Config
from attn_triton._problem import attention_problem
from test_attention_bytes import assert_equal, forward

DENSE = [name for name, call in calls.CALLS.items() if not call().packed]
INTERPRETED = dataclasses.replace(_pairs_launch.CONFIGS["cpu"], products=Config(rows=16, num_warps=1, chunk=256), elements=Config(16, 1))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """The interpreter has few rows as well, and all of these calls have."""
    monkeypatch.setitem(_pairs_launch.FEW_CONFIGS, "cpu", {4: INTERPRETED, 16: INTERPRETED})
    monkeypatch.setattr(_pairs_launch, "FEW_ROWS", 1 << 20)


@pytest.mark.parametrize("kind", DENSE)
def test_the_definition(device, kind):
    call = calls.CALLS[kind]()
    assert _pairs_launch.pairs_of(calls.on(device, call), attention_problem(calls.on(device, call))).few
    assert_equal(forward(calls.on(device, call)), forward(call, KERNELS))


def test_few_rows_and_many_keys(device):
    """Three queries of each head, an odd number of keys that begin inside a tile, some of them infinite."""
    call = calls.inputs(
        heads=4,
        kv_heads=2,
        queries=3,
        keys=1111,
        head_dim=16,
        causal=True,
        k_start=torch.tensor([77]),
        sinks=calls.normal(4, seed=9),
    )
    call.v[:, :, -1] = calls.INF
    assert_equal(forward(calls.on(device, call)), forward(call, KERNELS))


def test_another_order_of_keys_moves_bits(device):
    """Control: the comparisons above see the order of the chains."""
    call = calls.on(device, calls.inputs(keys=300))
    reverse = dataclasses.replace(call, k=call.k.flip(2), v=call.v.flip(2))
    with pytest.raises(AssertionError):
        assert_equal(forward(call), forward(reverse))
