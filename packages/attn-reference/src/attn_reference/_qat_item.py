"""One batch item or packed segment of ``nvfp4-ordered-v1``: P and the two passes (docs/contracts/nvfp4-v1.md section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attn_spec import QATConfig
from torch import Tensor

from attn_reference._chain import chain, row_blocks
from attn_reference._qat_operand import operands
from attn_reference._row import RowState, row_delta, row_state, score_gradient
from attn_reference._scores import SCORE_BLOCK
from attn_reference._segment import Segment
from attn_reference._tile import TileLayout
from attn_reference.nvfp4 import rounded

__all__ = ["Item"]


@dataclass(frozen=True)
class _Block:
    """Rows [K, rows] of P: ``exponentials`` in their quantized form (+0 where masked), and the row states."""

    rows: slice
    scores: Tensor
    masked: Tensor
    state: RowState
    quantized: Tensor


class Item:
    """One segment, at least one query. The query heads of one kv head lie one after the other, as in ``ordered-v1``: row ``g * S + i`` is
    query i of head g of the group. ``keys`` counts logical keys."""

    def __init__(self, segment: Segment, config: QATConfig) -> None:
        inputs, kept = segment.inputs, segment.kept_keys()
        q, k, v = segment.query_rows(inputs.q), segment.key_rows(inputs.k), segment.key_rows(inputs.v)
        self.config, self.sinks = config, inputs.sinks
        self.heads, self.queries, self.head_dim = q.shape
        self.stored_keys = k.shape[1]
        self.index = torch.arange(self.stored_keys, device=k.device) if kept is None else kept.nonzero().squeeze(-1)
        self.kv_heads, self.keys = k.shape[0], self.index.numel()
        self.scale = torch.tensor(inputs.scale, dtype=torch.float32, device=q.device)
        self.visible = segment.visible()[:, self.index]
        self.layout = TileLayout.of(self.keys, q.device)
        self.q, self.k, self.v = operands(q, k[:, self.index], v[:, self.index], config)

    def _grouped(self, x: Tensor) -> Tensor:
        """[H, S, ...] to [K, R, ...]."""
        return x.reshape(self.kv_heads, self.heads // self.kv_heads * x.shape[1], *x.shape[2:])

    def _ungrouped(self, x: Tensor) -> Tensor:
        """[K, R, ...] to [H, S, ...]."""
        return x.reshape(self.heads, self.queries, *x.shape[2:])

    def _sinks(self) -> Tensor | None:
        """The sink of each row, [K, R]."""
        return None if self.sinks is None else self._grouped(self.sinks.unsqueeze(-1).expand(-1, self.queries))

    def _blocks(self) -> Iterator[_Block]:
        """P of every row, the same in both passes; no bit depends on the cut."""
        rows = self.heads // self.kv_heads * self.queries
        q, sinks = self._grouped(self.q.quantized), self._sinks()
        query = torch.arange(rows, device=q.device) % self.queries
        high = None
        if self.q.mean is not None:
            # The scores of the mean, the same for every query of a head: [K, G, T], then a row for each query.
            means = chain(self._grouped(self.q.mean), self.k.original.transpose(-1, -2)) * self.scale
            high = means.repeat_interleave(self.queries, dim=1)
        for block in row_blocks(rows, self.kv_heads * self.keys, SCORE_BLOCK):
            scores = chain(q[:, block], self.k.quantized.transpose(-1, -2)) * self.scale
            if high is not None:
                scores = scores + high[:, block]
            masked = (scores == -torch.inf) | ~self.visible[query[block]]
            state = row_state(scores, masked, self.layout, None if sinks is None else sinks[:, block])
            exponentials = torch.where(masked, 0.0, state.exponential(scores - state.max.unsqueeze(-1)))
            quantized = rounded(exponentials, outer=self.config.p_scale) if self.config.quantize_p else exponentials
            yield _Block(block, scores, masked, state, torch.where(masked, 0.0, quantized))

    def forward(self) -> tuple[Tensor, RowState]:
        """float32 out [H, S, D] and the row states [H, S]."""
        out = self._grouped(torch.zeros_like(self.q.original))
        top, total = out.new_zeros(out.shape[:-1]), out.new_zeros(out.shape[:-1])
        for block in self._blocks():
            out[:, block.rows] = _quotient(chain(block.quantized, self.v.quantized, terms=~block.masked), block.state.sum)
            top[:, block.rows], total[:, block.rows] = block.state.max, block.state.sum
        return self._ungrouped(out), RowState(self._ungrouped(top), self._ungrouped(total))

    def backward(self, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
        """float32 q [H, S, D], k and v [K, T, D] with +0 at removed keys, and per row: sinks [H, S]."""
        upstream, cotangent = self._grouped(dout.float()), None if dlse is None else self._grouped(dlse.float())
        q, k, v = (operand.backward(self.config) for operand in (self.q, self.k, self.v))
        q = self._grouped(q if self.q.mean is None else q + self.q.mean)
        dq, dk, dv, dsinks = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.new_zeros(q.shape[:-1])
        sinks = self._sinks()
        for block in self._blocks():
            rows, terms = block.rows, ~block.masked
            probs = block.state.probabilities(block.scores, block.masked)
            weights = _quotient(block.quantized, block.state.sum)
            dv = chain(weights.transpose(-1, -2), upstream[:, rows], terms=terms.transpose(-1, -2), start=dv)
            dprobs = chain(upstream[:, rows], v.transpose(-1, -2))
            paired = probs if self.config.high_precision_delta else weights
            delta = row_delta(paired, dprobs, block.masked, self.layout, None if cotangent is None else cotangent[:, rows])
            gradient = score_gradient(probs, dprobs, delta, block.masked)
            dq[:, rows] = chain(gradient, k, terms=terms) * self.scale
            dk = chain(gradient.transpose(-1, -2), q[:, rows], terms=terms.transpose(-1, -2), start=dk)
            if sinks is not None:
                sink = sinks[:, rows]
                dsinks[:, rows] = torch.where(sink == -torch.inf, 0.0, -block.state.sink_probability(sink) * delta)
        return {"q": self._ungrouped(dq), "k": self._stored(dk * self.scale), "v": self._stored(dv), "sinks": self._ungrouped(dsinks)}

    def _stored(self, x: Tensor) -> Tensor:
        """[K, logical keys, D] to [K, T, D]."""
        if self.keys == self.stored_keys:
            return x
        return x.new_zeros(x.shape[0], self.stored_keys, x.shape[2]).index_copy(1, self.index, x)


def _quotient(a: Tensor, total: Tensor) -> Tensor:
    """``RN_div(a, total)`` of a [..., X], +0 in rows without a term."""
    total = total.unsqueeze(-1)
    return torch.where(total == 0, 0.0, a / total)
