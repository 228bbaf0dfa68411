"""Attention of ``sm90-v1`` in parts, over one engine: the states of the segments of some keys, and their merge.

Cut keys at multiples of 1024 positions, over devices or in time; the merge is a fold from left to right and accepts nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attn_spec._errors import UnsupportedProblem
from attn_spec._sm90 import CONTRACT, SEGMENT, score_factor
from attn_spec.torch._acceptance import Acceptance
from attn_spec.torch._arguments import autocast, int64, lengths, scale_of, starts
from attn_spec.torch._kernels import AttentionInputs

__all__ = ["PartialOperators", "Partials"]

States = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Partials:
    """States of consecutive segments before their merge.

    ``first`` is the index of the first segment. ``n`` (maximum times c) and ``l`` are float32 [segments, B, H, S], ``o`` float32 [segments,
    B, H, S, D]; a segment without a visible key has n = -inf. ``dtype`` is that of q; ``scale``, ``causal``, ``window`` and ``q_start`` are
    those of the call (``q_start`` None: it was a tensor).
    """

    first: int
    n: Tensor
    l: Tensor
    o: Tensor
    dtype: torch.dtype
    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    q_start: int | None

    @property
    def segments(self) -> int:
        return self.n.shape[0]


@dataclass(frozen=True)
class PartialOperators:
    """``attention_partial`` and ``merge_partials`` of a backend.

    ``states(inputs, count)`` gives n, l and o of the ``count`` segments from the one of stored key 0 on; ``merge(n, l, o, sinks, dtype)``
    out and LSE of all segments, ascending; sinks are float32.
    """

    accepts: Acceptance
    states: Callable[[AttentionInputs, int], States]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], tuple[Tensor, Tensor]]

    def attention_partial(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_start: int | Tensor,
        k_start: int = 0,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        kv_lengths: Tensor | None = None,
    ) -> Partials:
        """The segment states of the keys at positions ``k_start`` to ``k_start + T``, forward only.

        Args:
            q: [B, H, S, D]; k, v: [B, K, T, D]; bfloat16 or float16, D in 64, 128, 256.
            q_start: position of query 0, int or int [B]; k_start: position of stored key 0.
            causal, scale, window, kv_lengths: as in ``attention``. Under autocast q, k and v are cast to its dtype.

        Raises:
            TypeError, ValueError: bad dtype, shape, device, scale or position. UnsupportedProblem: what the contract lacks, gradients
            included.

        Source: docs/contracts/sm90-v1.md, sections 3 and 5.
        """
        q, k, v = autocast(q, k, v)
        options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "k_start": k_start}
        arrays: dict[str, Any] = {"q": q, "k": k, "v": v, "kv_lengths": kv_lengths}
        (arrays if isinstance(q_start, Tensor) else options)["q_start"] = q_start
        _check_places(q_start, k_start)
        self.accepts("attention", arrays, options, CONTRACT, q, k, v, caller="attention_partial")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
            raise UnsupportedProblem("attention_partial", ["gradients (attention has them)"])
        factor = scale_of(scale, q)
        score_factor(factor, CONTRACT, "attention_partial")
        left, right = (None, None) if window is None else window
        inputs = AttentionInputs(
            q,
            k,
            v,
            kv_lengths=int64(lengths("attention_partial", "kv_lengths", kv_lengths, k.shape[2])),
            q_start=starts(q_start, q),
            k_start=starts(k_start, q),
            causal=causal,
            scale=factor,
            window_left=-1 if left is None else left,
            window_right=-1 if right is None else right,
        )
        count = max(1, -(-(k_start % SEGMENT + k.shape[2]) // SEGMENT))
        first = None if isinstance(q_start, Tensor) else int(q_start)
        return Partials(k_start // SEGMENT, *self.states(inputs, count), q.dtype, factor, causal, (left, right), first)

    def merge_partials(self, parts: Sequence[Partials], *, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` of parts in the order of their keys, forward only: out [B, H, S, D] in the dtype of q, lse float32 [B, H, S].

        Args:
            parts: at least one, of the same queries and options; each begins after the last segment of the one before it. What no
                part has must be what no query sees, such as the positions between text and image: that, and equal values of ``q_start``
                and ``kv_lengths`` that are tensors, is the caller's to see to, since a check would wait for the device.
            sinks: [H] logits after scaling, float32, bfloat16 or float16.

        Raises:
            ValueError: no parts, parts of different calls, parts that are out of order or share a segment, or sinks of another shape.
            TypeError: parts that are no Partials, sinks that are no float tensor. UnsupportedProblem: sinks whose gradient is asked for.

        Source: docs/contracts/sm90-v1.md, section 3.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("merge_partials: at least one part is needed")
        foreign: list[Any] = [part for part in parts if not isinstance(part, Partials)]
        if foreign:
            raise TypeError(f"merge_partials: parts must be results of attention_partial; got {type(foreign[0]).__name__}")
        _check_parts(parts, sinks)
        for before, after in zip(parts, parts[1:], strict=False):
            if after.first < before.first + before.segments:
                order = f"segment {after.first} comes after segment {before.first + before.segments - 1}"
                raise ValueError(f"merge_partials: parts must ascend and cut keys at multiples of {SEGMENT}; {order}")
        n, l, o = (torch.cat([getattr(part, name) for part in parts]) for name in ("n", "l", "o"))
        return self.merge(n, l, o, None if sinks is None else sinks.float(), parts[0].dtype)


def _check_places(q_start: Any, k_start: Any) -> None:
    for name, start, kinds, what in (
        ("q_start", q_start, (Integral, Tensor), "an integer or an integer tensor [B]"),
        ("k_start", k_start, (Integral,), "an integer"),
    ):
        if isinstance(start, bool) or not isinstance(start, kinds):
            raise TypeError(f"attention_partial: {name} must be {what}; got {start!r}")


def _check_parts(parts: Sequence[Partials], sinks: Tensor | None) -> None:
    for name, values in (
        ("shape of the queries", [list(part.o.shape[1:]) for part in parts]),
        *((name, [getattr(part, name) for part in parts]) for name in ("dtype", "scale", "causal", "window")),
        ("q_start", [part.q_start for part in parts if part.q_start is not None]),
        ("device", [part.o.device for part in parts]),
    ):
        for value in values:
            if value != values[0]:
                raise ValueError(f"merge_partials: parts must be of one call over its keys; got {name} {values[0]} and {value}")
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"merge_partials: sinks must be a float32, bfloat16 or float16 tensor; got {getattr(sinks, 'dtype', sinks)}")
    if torch.is_grad_enabled() and sinks.requires_grad:
        raise UnsupportedProblem("merge_partials", ["gradients (attention has them)"])
    if sinks.device != parts[0].n.device:
        raise ValueError(f"merge_partials: sinks must be on the device of the parts, {parts[0].n.device}; got {sinks.device}")
    heads = parts[0].n.shape[2]
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"merge_partials: sinks must have shape [H] = [{heads}]; got {list(sinks.shape)}")
