"""The problems that the attention benchmarks time: sizes, random inputs, how an operator is called on them, and the work that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

FORWARD_FLOP, BACKWARD_FLOP = 4, 10
"""Operations that count for each visible pair and column, whatever a kernel recomputes: two products forward, five backward."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One problem: [batch, heads or kv_heads, queries or keys, head_dim]; packed when it has ``segments``, joint when it has ``text``."""

    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    queries: int = 4096
    keys: int = 4096
    head_dim: int = 128
    causal: bool = False
    window: tuple[int, int] | None = None
    sinks: bool = False
    segments: tuple[int, ...] = ()
    text: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def operator(self) -> str:
        return "attention_varlen" if self.segments else "joint_attention" if self.text else "attention"

    @property
    def pairs(self) -> int:
        """Visible (head, query, key) pairs, counted exactly; causal is bottom-right, so the block left of the diagonal is dense."""
        sizes = [(length, length) for length in self.segments] or [(self.queries, self.keys)] * self.batch
        return self.heads * sum(self._visible(*size) for size in sizes)

    def _visible(self, queries: int, keys: int) -> int:
        total = 0
        for position in range(keys - queries, keys):
            last = min(position, keys - 1) if self.causal else keys - 1
            first = 0
            if self.window is not None:
                first, last = max(0, position - self.window[0]), min(last, position + self.window[1])
            total += max(0, last - first + 1)
        return total

    def flop(self, direction: str) -> int:
        return (FORWARD_FLOP if direction == "forward" else BACKWARD_FLOP) * self.pairs * self.head_dim

    def facts(self) -> dict[str, Any]:
        """The fields that are set, for the result file."""
        return {name: str(value) for name, value in vars(self).items() if value not in (False, None, (), 0)}


SEGMENTS = (1024, 17, 771, 256, 1, 1403, 500, 124)
SHAPES = {
    "d128": Shape(),
    "d128-fp32": Shape(dtype=torch.float32),
    "d128-causal": Shape(causal=True),
    "d64": Shape(head_dim=64),
    "d64-causal": Shape(head_dim=64, causal=True),
    "qwen-image": Shape(heads=24, kv_heads=24, queries=4608, keys=4608, text=256),
    "qwen3-8b": Shape(heads=32, kv_heads=8, causal=True),
    "gpt-oss-window": Shape(heads=64, kv_heads=8, head_dim=64, causal=True, window=(127, 0), sinks=True),
    "varlen": Shape(heads=32, kv_heads=8, queries=sum(SEGMENTS), keys=sum(SEGMENTS), causal=True, segments=SEGMENTS),
    "d256": Shape(heads=8, kv_heads=8, head_dim=256),
}


@dataclass(frozen=True)
class Inputs:
    """Random data of one shape: q, k, v and the cotangent as [B, H, S, D] (packed: [total, H, D]), and sinks. Text tokens come first."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None

    @cached_property
    def arguments(self) -> tuple[Tensor, ...]:
        """q, k and v; of a joint operator their text parts, then their image parts, each contiguous."""
        if not self.shape.text:
            return self.q, self.k, self.v
        return tuple(part.contiguous() for side in range(2) for part in (self._parts(tensor)[side] for tensor in (self.q, self.k, self.v)))

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split([self.shape.text, self.shape.queries - self.shape.text], 2)

    def call(self, operator: Callable[..., Any], *arguments: Tensor) -> tuple[Tensor, ...]:
        """Outputs of ``operator`` (the one that ``shape.operator`` names) on ``arguments``, shaped as ``self.arguments``."""
        shape = self.shape
        options = {} if shape.text else {"causal": shape.causal, "window": shape.window, "sinks": self.sinks}
        offsets = (self.offsets, self.offsets) if shape.segments else ()
        result = operator(*arguments, *offsets, **options)
        return result if isinstance(result, tuple) else (result,)

    def joined(self, outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """``out``, ``dq``, ``dk`` and ``dv`` over all tokens, without autograd."""
        if self.shape.text:
            gradients = tuple(torch.cat([text, image], 2) for text, image in zip(gradients[:3], gradients[3:], strict=True))
        out = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))

    @cached_property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.shape.segments)], device=self.q.device)

    def cotangents(self) -> tuple[Tensor, ...]:
        """Of what ``call`` returns."""
        return self._parts(self.dout) if self.shape.text else (self.dout,)

    def sample(self, rows: int = 64) -> Sample:
        """The last kv head's group and its last ``rows`` queries (packed: of the longest segment) as a dense problem of the same bits."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        ends = list(accumulate(shape.segments))
        end = max(ends, key=lambda end: shape.segments[ends.index(end)]) if ends else shape.keys
        segment = slice(end - max(shape.segments), end) if ends else slice(None)
        q, k, v, dout = (dense(tensor)[:, :, segment] for tensor in (self.q, self.k, self.v, self.dout))
        sinks = None if self.sinks is None else self.sinks[-group:]
        options = {"causal": shape.causal, "window": shape.window, "sinks": sinks}
        return Sample(q[:, -group:, -rows:], k[:, -1:], v[:, -1:], dout[:, -group:, -rows:], options, segment)


def dense(tensor: Tensor) -> Tensor:
    """Packed [total, H, D] as [1, H, total, D]; dense tensors as they are."""
    return tensor.transpose(0, 1).unsqueeze(0) if tensor.ndim == 3 else tensor


@dataclass(frozen=True)
class Sample:
    """A part of a problem that the host kernels compute quickly."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    options: dict[str, Any]
    segment: slice

    def part_of(self, whole: Tensor) -> Tensor:
        """The rows of an output or of dq of the whole problem that the sample computes."""
        return dense(whole)[:, -self.q.shape[1] :, self.segment][:, :, -self.q.shape[2] :]

    def host(self) -> Iterator[tuple[str, Tensor]]:
        """``out`` and ``dq`` by the host kernels."""
        import attn_reference

        options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in self.options.items()}
        leaf = self.q.cpu().requires_grad_()
        out = attn_reference.attention(leaf, self.k.cpu(), self.v.cpu(), **options)
        yield "out", out.detach()
        yield "dq", torch.autograd.grad(out, leaf, self.dout.cpu())[0]


def inputs(shape: Shape, device: torch.device | str) -> Inputs:
    """Random inputs of ``shape`` with a fixed seed."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(heads: int, length: int) -> Tensor:
        size = (length, heads, shape.head_dim) if shape.segments else (shape.batch, heads, length, shape.head_dim)
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    q, dout = normal(shape.heads, shape.queries), normal(shape.heads, shape.queries)
    k, v = normal(shape.kv_heads, shape.keys), normal(shape.kv_heads, shape.keys)
    sinks = torch.linspace(-2, 3, shape.heads, device=device) if shape.sinks else None
    return Inputs(shape, q, k, v, dout, sinks)
