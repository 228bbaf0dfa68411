"""joint_attn_qk_gemm and joint_attn_av_gemm, forward and backward: the bytes of the PyTorch definition."""

import dataclasses

import pytest
import torch
from attention_calls import INF, NAN, normal
from attn_reference import pytorch
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import to_numpy
from attn_triton import _products_launch, joint_attn_av_gemm, joint_attn_qk_gemm

SIZES = {
    "one": (1, 1, 1, 1, 1, 1),
    "groups": (2, 4, 2, 7, 19, 12),
    "more than a block": (1, 2, 1, 70, 131, 5),
    "long": (1, 1, 1, 3, 2, 300),
    "no keys": (1, 2, 1, 3, 0, 4),
    "no queries": (1, 2, 1, 0, 3, 4),
}
"""B, H, K, S, T, D."""


def run(function, left, right, upstream, **options):
    left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
    result = function(left, right, **options)
    return [to_numpy(tensor) for tensor in (result, *torch.autograd.grad(result, (left, right), upstream))]


def check(device, function, law, left, right, upstream, **options):
    found = run(function, left.to(device), right.to(device), upstream.to(device), **options)
    for name, a, b in zip(("result", "left gradient", "right gradient"), found, run(law, left, right, upstream, **options), strict=True):
        assert_bytes(a, b, name)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_definition(device, sizes, dtype):
    batch, heads, kv_heads, queries, keys, dim = sizes
    q, k = normal(batch, heads, queries, dim, seed=1, dtype=dtype), normal(batch, kv_heads, keys, dim, seed=2, dtype=dtype)
    scores = normal(batch, heads, queries, keys, seed=3)
    check(device, joint_attn_qk_gemm, pytorch.joint_attn_qk_gemm, q, k, scores, scale=-0.3)
    check(device, joint_attn_qk_gemm, pytorch.joint_attn_qk_gemm, q, k, scores.to(dtype), out_dtype=dtype)
    check(device, joint_attn_av_gemm, pytorch.joint_attn_av_gemm, scores.to(dtype), k, q)


def test_strides_infinities_and_nan(device):
    q, k = normal(2, 8, 2, 6, seed=1).permute(0, 2, 3, 1), normal(6, 2, 9, 8, seed=2)[::3].transpose(2, 3)[:, :1].transpose(2, 3)
    q[0, 0, 1, 2], k[1, 0, 3, 4], k[0, 0, 0, 0] = NAN, INF, -0.0
    scores = normal(2, 9, 6, 2, seed=3).permute(0, 3, 2, 1)
    scores[0, 0, 0] = 0.0
    check(device, joint_attn_qk_gemm, pytorch.joint_attn_qk_gemm, q, k, scores)
    check(device, joint_attn_av_gemm, pytorch.joint_attn_av_gemm, scores, k, normal(1, 1, 1, 1, seed=4).expand(2, 2, 6, 8))


def test_subnormals_in_half_precision(device):
    """Of bfloat16 and float16, the smallest among them, times one and times each other."""
    for dtype in (torch.bfloat16, torch.float16):
        v = torch.arange(1, 33, dtype=torch.int16).view(dtype).reshape(1, 1, 8, 4)
        check(device, joint_attn_av_gemm, pytorch.joint_attn_av_gemm, torch.eye(8, dtype=dtype).expand(1, 1, 8, 8), v, v)


@pytest.mark.parametrize("chunk", (16, 64))
def test_configurations_move_no_bit(device, monkeypatch, chunk):
    q, k, upstream = (
        normal(1, 2, 20, 33, seed=1).to(device),
        normal(1, 1, 18, 33, seed=2).to(device),
        normal(1, 2, 20, 18, seed=3).to(device),
    )
    expected = run(joint_attn_qk_gemm, q, k, upstream)
    config = dataclasses.replace(_products_launch.CONFIGS[device], rows=16, keys=32, num_warps=4, chunk=chunk)
    monkeypatch.setitem(_products_launch.CONFIGS, device, config)
    for found, law in zip(run(joint_attn_qk_gemm, q, k, upstream), expected, strict=True):
        assert_bytes(found, law, "another configuration")


def test_the_order_of_a_chain_moves_bits(device):
    """Control: the comparisons above see it."""
    q, k = normal(1, 1, 9, 40, seed=1).to(device), normal(1, 1, 9, 40, seed=2).to(device)
    assert not torch.equal(joint_attn_qk_gemm(q, k), joint_attn_qk_gemm(q.flip(3), k.flip(3)))
