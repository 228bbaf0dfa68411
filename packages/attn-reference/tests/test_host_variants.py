"""No bit of the host kernels depends on the instruction set or on the number of threads."""

from __future__ import annotations

import pytest
import torch
from attn_reference._host_kernels import KERNELS, HostKernels
from attn_spec.torch import AttentionInputs
from host_problems import dense, packed, results
from test_host_fuzz import assert_same, describe

VARIANTS = HostKernels.variants()
PROBLEMS = [pytest.param(build(seed), id=f"{build.__name__}-{seed}") for build in (dense, packed) for seed in range(100, 112)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("inputs", PROBLEMS)
def test_every_variant_gives_the_same_bytes(inputs: AttentionInputs, variant: str) -> None:
    assert_same(results(HostKernels(variant=variant), inputs), results(KERNELS, inputs), describe(inputs))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_move_no_bit(threads: int) -> None:
    g = torch.Generator().manual_seed(1)
    for inputs in (dense(3), dense(4), packed(5), _wide(g)):
        assert_same(results(HostKernels(threads=threads), inputs, 1), results(HostKernels(threads=5), inputs, 1), describe(inputs))


def _wide(g: torch.Generator) -> AttentionInputs:
    q, k, v = (torch.randn(1, heads, 300, 32, generator=g) for heads in (4, 2, 2))
    return AttentionInputs(q=q, k=k, v=v, causal=True, scale=0.2, bias=torch.randn(1, 1, 1, 300, generator=g))


@pytest.mark.parametrize("variant", VARIANTS)
def test_joint_operators_of_every_variant(variant: str) -> None:
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 4, 70, 40, generator=g), torch.randn(2, 2, 300, 40, generator=g)
    mask = torch.rand(2, 300, generator=g) < 0.7
    both = []
    for kernels in (KERNELS, HostKernels(variant=variant, threads=3)):
        scores = kernels.qk_gemm_forward(q, k, 0.3, torch.float32)
        probs, row_max, row_sum = kernels.softmax_forward(scores, mask, torch.float32)
        out = kernels.av_gemm_forward(probs, k, torch.float32)
        dprobs, dv = kernels.av_gemm_backward(out, probs, k, (True, True))
        dscores = kernels.softmax_backward(dprobs, scores, mask, row_max, row_sum)
        dq, dk = kernels.qk_gemm_backward(dscores, q, k, 0.3, (True, True))
        both.append({"scores": scores, "probs": probs, "out": out, "dv": dv, "dscores": dscores, "dq": dq, "dk": dk})
    assert_same(both[1], both[0], variant)


def test_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="unknown variant sse9"):
        results(HostKernels(variant="sse9"), dense(0))


def test_another_order_of_a_chain_is_seen() -> None:
    """The comparison is sharp: the same sum over keys in reverse has other bits."""
    g = torch.Generator().manual_seed(3)
    probs, v = torch.rand(1, 1, 8, 300, generator=g), torch.randn(1, 1, 300, 16, generator=g)
    forward = KERNELS.av_gemm_forward(probs, v, torch.float32)
    reverse = KERNELS.av_gemm_forward(probs.flip(-1), v.flip(2), torch.float32)
    with pytest.raises(AssertionError, match="elements that differ"):
        assert_same({"out": reverse}, {"out": forward}, "control")
