"""Memory of attention: numbers of pairs in a workspace of a stated size, whatever the problem, and float32 copies of the operands."""

import attention_calls as calls
import attn_triton
import pytest
import torch
from attn_spec.torch import AttentionInputs
from attn_triton import _pairs_launch
from attn_triton._pairs_launch import WORKSPACE, pairs_of
from attn_triton._problem import attention_problem

SHAPES = {"8k x 8k": (16, 16, 8192), "32k x 32k": (16, 16, 32768), "groups": (64, 8, 16384), "one head": (1, 1, 65536)}
SLACK = 48 << 20
"""Bytes of what is none of the pairs and copies: row states, states of tiles (three numbers for 256 pairs), padding of blocks and tiles."""


def expanded(heads, kv_heads, length, **options):
    """Inputs of any length in the memory of one number."""
    one = torch.zeros(1)
    q, k = (one.expand(1, count, length, 128) for count in (heads, kv_heads))
    return AttentionInputs(q=q, k=k, v=k, scale=1.0, **options)


@pytest.mark.parametrize("arrays", (1, 2), ids=("forward", "backward"))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pairs_in_memory_fit_the_workspace(monkeypatch, shape, arrays):
    """With the blocks of NVIDIA. Control: all rows of the problem at once would not fit."""
    monkeypatch.setitem(_pairs_launch.CONFIGS, "cpu", _pairs_launch.CONFIGS["cuda"])
    call = expanded(*SHAPES[shape], causal=True)
    pairs = pairs_of(call, attention_problem(call), backward=arrays == 2)
    number = 4 * arrays * pairs.tiles * 256
    assert WORKSPACE // 2 < pairs.lines(arrays) * number <= WORKSPACE
    spaces = list(pairs.workspaces(arrays))
    assert sum(space.count for space in spaces) == pairs.grid.programs
    assert sum(space.count for space in spaces) * pairs.block * number > WORKSPACE


def copies(call, *, backward):
    """Bytes of the float32 copies that docs/adr/0005-bounded-workspace.md lists."""
    q, k, v = (tensor.numel() for tensor in (call.q, call.k, call.v))
    dout = q // call.q.shape[-1] * call.v.shape[-1]
    return 4 * (2 * q + 2 * dout + 3 * k + 2 * v) if backward else 4 * (q + k + v)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("heads", ((16, 16), (32, 4)), ids=("heads", "groups"))
def test_a_call_stays_within_its_bound(device, dtype, heads):
    """On a GPU: forward and backward. Control: the scores alone would take more."""
    if device == "cpu":
        pytest.skip("the interpreter uses no device memory")
    call = calls.on(device, calls.inputs(heads=heads[0], kv_heads=heads[1], queries=4096, keys=6000, head_dim=128, dtype=dtype))
    tensors = [tensor.requires_grad_() for tensor in (call.q, call.k, call.v)]
    pairs = 4 * heads[0] * 4096 * 6000

    def peak(run):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run()
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        return results, used - sum(result.nbytes for result in results)

    out, used = peak(lambda: [attn_triton.attention(*tensors, causal=False, contract="ordered-v1")])
    bound = WORKSPACE + copies(call, backward=False) + SLACK
    assert used <= bound < pairs, (used, bound)
    dout = torch.ones_like(out[0])
    gradients, used = peak(lambda: torch.autograd.grad(out, tensors, [dout]))
    bound = WORKSPACE + copies(call, backward=True) + SLACK
    assert used <= bound < pairs, (used, bound)
    assert all(gradient.isfinite().all() for gradient in gradients)
