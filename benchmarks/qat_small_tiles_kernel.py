"""4-bit training attention in the tile configuration of FastVideo's Attn-QAT kernel, the baseline of qat_gpu.py.

32 x 32 tiles, P quantized from the running maximum, and one kernel for dq, dk and dv; not causal, lengths that are multiples of 32. The
shape of the computation is that of https://github.com/hao-ai-lab/FastVideo (attn_qat_train); the quantizer is this project's, so that only
the tiles and the order of the work differ.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import torch
import triton
import triton.language as tl
from attn_triton._nvfp4_sm90_kernel import p_along_columns, p_along_rows

__all__ = ["backward", "forward"]

TILE = 32
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
OPTIONS = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _block(pointer, first, D: tl.constexpr, TILE: tl.constexpr):
    return tl.load(pointer + (first + tl.arange(0, TILE))[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _forward(q, k, v, out, logs, c, encode, decode, tokens, D: tl.constexpr, TILE: tl.constexpr):
    head, first = tl.program_id(1).to(tl.int64) * tokens, tl.program_id(0) * TILE
    q, k, v, out = q + head * D, k + head * D, v + head * D, out + head * D
    rows = _block(q, first, D, TILE)
    up, down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
    top, total = tl.full((TILE,), NEGATIVE_INFINITY, tl.float32), tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, D), tl.float32)
    for begin in range(0, tokens, TILE):
        s = tl.dot(rows, _block(k, begin, D, TILE).T) * c
        new = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p_along_columns(p, up, down, rows.dtype), _block(v, begin, D, TILE), acc * alpha[:, None])
        top = new
    at = (first + tl.arange(0, TILE))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, (acc * (decode / total)[:, None]).to(out.dtype.element_ty))
    tl.store(logs + head + first + tl.arange(0, TILE), top + tl.log2(total))


@triton.jit
def _delta(out, dout, delta, D: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    terms = _block(out, first, D, TILE).to(tl.float32) * _block(dout, first, D, TILE).to(tl.float32)
    tl.store(delta + first + tl.arange(0, TILE), tl.sum(terms, axis=1))


@triton.jit
def _backward(q, k, v, dout, logs, delta, dq, dk, dv, c, scale, encode, decode, tokens, D: tl.constexpr, TILE: tl.constexpr):
    head, first = tl.program_id(1).to(tl.int64) * tokens, tl.program_id(0) * TILE
    q, k, v, dout = q + head * D, k + head * D, v + head * D, dout + head * D
    logs, delta = logs + head, delta + head
    at = head * D + (first + tl.arange(0, TILE))[:, None] * D + tl.arange(0, D)[None, :]
    up, down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
    keys, values = _block(k, first, D, TILE), _block(v, first, D, TILE)
    dk_sum, dv_sum = tl.zeros((TILE, D), tl.float32), tl.zeros((TILE, D), tl.float32)
    for begin in range(0, tokens, TILE):
        index = begin + tl.arange(0, TILE)
        rows, cotangent = _block(q, begin, D, TILE), _block(dout, begin, D, TILE)
        p = tl.exp2(tl.dot(keys, rows.T) * c - tl.load(logs + index)[None, :])
        dv_sum = tl.dot((p_along_rows(p, up, down) * down).to(rows.dtype), cotangent, dv_sum)
        ds = p * (tl.dot(values, cotangent.T) - tl.load(delta + index)[None, :])
        dk_sum = tl.dot(ds.to(rows.dtype), rows, dk_sum)
    tl.store(dk + at, (dk_sum * scale).to(dk.dtype.element_ty))
    tl.store(dv + at, dv_sum.to(dv.dtype.element_ty))
    index = first + tl.arange(0, TILE)
    rows, cotangent = _block(q, first, D, TILE), _block(dout, first, D, TILE)
    log, of_row = tl.load(logs + index)[:, None], tl.load(delta + index)[:, None]
    dq_sum = tl.zeros((TILE, D), tl.float32)
    for begin in range(0, tokens, TILE):
        keys = _block(k, begin, D, TILE)
        p = tl.exp2(tl.dot(rows, keys.T) * c - log)
        ds = p * (tl.dot(cotangent, _block(v, begin, D, TILE).T) - of_row)
        dq_sum = tl.dot(ds.to(rows.dtype), keys, dq_sum)
    tl.store(dq + at, (dq_sum * scale).to(dq.dtype.element_ty))


def _numbers(q):
    scale = q.shape[-1] ** -0.5
    return scale * 1.4426950408889634, scale, 2688.0, 1 / 2688.0, q.shape[2]


def forward(q, k, v):
    """out and base-2 log-sum-exp of quantized, contiguous operands [B, H, S, D]."""
    out, logs = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    c, _, *rest = _numbers(q)
    _forward[(q.shape[2] // TILE, q.shape[0] * q.shape[1])](q, k, v, out, logs, c, *rest, D=q.shape[-1], TILE=TILE, **OPTIONS)
    return out, logs


def backward(q, k, v, out, logs, dout):
    """dq, dk and dv."""
    delta, dout = torch.empty_like(logs), dout.contiguous()
    found = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
    _delta[(logs.numel() // TILE,)](out, dout, delta, D=q.shape[-1], TILE=TILE, num_warps=4)
    grid = (q.shape[2] // TILE, q.shape[0] * q.shape[1])
    _backward[grid](q, k, v, dout, logs, delta, *found, *_numbers(q), D=q.shape[-1], TILE=TILE, **OPTIONS)
    return found
