"""The switches of docs/qat.md that are one formula each: the property that the formula has, and a formula without it as a control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_reference import attention_fp32, qat_attention
from attn_reference.nvfp4 import fake_quantize
from float_bits import same_bits
from test_qat_attention import ONLY_P, cosine, qkv, run
from torch import Tensor


def with_running_maximum(x: Tensor, tile: int) -> Tensor:
    """The faulty formula: exponentials from the maximum so far, quantized tile by tile and rescaled later. x: [S, T] scores."""
    parts, top = [], torch.full((len(x), 1), -torch.inf)
    for scores in x.split(tile, 1):
        top = torch.maximum(top, scores.amax(1, keepdim=True))
        parts.append((fake_quantize(torch.exp(scores - top), outer="row"), top))
    return torch.cat([part * torch.exp(then - top) for part, then in parts], 1)


def test_two_levels_of_p_follow_the_final_maximum_of_the_row() -> None:
    """The largest exponential of a row is 1, so the scale of its row is that of the constant 2688; no tile is part of the formula."""
    q, k, v, dout = qkv(keys=96)
    rows, constant = (run(q, k, v, dout, config=replace(ONLY_P, p_outer=outer)) for outer in ("row", 2688.0))
    assert all(same_bits(a, b) for a, b in zip(rows, constant, strict=True))
    x = (q @ k.mT)[0, 0] / 4
    faulty = [with_running_maximum(x, tile) for tile in (32, 48)]
    assert not torch.equal(*faulty), "the control depends on the tile"


def test_both_passes_read_one_p() -> None:
    """With V = I the output is the quantized P over its sum, and dV is that times dO; the exact P is another."""
    q, k, _, dout = qkv(queries=12, keys=16)
    v = torch.eye(16)[None, None]
    out, _, _, dv = run(q, k, v, dout, config=ONLY_P)
    torch.testing.assert_close(dv, out.mT @ dout, rtol=1e-5, atol=1e-6)
    plain = run(q, k, v, dout, config=replace(ONLY_P, quantize_p=False))
    assert (dv - plain[0].mT @ dout).abs().max() > 0.01, "dV of a forward that did not quantize P"
    faulty = fake_quantize(torch.softmax((q @ k.mT) / 4, -1))
    assert (dv - faulty.mT @ dout).abs().max() > 0.01, "dV of P normalised first and quantized then, in blocks of their own"


def test_delta_in_high_precision_keeps_the_rows_of_ds_at_zero() -> None:
    """A column of K that is 1 everywhere receives the row sum of dS in dQ: zero, unless delta is that of the quantized P."""
    q, k, v, dout = qkv()
    k[..., 0] = 1
    high, low = (run(q, k, v, dout, config=replace(ONLY_P, high_precision_delta=high))[1][..., 0] for high in (True, False))
    assert high.abs().max() < 1e-6 and low.abs().max() > 1e-3


def test_v_is_rounded_along_its_axis() -> None:
    """Channels of very different size: blocks along the keys keep each channel's own error, blocks along the head dim do not."""
    q, k, v, dout = qkv()
    v = v * torch.logspace(-2, 2, 16)
    exact = run(q, k, v, dout, attention_fp32, causal=False)[0][..., 0]
    only_v = replace(ONLY_P, quantize_v=True, quantize_p=False)
    keys, head_dim = (run(q, k, v, dout, config=replace(only_v, v_axis=axis))[0][..., 0] for axis in ("keys", "head_dim"))
    assert cosine(keys, exact) > 0.96 and not head_dim.any(), "the smallest channel vanishes beside one that is 10,000 times larger"


def test_outputs_have_the_dtype_of_q_and_float8_is_refused() -> None:
    q, k, v, _ = qkv()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert qat_attention(*(tensor.to(dtype) for tensor in (q, k, v))).dtype == dtype
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        qat_attention(*(tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)))
