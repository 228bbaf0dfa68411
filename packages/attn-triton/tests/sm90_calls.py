"""Calls of contract sm90-v1 for the tests on a GPU: inputs by name, and results with gradients of any backend's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

CONTRACT = "sm90-v1"
DIFFERENTIABLE = ("q", "k", "v", "sinks")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Problem:
    """Tensors on the CPU and options of one call; ``dout`` and ``dlse`` are its cotangents."""

    tensors: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        return "attention_varlen" if "cu_seqlens_q" in self.tensors else "attention"

    def results(self, functions: Any, device: str = "cpu") -> dict[str, Tensor]:
        """out, lse and the gradients, on the CPU; ``functions`` is a backend's package."""
        tensors = {name: _on(tensor, device) for name, tensor in self.tensors.items()}
        leaves = [tensors[name].requires_grad_() for name in DIFFERENTIABLE if name in tensors]
        call = getattr(functions, self.operator)
        out, lse = call(**tensors, **self.options, return_lse=True, contract=CONTRACT)
        gradients = torch.autograd.grad((out, lse), leaves, (self.dout.to(device), self.dlse.to(device)))
        names = [f"d{name}" for name in DIFFERENTIABLE if name in tensors]
        found = {"out": out, "lse": lse, **dict(zip(names, gradients, strict=True))}
        return {name: tensor.detach().cpu() for name, tensor in found.items()}

    def edited(self, **changes: Any) -> Problem:
        """Other tensors; None removes one."""
        tensors = {**self.tensors, **changes}
        return replace(self, tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})

    def with_options(self, **options: Any) -> Problem:
        return replace(self, options={**self.options, **options})

    def items(self, index: slice) -> Problem:
        """Some items of the batch."""
        tensors = {name: tensor if name == "sinks" else tensor[index] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, dout=self.dout[index], dlse=self.dlse[index])

    def queries(self, index: slice) -> Problem:
        """Some query rows; their positions are the caller's to give."""
        return replace(self.edited(q=self.tensors["q"][:, :, index]), dout=self.dout[:, :, index], dlse=self.dlse[:, :, index])

    def keys(self, count: int) -> Problem:
        """The first ``count`` keys."""
        return self.edited(k=self.tensors["k"][:, :, :count], v=self.tensors["v"][:, :, :count])


def _on(tensor: Tensor, device: str) -> Tensor:
    """The same values, strides and place in its storage on a device, as a tensor of its own."""
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    extent = sum((size - 1) * stride for size, stride in zip(once.shape, once.stride(), strict=True)) + 1 if once.numel() else 0
    storage = torch.empty(once.storage_offset() + extent, dtype=once.dtype, device=device)
    copy = storage.as_strided(once.shape, once.stride(), once.storage_offset()).copy_(once)
    return copy.expand(tensor.shape).detach()


def dense(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    queries: int = 70,
    keys: int = 200,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    spread: float = 1.0,
    sinks: bool = False,
    more: dict[str, Tensor] | None = None,
    **options: Any,
) -> Problem:
    tensors = {
        "q": (normal(batch, heads, queries, head_dim, seed=1) * spread).to(dtype),
        "k": normal(batch, kv_heads, keys, head_dim, seed=2, dtype=dtype),
        "v": normal(batch, kv_heads, keys, head_dim, seed=3, dtype=dtype),
        **({"sinks": normal(heads, seed=6)} if sinks else {}),
        **(more or {}),
    }
    dout, dlse = normal(batch, heads, queries, head_dim, seed=4, dtype=dtype), normal(batch, heads, queries, seed=5)
    return Problem(tensors, dout, dlse, options)


def packed(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **more: Any
) -> Problem:
    """Segments side by side; rows before the first and after the last belong to none."""
    dtype = more.pop("dtype", torch.bfloat16)
    sinks, used = more.pop("sinks", False), more.pop("used", {})
    offsets = [torch.tensor([3, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k)]
    total_q, total_k = (int(offset[-1]) + 5 for offset in offsets)
    tensors = {
        "q": normal(total_q, heads, head_dim, seed=1, dtype=dtype),
        "k": normal(total_k, kv_heads, head_dim, seed=2, dtype=dtype),
        "v": normal(total_k, kv_heads, head_dim, seed=3, dtype=dtype),
        "cu_seqlens_q": offsets[0].int(),
        "cu_seqlens_k": offsets[1].int(),
        **({"sinks": normal(heads, seed=6)} if sinks else {}),
        **used,
    }
    return Problem(tensors, normal(total_q, heads, head_dim, seed=4, dtype=dtype), normal(heads, total_q, seed=5), more)


def turned(problem: Problem) -> Problem:
    """The same values in another layout: heads of q and columns of k are strided, and v does not begin at a multiple of 16 bytes."""
    q, k, v = (problem.tensors[name] for name in ("q", "k", "v"))
    shifted = torch.zeros(v.numel() + 1, dtype=v.dtype)[1:].view(v.shape).copy_(v)
    return problem.edited(q=q.transpose(1, 2).contiguous().transpose(1, 2), k=k.transpose(2, 3).contiguous().transpose(2, 3), v=shifted)


def expanded(problem: Problem) -> Problem:
    """One kv head's keys and values for all, and one query row's gradient, without copies."""
    k, v = (problem.tensors[name][:, :1].expand(-1, problem.tensors[name].shape[1], -1, -1) for name in ("k", "v"))
    return replace(problem.edited(k=k, v=v), dout=problem.dout[:, :, :1].expand_as(problem.dout))


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


HALF = torch.float16
CALLS: dict[str, Callable[[], Problem]] = {
    "one pair": lambda: dense(queries=1, keys=1),
    "causal": dense,
    "full, float16": lambda: dense(causal=False, dtype=HALF),
    "D 128": lambda: dense(head_dim=128, heads=4, kv_heads=2),
    "D 128, float16, many blocks": lambda: dense(head_dim=128, queries=300, keys=300, dtype=HALF),
    "three segments": lambda: dense(queries=3, keys=2500),
    "three segments, many rows": lambda: dense(queries=200, keys=2500, head_dim=128),
    "groups with sinks": lambda: dense(batch=2, heads=6, kv_heads=2, queries=33, keys=40, sinks=True),
    "window": lambda: dense(queries=300, keys=300, window=(100, 0), sinks=True),
    "window on both sides": lambda: dense(queries=300, keys=333, causal=False, window=(40, 60)),
    "window of a decode step": lambda: dense(queries=2, keys=2300, window=(1100, 0), sinks=True),
    "decode of many items": lambda: dense(
        batch=140, queries=1, keys=4500, more={"kv_lengths": ints(*(37 * item % 4501 for item in range(140)))}, sinks=True
    ),
    "lengths": lambda: dense(batch=4, queries=4, keys=140, more={"kv_lengths": ints(140, 0, 1, 129)}, sinks=True),
    "starts": lambda: dense(
        batch=4, queries=5, keys=1100, more={"k_start": ints(1, 1000, 1023, 2048), "kv_lengths": ints(1100, 1099, 30, 700)}
    ),
    "starts, many rows": lambda: dense(batch=2, queries=200, keys=1300, more={"k_start": ints(1, 1000)}, window=(1200, 0)),
    "query starts": lambda: dense(batch=3, queries=130, keys=260, more={"q_start": ints(0, -100, 200)}, sinks=True),
    "more queries than keys": lambda: dense(queries=150, keys=20, sinks=True),
    "no sink for a head": lambda: dense(more={"sinks": torch.tensor([-torch.inf, 0.5])}),
    "no keys": lambda: dense(keys=0, sinks=True),
    "no queries": lambda: dense(queries=0),
    "no batch": lambda: dense(batch=0),
    "large scores": lambda: dense(spread=30.0),
    "a given scale": lambda: dense(scale=0.7),
    "another layout": lambda: turned(dense(heads=2, kv_heads=2)),
    "expanded heads and rows": lambda: expanded(dense(heads=4, kv_heads=2, queries=140)),
    "D 128, full, ragged": lambda: dense(batch=2, heads=4, kv_heads=2, queries=333, keys=401, head_dim=128, causal=False, sinks=True),
    "D 128, window": lambda: dense(queries=700, keys=700, head_dim=128, window=(200, 0), sinks=True),
    "D 128, window on both sides": lambda: dense(queries=300, keys=333, head_dim=128, causal=False, window=(40, 60), dtype=HALF),
    "D 128, starts": lambda: dense(batch=2, queries=200, keys=1300, head_dim=128, more={"k_start": ints(1, 1000)}, window=(1200, 0)),
    "D 128, lengths": lambda: dense(batch=4, queries=200, keys=300, head_dim=128, more={"kv_lengths": ints(300, 0, 1, 129)}, sinks=True),
    "D 128, packed": lambda: packed((17, 0, 130, 5, 64, 300), (40, 30, 130, 0, 300, 310), head_dim=128),
    "more blocks than processors": lambda: dense(heads=72, kv_heads=72, queries=200, keys=150, sinks=True),
    "D 128, more blocks than processors": lambda: dense(heads=144, kv_heads=72, queries=200, keys=150, head_dim=128),
    "packed, more blocks than processors": lambda: packed((140, 30, 200), (140, 60, 200), heads=72, kv_heads=72, head_dim=128),
    "packed": lambda: packed((17, 0, 130, 5, 64), (40, 30, 130, 0, 300)),
    "packed, D 128 with sinks": lambda: packed((17, 200, 1), (17, 200, 1), head_dim=128, sinks=True, dtype=HALF),
    "packed, padded segments": lambda: packed(
        (20, 140, 9), (30, 150, 9), used={"seqlens_q": ints(15, 140, 0), "seqlens_k": ints(30, 131, 9)}, causal=False
    ),
    "packed, window": lambda: packed((200, 90), (200, 1100), window=(70, 0), sinks=True),
}
"""Kinds of calls; each builds fresh inputs."""
