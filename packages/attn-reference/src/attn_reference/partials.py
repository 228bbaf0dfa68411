"""Attention of ``sm90-v1`` in parts: the states of the segments of some keys, and their merge. The bits of one call over all keys.

Cut keys at multiples of 1024 positions, over devices or in time; the merge is a fold from left to right and accepts nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec._sm90 import CONTRACT, SEGMENT, score_factor
from attn_spec.torch import AttentionInputs
from attn_spec.torch._acceptance import Acceptance
from attn_spec.torch._arguments import int64, lengths, scale_of, starts
from torch import Tensor

from attn_reference._host_kernels import KERNELS as HOST
from attn_reference._host_kernels import unavailable
from attn_reference._ieee import keeps_subnormals
from attn_reference._pytorch_kernels import KERNELS as DEFINITION
from attn_reference._rounding import nearest
from attn_reference._sm90_attention import State, fold, result
from attn_reference.backend import BACKEND

__all__ = ["Partials", "attention_partial", "merge_partials"]

_CHECK = Acceptance(BACKEND, "pytorch")


@dataclass(frozen=True)
class Partials:
    """States of consecutive segments before their merge.

    ``first`` is the index of the first segment. ``n`` (maximum times c) and ``l`` are float32 [segments, B, H, S], ``o`` float32 [segments,
    B, H, S, D]; a segment without a visible key has n = -inf. ``dtype`` is that of q, ``scale`` that of the call.
    """

    first: int
    n: Tensor
    l: Tensor
    o: Tensor
    dtype: torch.dtype
    scale: float

    @property
    def segments(self) -> int:
        return self.n.shape[0]


def attention_partial(
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
        causal, scale, window, kv_lengths: as in ``attention``.

    Raises:
        TypeError, ValueError: bad dtype, shape, device or scale. UnsupportedProblem: what the contract lacks, gradients included.

    Source: docs/contracts/sm90-v1.md, sections 3 and 5.
    """
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "k_start": k_start}
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v, "kv_lengths": kv_lengths}
    (arrays if isinstance(q_start, Tensor) else options)["q_start"] = q_start
    _CHECK("attention", arrays, options, CONTRACT, q, k, v)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise UnsupportedProblem("attention_partial", ["gradients (attention has them)"])
    factor = scale_of(scale, q)
    score_factor(factor)
    left, right = (None, None) if window is None else window
    inputs = AttentionInputs(
        q,
        k,
        v,
        kv_lengths=int64(lengths("kv_lengths", kv_lengths, k.shape[2])),
        q_start=starts(q_start, q),
        k_start=starts(k_start, q),
        causal=causal,
        scale=factor,
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
    )
    count = max(1, -(-(k_start % SEGMENT + k.shape[2]) // SEGMENT))
    compiled = q.device.type == "cpu" and unavailable() is None
    states = (HOST if compiled else DEFINITION).attention_sm90_states(inputs, count)
    return Partials(k_start // SEGMENT, *states, q.dtype, factor)


def merge_partials(parts: Sequence[Partials], *, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of parts in the order of their keys: out [B, H, S, D] in the dtype of q, lse float32 [B, H, S].

    Args:
        parts: at least one, of the same queries, scale and dtype; each begins after the last segment of the one before it.
        sinks: [H] logits after scaling, float32, bfloat16 or float16.

    Raises:
        ValueError: no parts, parts of different calls, parts that are out of order or share a segment, or sinks of another shape.
        TypeError: sinks that are no float tensor.

    Source: docs/contracts/sm90-v1.md, section 3.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("merge_partials: at least one part is needed")
    _check_parts(parts, sinks)
    for before, after in zip(parts, parts[1:], strict=False):
        if after.first < before.first + before.segments:
            order = f"segment {after.first} comes after segment {before.first + before.segments - 1}"
            raise ValueError(f"merge_partials: parts must ascend and cut keys at multiples of {SEGMENT}; {order}")
    states = [State(part.n[index], part.l[index], part.o[index]) for part in parts for index in range(part.segments)]
    return _merged(states, sinks, parts[0].dtype)


def _check_parts(parts: Sequence[Partials], sinks: Tensor | None) -> None:
    calls = dict.fromkeys((tuple(part.o.shape[1:]), part.dtype, part.scale) for part in parts)
    if len(calls) > 1:
        found = ", ".join(f"[B, H, S, D] = {list(shape)} of {dtype} with scale {scale}" for shape, dtype, scale in calls)
        raise ValueError(f"merge_partials: parts must be of the same queries, dtype and scale; got {found}")
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"merge_partials: sinks must be a float32, bfloat16 or float16 tensor; got {getattr(sinks, 'dtype', sinks)}")
    heads = parts[0].n.shape[2]
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"merge_partials: sinks must have shape [H] = [{heads}]; got {list(sinks.shape)}")


@keeps_subnormals
def _merged(states: list[State], sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    state = fold(states)
    out, lse = result(state, None if sinks is None else sinks.float()[:, None].expand(state.n.shape))
    return nearest(out, dtype), lse
