"""``attention`` of ``sm90-v1``, dense and packed: the readable definition, one batch item and one key tile at a time.

Source: docs/contracts/sm90-v1.md. Axes: K kv heads, R rows (query head in its group, then query), N keys of a tile, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attn_spec._sm90 import SEGMENT, STEP, key_tile, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_reference._chain import row_blocks
from attn_reference._elementary import ln
from attn_reference._fma import fma
from attn_reference._rounding import nearest
from attn_reference._segment import Segment, segments
from attn_reference._sm90_arithmetic import chain, ex2, halves

__all__ = ["State", "attention_backward", "attention_forward", "attention_states", "fold", "result"]

_LOG2_E = 1.44269502162933349609375  # 0x3FB8AA3B
_LN_2 = 0.693147182464599609375  # 0x3F317218
_SCORES = 1 << 17
"""Scores of a block of rows; no bit depends on it."""
_SINK_TILE = 128


@dataclass(frozen=True)
class State:
    """``n`` (maximum times c) and ``l`` [..., R], ``o`` [..., R, D], float32. ``n = -inf`` is dead."""

    n: Tensor
    l: Tensor
    o: Tensor


@dataclass(frozen=True)
class _Item:
    """One batch item or packed segment: halves in rows, keys on the grid of tiles, [K, cells, D]; cells without a key are zero."""

    segment: Segment

    @property
    def group(self) -> int:
        return self.segment.inputs.q.shape[1] // self.segment.inputs.k.shape[1]

    @property
    def tile(self) -> int:
        return key_tile(self.segment.inputs.q.shape[-1])

    @property
    def lead(self) -> int:
        """Cells before stored key 0: the grid begins at a segment."""
        return self.segment.positions.k_start % SEGMENT

    @property
    def cells(self) -> int:
        return max(1, -(-(self.lead + self.segment.positions.used_keys) // self.tile)) * self.tile

    @property
    def factor(self) -> Tensor:
        return self.constant(score_factor(self.segment.inputs.scale))

    def constant(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=self.segment.inputs.q.device)

    def rows(self, tensor: Tensor) -> Tensor:
        """[H, S, ...] to [K, R, ...]."""
        return tensor.reshape(self.segment.inputs.k.shape[1], self.group * self.segment.positions.queries, *tensor.shape[2:])

    def heads(self, tensor: Tensor) -> Tensor:
        """[K, R, ...] to [H, S, ...]."""
        return tensor.reshape(self.segment.inputs.q.shape[1], self.segment.positions.queries, *tensor.shape[2:])

    def keys(self, tensor: Tensor) -> Tensor:
        stored = self.segment.key_rows(tensor)
        cells = stored.new_zeros(stored.shape[0], self.cells, stored.shape[2])
        used = self.segment.positions.used_keys
        cells[:, self.lead : self.lead + used] = stored[:, :used]
        return cells

    def visible(self) -> Tensor:
        """bool [R, cells]."""
        used, visible = self.segment.positions.used_keys, self.segment.visible()
        cells = visible.new_zeros(visible.shape[0], self.cells)
        cells[:, self.lead : self.lead + used] = visible[:, :used]
        return cells.repeat(self.group, 1)

    def tiles(self) -> Iterator[slice]:
        for begin in range(0, self.cells, self.tile):
            yield slice(begin, begin + self.tile)

    def blocks(self) -> Iterator[slice]:
        rows = self.group * self.segment.positions.queries
        return row_blocks(rows, self.segment.inputs.k.shape[1] * self.cells, _SCORES)

    def sinks(self) -> Tensor | None:
        """The sink of each row, [K, R]."""
        sinks = self.segment.inputs.sinks
        return None if sinks is None else self.rows(sinks.unsqueeze(-1).expand(-1, self.segment.positions.queries))

    def scores(self, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        """q [K, R, D], k [K, cells, D] -> unscaled scores [K, R, cells], -inf where masked."""
        return torch.where(visible, chain(q, k.transpose(-1, -2)), -torch.inf)


def attention_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out (layout and dtype of q) and LSE (float32, ``inputs.row_shape``)."""
    out = torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    lse = torch.full(inputs.row_shape, -torch.inf, device=inputs.q.device)
    for segment in segments(inputs):
        item = _Item(segment)
        q, k, v, visible = item.rows(segment.query_rows(inputs.q)), item.keys(inputs.k), item.keys(inputs.v), item.visible()
        sinks = item.sinks()
        rows_of_out, rows_of_lse = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
        for block in item.blocks():
            states = segment_states(item.scores(q[:, block], k, visible[block]), v, item.factor, item.tile)
            found, rows_of_lse[:, block] = result(fold(states), None if sinks is None else sinks[:, block])
            rows_of_out[:, block] = nearest(found, q.dtype)
        segment.query_rows(out).copy_(item.heads(rows_of_out))
        segment.row_values(lse).copy_(item.heads(rows_of_lse))
    return out, lse


def attention_states(inputs: AttentionInputs, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """n and l float32 [count, *row_shape] and o [count, *row_shape, D] of the segments, before their merge; dense inputs."""
    shape = (count, *inputs.row_shape)
    n = torch.full(shape, -torch.inf, device=inputs.q.device)
    l, o = torch.zeros_like(n), n.new_zeros(*shape, inputs.q.shape[-1])
    for segment in segments(inputs):
        item = _Item(segment)
        q, k, v = item.rows(segment.query_rows(inputs.q)), item.keys(inputs.k), item.keys(inputs.v)
        for index, state in enumerate(segment_states(item.scores(q, k, item.visible()), v, item.factor, item.tile)):
            for whole, part in ((n, state.n), (l, state.l), (o, state.o)):
                whole[index, segment.index] = item.heads(part)
    return n, l, o


def segment_states(scores: Tensor, v: Tensor, factor: Tensor, tile: int) -> list[State]:
    """The state of every segment, ascending. scores [K, R, cells], v half [K, cells, D]; cell 0 begins a segment."""
    states = []
    for begin in range(0, scores.shape[-1], SEGMENT):
        n = scores.new_full(scores.shape[:-1], -torch.inf)
        classes, o = scores.new_zeros(*n.shape, 8), scores.new_zeros(*n.shape, v.shape[-1])
        for first in range(begin, min(begin + SEGMENT, scores.shape[-1]), tile):
            s = scores[..., first : first + tile]
            following = torch.maximum(n, s.amax(-1) * factor)
            origin = torch.where(following == -torch.inf, 0.0, following)
            p = ex2(fma(s, factor, -origin.unsqueeze(-1)))
            alpha = ex2(n - origin).unsqueeze(-1)
            classes = fma(classes, alpha, halves(p, 8))
            o = chain(nearest(p, v.dtype), v[:, first : first + tile], o * alpha)
            n = following
        states.append(State(n, halves(classes).squeeze(-1), o))
    return states


def fold(states: list[State]) -> State:
    """Segments merged left to right: dead ones change nothing, the first live one is copied."""
    first, *rest = states
    for state in rest:
        first = _merged(first, state)
    return first


def _merged(left: State, right: State) -> State:
    n = torch.maximum(left.n, right.n)
    a, b = ex2(left.n - n), ex2(right.n - n)
    both = State(n, fma(right.l, b, left.l * a), fma(right.o, b.unsqueeze(-1), left.o * a.unsqueeze(-1)))
    takes_right, keeps_left = left.n == -torch.inf, right.n == -torch.inf

    def chosen(merged: Tensor, old: Tensor, new: Tensor) -> Tensor:
        axes = (*takes_right.shape, *(1,) * (merged.ndim - takes_right.ndim))
        return torch.where(keeps_left.reshape(axes), old, torch.where(takes_right.reshape(axes), new, merged))

    return State(n, chosen(both.l, left.l, right.l), chosen(both.o, left.o, right.o))


def result(state: State, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 out [..., R, D] and LSE [..., R] of a merged state and the sinks of its rows, [..., R]."""
    dead = state.n == -torch.inf
    n, total, a = state.n, state.l, torch.ones_like(state.n)
    of_dead = torch.full_like(n, -torch.inf)
    if sink is not None:
        logit = sink * _LOG2_E
        n = torch.maximum(state.n, logit)
        a = ex2(state.n - n)
        merged = fma(total, a, ex2(logit - n))
        present = sink != -torch.inf
        n, total, a = torch.where(present, n, state.n), torch.where(present, merged, total), torch.where(present, a, 1.0)
        of_dead = sink
    lse = fma(n, torch.full_like(n, _LN_2), ln(total))
    out = state.o * (a / total).unsqueeze(-1)
    return torch.where(dead.unsqueeze(-1), 0.0, out), torch.where(dead, of_dead, lse)


def attention_backward(
    inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each with the shape and dtype of its input."""
    found = inputs.gradients(needs, torch.zeros)
    for segment in segments(inputs):
        parts = _item_backward(_Item(segment), dout, dlse, out, lse)
        if "q" in found:
            segment.query_rows(found["q"]).copy_(parts["q"])
        for name in found.keys() & {"k", "v"}:
            used = segment.positions.used_keys
            segment.key_rows(found[name])[:, :used] = parts[name]
        if "sinks" in found:
            found["sinks"] = found["sinks"] + parts["sinks"]
    return found


def _item_backward(item: _Item, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """q [H, S, D], k and v [K, used keys, D] in half, sinks float32 [H]."""
    segment, inputs = item.segment, item.segment.inputs
    q, do, stored = (item.rows(segment.query_rows(tensor)) for tensor in (inputs.q, dout, out))
    k, v, visible = item.keys(inputs.k), item.keys(inputs.v), item.visible()
    delta = halves(do.float() * stored.float()).squeeze(-1)
    if dlse is not None:
        delta = delta - item.rows(segment.row_values(dlse).float())
    base = item.rows(segment.row_values(lse)) * _LOG2_E
    base = torch.where(base == -torch.inf, torch.inf, base)
    probs = q.new_zeros((*q.shape[:2], item.cells))
    gradients = torch.zeros_like(probs)
    for block in item.blocks():
        shown = visible[block]
        p = ex2(fma(item.scores(q[:, block], k, shown), item.factor, -base[:, block].unsqueeze(-1)))
        dp = chain(do[:, block], v.transpose(-1, -2))
        ds = p * (dp - delta[:, block].unsqueeze(-1))
        probs[:, block], gradients[:, block] = (nearest(torch.where(shown, x, 0.0), q.dtype) for x in (p, ds))
    dq = q.new_zeros(q.shape, dtype=torch.float32)
    for tile in item.tiles():
        dq = dq + chain(gradients[..., tile], k[:, tile])
    scale = item.constant(inputs.scale)
    used = slice(item.lead, item.lead + segment.positions.used_keys)
    return {
        "q": item.heads(nearest(dq * scale, q.dtype)),
        "k": nearest(_over_queries(item, gradients[..., used], q) * scale, q.dtype),
        "v": nearest(_over_queries(item, probs[..., used], do), q.dtype),
        "sinks": _dsinks(item, delta, base),
    }


def _over_queries(item: _Item, weights: Tensor, rows: Tensor) -> Tensor:
    """The chain over (head in its group, query): weights [K, R, T], rows [K, R, D] -> float32 [K, T, D]. Every head begins a step."""

    def stepped(tensor: Tensor) -> Tensor:
        heads = tensor.unflatten(1, (item.group, item.segment.positions.queries))
        missing = -heads.shape[2] % STEP
        return torch.nn.functional.pad(heads, (0, 0, 0, missing)).flatten(1, 2)

    return chain(stepped(weights).transpose(-1, -2), stepped(rows))


def _dsinks(item: _Item, delta: Tensor, base: Tensor) -> Tensor:
    """float32 [H]: tiles of 128 queries by halves, then ascending from +0."""
    sinks = item.sinks()
    if sinks is None:
        return delta.new_zeros(0)
    terms = item.heads(torch.where(sinks == -torch.inf, 0.0, -(ex2(sinks * _LOG2_E - base) * delta)))
    count = -(-terms.shape[-1] // _SINK_TILE)
    tiles = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % _SINK_TILE)).unflatten(-1, (count, _SINK_TILE))
    total = terms.new_zeros(terms.shape[0])
    for tile in halves(tiles).squeeze(-1).unbind(-1):
        total = total + tile
    return total
