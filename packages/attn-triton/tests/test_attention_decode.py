"""attention forward of few rows, whose keys are read as they are: the bytes of the PyTorch definition."""

import dataclasses

import attention_calls as calls
import pytest
import torch
from attn_reference._pytorch_kernels import KERNELS
from attn_triton import _pairs_launch
from attn_triton._configuration import Config
from attn_triton._problem import attention_problem
from attn_triton._remembered_launch import Launches
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


@pytest.fixture
def again(monkeypatch):
    """Calls whose launches were those of an earlier one."""
    found, original = [], Launches.again
    monkeypatch.setattr(Launches, "again", lambda self, tensors: (found.append(self), original(self, tensors))[1])
    return found


@pytest.mark.parametrize("kind", ("one pair", "bfloat16", "groups", "a sink is none", "lengths and starts", "padding mask over NaN"))
def test_launches_of_a_kind_are_remembered(device, again, kind):
    """Calls with other values and at other addresses, on a GPU; a padding mask takes more than launches."""
    call = calls.CALLS[kind]()
    held = [calls.on(device, call)]
    forward(held[0])
    again.clear()  # another test may have run a call of this kind
    for factor in (-1.0, 2.0):
        other = dataclasses.replace(call, q=call.q * factor, v=call.v * factor)
        held.append(calls.on(device, other))
        assert_equal(forward(held[-1]), forward(other, KERNELS))
    assert len(again) == (2 if device == "cuda" and "mask" not in kind else 0)


def test_what_launches_depend_on_makes_another_kind(device, again):
    """Each call differs in one thing from the first, whose launches must not serve it."""
    call = calls.inputs(heads=4, kv_heads=2, keys=44, scale=0.0, causal=True, kv_lengths=torch.tensor([40]), dtype=torch.bfloat16)
    longer = torch.empty(call.q.numel() + 1, dtype=call.q.dtype)
    others = {
        "scale": {"scale": -0.0},
        "causal": {"causal": False},
        "window": {"window_left": 3},
        "strides": {"k": call.k.transpose(1, 2).contiguous().transpose(1, 2)},
        "alignment": {"q": longer[1:].view(call.q.shape).copy_(call.q)},
        "one head": {"q": call.q[:, :2]},
        "fewer keys": {"k": call.k[:, :, :41], "v": call.v[:, :, :41]},
        "dtype": {name: getattr(call, name).float() for name in "qkv"},
    }
    forward(calls.on(device, call))
    for name, changes in others.items():
        other = dataclasses.replace(call, **changes)
        on_device = calls.on(device, other)
        if name == "alignment":
            on_device.q = longer.to(device)[1:].view(call.q.shape)
        again.clear()
        assert_equal(forward(on_device), forward(other, KERNELS))
        assert not again, name
    assert_equal(forward(calls.on(device, call), out_dtype=torch.float32), forward(call, KERNELS, torch.float32))
    assert not again
    assert_equal(forward(calls.on(device, call)), forward(call, KERNELS))
    assert len(again) == (device == "cuda")
