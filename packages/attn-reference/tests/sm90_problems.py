"""Problems and bytes for the tests of ``sm90-v1``."""

from __future__ import annotations

from typing import Any

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    """Equal bytes, NaN equal to every NaN."""
    integer = torch.int32 if found.dtype == torch.float32 else torch.int16
    equal = found.contiguous().view(integer) == expected.contiguous().view(integer)
    return found.dtype == expected.dtype and bool((equal | (torch.isnan(found) & torch.isnan(expected))).all())


def pick(generator: torch.Generator, *choices: Any) -> Any:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def problem(seed: int) -> tuple[AttentionInputs, Tensor, Tensor | None]:
    """Dense inputs with random features, dout and dlse."""
    g = torch.Generator().manual_seed(seed)
    width, dtype = pick(g, 64, 64, 128, 256), pick(g, *DTYPES)
    batch, kv_heads, group = pick(g, 1, 2), pick(g, 1, 2), pick(g, 1, 3)
    queries, keys = pick(g, (1, 300), (5, 17), (17, 129), (40, 64), (1, 1), (20, 0), (2, 1300))
    spread = pick(g, 1.0, 3.0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * spread).to(dtype)

    heads = kv_heads * group
    q, k, v, dout = (
        normal(batch, count, rows, width) for count, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    )
    inputs = AttentionInputs(q, k, v, causal=pick(g, True, False), scale=pick(g, width**-0.5, 0.3))
    if pick(g, True, False):
        inputs.sinks = torch.randn(heads, generator=g)
        inputs.sinks[0] = pick(g, -torch.inf, 0.5)
    if pick(g, True, False):
        inputs.kv_lengths = torch.randint(0, keys + 1, (batch,), generator=g)
    if pick(g, True, False):
        inputs.k_start = torch.randint(0, 3000, (batch,), generator=g)
    inputs.window_left = pick(g, -1, -1, 7, 100)
    dlse = torch.randn(batch, heads, queries, generator=g) if pick(g, True, False) else None
    return inputs, dout, dlse


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
