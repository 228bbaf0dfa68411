"""Attention at sizes that only a GPU reaches in time: the bounded workspace, and rows of a work order that no small problem has."""

from __future__ import annotations

from collections.abc import Callable

import attn_cuda
import pytest
import torch
from torch import Tensor

Same = Callable[..., None]
WORKSPACE = 512 << 20
"""Bytes that the pairs of the rows in work take at most (docs/adr/0005-bounded-workspace.md)."""


def _gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out, lse = attn_cuda.attention(*leaves, causal=False, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("head_dim", (64, 200))
def test_pairs_beyond_the_workspace_are_computed_again(cuda: torch.device, assert_same_bits: Same, head_dim: int) -> None:
    """All heads at once have more pairs in work than the workspace holds, one head has not: the bits agree, and memory stays bounded."""
    heads, queries, keys = 40, 1200, 14000
    generator = torch.Generator(cuda).manual_seed(1)
    q, dout = (torch.randn(1, heads, queries, head_dim, generator=generator, device=cuda).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, heads, keys, head_dim, generator=generator, device=cuda).bfloat16() for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        attn_cuda.attention(q, k, v, causal=False)
    used = torch.cuda.max_memory_allocated() - before
    processors = torch.cuda.get_device_properties(cuda).multi_processor_count
    assert min(processors * 64, heads * queries) * keys * 4 > WORKSPACE // 2, "this device holds all pairs: the test would show nothing"
    assert used <= WORKSPACE + q.nbytes + 4 * 3 * heads * queries + (8 << 20)
    whole = _gradients(q, k, v, dout)
    for head in (0, 17, heads - 1):
        part = slice(head, head + 1)
        alone = _gradients(q[:, part], k[:, part], v[:, part], dout[:, part])
        for name, got, wanted in zip(("out", "lse", "dq", "dk", "dv"), whole, alone, strict=True):
            assert_same_bits(got[:, part], wanted, f"head {head}: {name}")


@pytest.mark.parametrize(("head_dim", "blocks", "warp"), ((64, 2, 36 << 10), (128, 2, 41 << 10), (200, 1, 48 << 10)))
def test_the_backward_stays_within_its_workspace(cuda: torch.device, head_dim: int, blocks: int, warp: int) -> None:
    """dq has the workspace of the forward; for dk and dv a warp has ``warp`` bytes, eight of a block, ``blocks`` on a multiprocessor.

    Control: P of all rows would take more.
    """
    heads, queries, keys = 24, 2048, 6000
    generator = torch.Generator(cuda).manual_seed(3)
    q, dout = (torch.randn(1, heads, queries, head_dim, generator=generator, device=cuda).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, heads, keys, head_dim, generator=generator, device=cuda).bfloat16() for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attn_cuda.attention(*leaves, causal=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before - sum(gradient.nbytes for gradient in gradients)
    bound = WORKSPACE + torch.cuda.get_device_properties(cuda).multi_processor_count * 8 * blocks * warp + (8 << 20)
    assert used <= bound, (used, bound)
    assert bound < 4 * heads * queries * keys, "P would fit: the test would show nothing"


def test_the_order_of_work_moves_no_bit(cuda: torch.device, assert_same_bits: Same) -> None:
    """Grouped causal heads, whose blocks are taken by weight, against each head with its own copy of the keys."""
    heads, kv_heads, length, head_dim = 24, 3, 1024, 64
    generator = torch.Generator(cuda).manual_seed(2)
    q = torch.randn(2, heads, length, head_dim, generator=generator, device=cuda).half()
    k, v = (torch.randn(2, kv_heads, length, head_dim, generator=generator, device=cuda).half() for _ in range(2))
    group = heads // kv_heads
    grouped = attn_cuda.attention(q, k, v)
    repeated = attn_cuda.attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    assert_same_bits(grouped, repeated)
