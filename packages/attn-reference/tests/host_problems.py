"""Random attention problems for the host kernels: every feature, awkward sizes and awkward values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VALUES = ("normal", "large", "subnormal", "special")


def pick(generator: torch.Generator, *choices: Any) -> Any:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def values(generator: torch.Generator, kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random data of one kind; "special" holds a few NaN, infinities, zeros of both signs and subnormals."""
    found = torch.randn(*shape, generator=generator)
    if kind == "large":
        found = found * 30
    if kind == "subnormal":
        found = found * torch.finfo(dtype).tiny
    if kind == "special":
        tiny = torch.finfo(dtype).tiny
        specials = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, tiny / 4, torch.finfo(dtype).max])
        where = torch.rand(*shape, generator=generator) < 0.002
        found = torch.where(where, specials[torch.randint(len(specials), shape, generator=generator)], found)
    return found.to(dtype)


def dense(seed: int) -> AttentionInputs:
    """A dense problem with a random subset of the features."""
    g = torch.Generator().manual_seed(seed)
    batch, kv_heads, group = pick(g, 1, 2, 3), pick(g, 1, 2), pick(g, 1, 1, 3)
    heads = kv_heads * group
    queries, keys = pick(g, 1, 2, 5, 13, 64, 130), pick(g, 1, 3, 17, 255, 256, 257, 400, 700)
    head_dim, value_dim = pick(g, 1, 3, 8, 16, 24, 64, 80), pick(g, 1, 5, 16, 33, 64)
    kind, dtype = pick(g, *VALUES), pick(g, *DTYPES)
    inputs = AttentionInputs(
        q=values(g, kind, dtype, batch, heads, queries, head_dim),
        k=values(g, kind, dtype, batch, kv_heads, keys, head_dim),
        v=values(g, kind, dtype, batch, kv_heads, keys, value_dim),
        causal=pick(g, True, False),
        scale=pick(g, head_dim**-0.5, 1.0, -0.7, 0.0, 40.0),
    )
    return replace(inputs, **_options(g, batch, heads, queries, keys))


def _options(g: torch.Generator, batch: int, heads: int, queries: int, keys: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if pick(g, True, False, False):
        found["key_mask"] = torch.rand(batch, keys, generator=g) < pick(g, 0.1, 0.6, 0.95)
    if pick(g, True, False, False, False):
        found["query_mask"] = torch.rand(batch, queries, generator=g) < 0.7
    if pick(g, True, False, False):
        found["kv_lengths"] = torch.randint(0, keys + 1, (batch,), generator=g)
    if pick(g, True, False, False):
        found["k_start"] = torch.randint(0, 600, (batch,), generator=g)
    if pick(g, True, False, False):
        found["q_start"] = torch.randint(-keys // 2, keys + 300, (batch,), generator=g)
    if pick(g, True, False):
        found["window_left"] = pick(g, -1, 0, 1, 30, 300)
        found["window_right"] = pick(g, -1, 0, 2, 100)
    if pick(g, True, False):
        found["sinks"] = torch.where(torch.rand(heads, generator=g) < 0.2, -torch.inf, torch.randn(heads, generator=g) * pick(g, 1, 40))
    if pick(g, True, False, False):
        shape = [pick(g, 1, size) for size in (batch, heads, queries, keys)]
        bias = torch.randn(*shape, generator=g)
        found["bias"] = torch.where(torch.rand(*shape, generator=g) < 0.1, -torch.inf, bias)
    if pick(g, True, False, False):
        found["dropout_p"] = pick(g, 0.1, 0.5, 1.0)
        found["dropout_seed"] = torch.randint(-(2**63), 2**63 - 1, (), generator=g)
    return found


def packed(seed: int) -> AttentionInputs:
    """A packed problem: empty segments, padded segments, rows before, between and after them."""
    g = torch.Generator().manual_seed(seed)
    kv_heads, group, segments = pick(g, 1, 2), pick(g, 1, 2), pick(g, 1, 2, 4)
    heads = kv_heads * group
    head_dim, value_dim, kind, dtype = pick(g, 4, 16, 40), pick(g, 8, 20), pick(g, *VALUES), pick(g, *DTYPES)
    offsets, used, totals = {}, {}, {}
    for name, sizes in (("q", (0, 1, 7, 60)), ("k", (0, 5, 256, 300))):
        lengths = torch.tensor([pick(g, *sizes) for _ in range(segments)])
        offsets[name] = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))) + pick(g, 0, 3)
        used[name] = (lengths * torch.rand(segments, generator=g)).long() if pick(g, True, False) else None
        totals[name] = int(offsets[name][-1]) + pick(g, 0, 4)
    options = _options(g, segments, heads, 1, 1)
    kept = {name: options[name] for name in ("sinks", "dropout_p", "dropout_seed", "window_left", "window_right") if name in options}
    return AttentionInputs(
        q=values(g, kind, dtype, totals["q"], heads, head_dim),
        k=values(g, kind, dtype, totals["k"], kv_heads, head_dim),
        v=values(g, kind, dtype, totals["k"], kv_heads, value_dim),
        cu_seqlens_q=offsets["q"],
        cu_seqlens_k=offsets["k"],
        seqlens_q=used["q"],
        seqlens_k=used["k"],
        causal=pick(g, True, False),
        scale=head_dim**-0.5,
        **kept,
    )


def results(kernels: Any, inputs: AttentionInputs, seed: int = 0) -> dict[str, Tensor]:
    """out, LSE and every gradient of one engine, for cotangents drawn from ``seed``."""
    g = torch.Generator().manual_seed(seed)
    out, lse, row_max, row_sum = kernels.attention_forward(inputs, inputs.v.dtype)
    dout, dlse = torch.randn(out.shape, generator=g).to(out.dtype), torch.randn(lse.shape, generator=g)
    needs = frozenset(name for name in ("q", "k", "v", "sinks", "bias") if getattr(inputs, name) is not None)
    gradients = kernels.attention_backward(inputs, dout, dlse if seed % 2 else None, row_max, row_sum, needs)
    return {"out": out, "lse": lse, **{f"d{name}": gradient for name, gradient in gradients.items()}}
