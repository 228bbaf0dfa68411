"""Calls of contract sm90-v1 for the tests on a GPU: inputs by name, and results with gradients of any backend's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import attn_spec
import pytest
import torch
from attn_spec import Problem as Described
from torch import Tensor

CONTRACT = "sm90-v1"
DIFFERENTIABLE = ("q", "k", "v", "sinks")


JOINT = ("q_txt", "k_txt", "v_txt", "q_img", "k_img", "v_img")


def demand_hopper(name: str, operator: str, contract: str) -> None:
    """Skip without an NVIDIA GPU of compute capability 9.0; with one, a backend that does not run the contract fails here."""
    if torch.version.cuda is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no NVIDIA GPU of compute capability 9.0")
    described = Described(op=operator, dtype="bfloat16", device="cuda", contract=contract, head_dim=64, value_dim=64)
    assert not attn_spec.backends()[name].reasons(described)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Problem:
    """Tensors on the CPU and options of one call; ``dout`` and ``dlse`` are its cotangents."""

    tensors: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    contract: str = CONTRACT

    @property
    def operator(self) -> str:
        name = "attention_varlen" if "cu_seqlens_q" in self.tensors else "attention"
        return f"qat_{name}" if self.contract.startswith("nvfp4") else name

    def results(self, functions: Any, device: str = "cpu") -> dict[str, Tensor]:
        """out, lse (unless an option says otherwise) and the gradients, on the CPU; ``functions`` is a backend's package."""
        tensors = {name: _on(tensor, device) for name, tensor in self.tensors.items()}
        leaves = [tensors[name].requires_grad_() for name in DIFFERENTIABLE if name in tensors]
        call = getattr(functions, self.operator)
        returned = call(**tensors, **{"return_lse": True, **self.options}, contract=self.contract)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        cotangents = [tensor.to(device) for tensor in (self.dout, self.dlse)[: len(outputs)]]
        gradients = torch.autograd.grad(outputs, leaves, cotangents)
        names = [f"d{name}" for name in DIFFERENTIABLE if name in tensors]
        found = {**dict(zip(("out", "lse"), outputs, strict=False)), **dict(zip(names, gradients, strict=True))}
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


@dataclass(frozen=True)
class Joint:
    """Text and image of one call of ``joint_attention`` on the CPU, in the order of its arguments, and the cotangents of both results."""

    tensors: tuple[Tensor, ...]
    mask: Tensor | None
    dout: tuple[Tensor, Tensor]

    def results(self, functions: Any, device: str = "cpu") -> dict[str, Tensor]:
        """Both results and the gradients of the tensors, on the CPU."""
        leaves = [_on(tensor, device).requires_grad_() for tensor in self.tensors]
        mask = None if self.mask is None else _on(self.mask, device)
        out = functions.joint_attention(*leaves, prompt_mask=mask, contract=CONTRACT)
        gradients = torch.autograd.grad(out, leaves, [_on(tensor, device) for tensor in self.dout])
        names = ("out_txt", "out_img", *(f"d{name}" for name in JOINT))
        return {name: tensor.detach().cpu() for name, tensor in zip(names, (*out, *gradients), strict=True)}

    def padded(self, places: list[int], length: int) -> Joint:
        """Text rows at ``places`` of ``length`` slots; the others hold NaN and are masked."""

        def spread(rows: Tensor, value: float) -> Tensor:
            wide = rows.new_full((*rows.shape[:2], length, rows.shape[3]), value)
            wide[:, :, places] = rows
            return wide

        mask = torch.zeros(self.tensors[0].shape[0], length, dtype=torch.bool)
        mask[:, places] = True
        text = (spread(tensor, torch.nan) for tensor in self.tensors[:3])
        return Joint((*text, *self.tensors[3:]), mask, (spread(self.dout[0], torch.nan), self.dout[1]))


def joint(
    lengths: tuple[int, ...] | None = None, text: int = 70, image: int = 200, heads: int = 2, kv_heads: int = 1, head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Joint:  # fmt: skip
    """``lengths``: kept text rows of each batch item, the last ones; None keeps all, in one item."""
    batch = 1 if lengths is None else len(lengths)
    mask = None if lengths is None else torch.arange(text) >= text - torch.tensor(lengths)[:, None]
    counts = (heads, kv_heads, kv_heads)
    sizes = [(count, rows) for rows in (text, image) for count in counts]
    tensors = [normal(batch, *size, head_dim, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]
    dout = [normal(batch, heads, rows, head_dim, seed=9 + rows, dtype=dtype) for rows in (text, image)]
    return Joint(tuple(tensors), mask, (dout[0], dout[1]))


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
    "D 256": lambda: dense(head_dim=256),
    "D 256, full, float16": lambda: dense(batch=2, head_dim=256, queries=90, keys=130, causal=False, dtype=HALF),
    "D 256, segments with sinks": lambda: dense(head_dim=256, queries=80, keys=1200, sinks=True),
    "D 256, decode": lambda: dense(batch=2, heads=4, head_dim=256, queries=1, keys=1100, more={"kv_lengths": ints(1100, 70)}),
    "D 256, packed window": lambda: packed((90, 7), (100, 80), head_dim=256, window=(50, 0), sinks=True),
    "packed decode": lambda: packed((1, 1, 2, 1), (1500, 30, 1030, 0), sinks=True),
    "packed decode, D 128, unequal": lambda: packed((16, 0, 0, 1, 1), (2100, 5, 70, 1024, 1025), head_dim=128, causal=False),
    "packed, window": lambda: packed((200, 90), (200, 1100), window=(70, 0), sinks=True),
}
"""Kinds of calls; each builds fresh inputs."""
JOINTS: dict[str, Callable[[], Joint]] = {
    "all of the prompt": joint,
    "prompts of three lengths": lambda: joint((70, 0, 33), image=150),
    "D 128, float16": lambda: joint((129, 130), text=130, image=140, head_dim=128, heads=4, kv_heads=2, dtype=HALF),
    "D 256": lambda: joint((20,), text=30, image=90, head_dim=256),
    "a prompt of two segments": lambda: joint((1040,), text=1050, image=70),
    "a prompt of one segment": lambda: joint(text=1024, image=66),
    "prompts that end at a tile and at a segment": lambda: joint((384, 1024), text=1150, image=150, heads=1, head_dim=128),
    "more blocks than processors": lambda: joint((4, 6), text=6, image=10, heads=70, kv_heads=70),
    "no text": lambda: joint(text=0),
    "no image": lambda: joint((60,), image=0),
    "nothing at all": lambda: joint((0, 0), image=0),
}
"""Kinds of joint calls."""
