"""One batch item of ``nvfp4-ordered-v1``: operands, P and the two passes (docs/contracts/nvfp4-v1.md section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attn_spec import QATConfig
from torch import Tensor

from attn_reference._chain import chain, ordered_sum, row_blocks
from attn_reference._row import RowState, row_delta, row_state, score_gradient
from attn_reference._scores import SCORE_BLOCK
from attn_reference._tile import TileLayout
from attn_reference._visibility import Positions, visible_pairs
from attn_reference.nvfp4 import fake_quantize

__all__ = ["Item"]


@dataclass(frozen=True)
class _Operand:
    """float32 rows of Q, K or V: before and after quantization, and the mean that smoothing took away ([heads, 1, D])."""

    original: Tensor
    quantized: Tensor
    mean: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, config: QATConfig, *, quantize: bool, smooth: bool = False, transposed: bool = False) -> _Operand:
        """From [heads, tokens, D]; ``transposed`` puts the blocks along the tokens."""
        mean = _mean(x) if smooth else None
        original = x if mean is None else x - mean
        if not quantize:
            return cls(original, original, mean)
        if transposed:
            return cls(original, fake_quantize(original.transpose(-1, -2), outer=config.qkv_outer).transpose(-1, -2), mean)
        return cls(original, fake_quantize(original, outer=config.qkv_outer), mean)

    def backward(self, config: QATConfig) -> Tensor:
        """What the products of the backward read."""
        return self.quantized if config.quantized_backward else self.original


def _mean(x: Tensor) -> Tensor:
    """[heads, tokens, D] to [heads, 1, D]: rounded sums over tokens ascending, then one division."""
    total = ordered_sum(x, x.new_zeros(x.shape[0], 1, x.shape[2])) if x.shape[1] > 1 else x + 0.0
    return total / torch.full((), float(x.shape[1]), device=x.device)


@dataclass(frozen=True)
class _Block:
    """Rows [K, rows] of P: ``exponentials`` and their quantized form (+0 where masked), and the row states."""

    rows: slice
    scores: Tensor
    masked: Tensor
    state: RowState
    quantized: Tensor


class Item:
    """q [H, S, D], k and v [K, T, D] of one batch item, S and T at least 1; ``kept`` bool [T] names the keys that remain.

    The query heads of one kv head lie one after the other, as in ``ordered-v1``: row ``g * S + i`` is query i of head g of the group.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, *, causal: bool, scale: float, config: QATConfig) -> None:
        self.config = config
        self.heads, self.queries, self.head_dim = q.shape
        keys = k.shape[1]
        self.index = torch.arange(keys, device=k.device) if kept is None else kept.nonzero().squeeze(-1)
        self.stored_keys = keys
        k, v = k[:, self.index].float(), v[:, self.index].float()
        self.kv_heads, self.keys = k.shape[:2]
        self.scale = torch.tensor(scale, dtype=torch.float32, device=q.device)
        positions = Positions(self.queries, keys, keys, keys - self.queries, 0)
        visible = visible_pairs(positions, q.device, causal=causal, left=-1, right=-1, query_mask=None, key_mask=None)
        self.visible = visible[:, self.index]
        self.layout = TileLayout.of(self.keys, q.device)
        self.q = _Operand.of(q.float(), config, quantize=config.quantize_q, smooth=config.smooth_q)
        self.k = _Operand.of(k, config, quantize=config.quantize_k, smooth=config.smooth_k)
        self.v = _Operand.of(v, config, quantize=config.quantize_v, transposed=config.v_axis == "keys")

    def _grouped(self, x: Tensor) -> Tensor:
        """[H, S, X] to [K, R, X]."""
        return x.reshape(self.kv_heads, -1, x.shape[-1])

    def _blocks(self) -> Iterator[_Block]:
        """P of every row, the same in both passes; no bit depends on the cut."""
        rows = self.heads // self.kv_heads * self.queries
        q = self._grouped(self.q.quantized)
        query = torch.arange(rows, device=q.device) % self.queries
        high = None
        if self.q.mean is not None:
            # The scores of the mean, the same for every query of a head: [K, G, T], then a row for each query.
            means = chain(self._grouped(self.q.mean), self.k.original.transpose(-1, -2))
            high = means.repeat_interleave(self.queries, dim=1)
        for block in row_blocks(rows, self.kv_heads * self.keys, SCORE_BLOCK):
            scores = chain(q[:, block], self.k.quantized.transpose(-1, -2))
            if high is not None:
                scores = scores + high[:, block]
            scores = scores * self.scale
            masked = (scores == -torch.inf) | ~self.visible[query[block]]
            state = row_state(scores, masked, self.layout)
            exponentials = torch.where(masked, 0.0, state.exponential(scores - state.max.unsqueeze(-1)))
            quantized = fake_quantize(exponentials, outer=self.config.p_outer) if self.config.quantize_p else exponentials
            yield _Block(block, scores, masked, state, torch.where(masked, 0.0, quantized))

    def forward(self) -> Tensor:
        """float32 out [H, S, D]."""
        out = self._grouped(torch.zeros_like(self.q.original))
        for block in self._blocks():
            total = block.state.sum.unsqueeze(-1)
            out[:, block.rows] = _quotient(chain(block.quantized, self.v.quantized, terms=~block.masked), total)
        return out.reshape(self.heads, self.queries, self.head_dim)

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 dq [H, S, D], dk and dv [K, T, D] with +0 at removed keys."""
        upstream = self._grouped(dout.float())
        q, k, v = (operand.backward(self.config) for operand in (self.q, self.k, self.v))
        q = self._grouped(q if self.q.mean is None else q + self.q.mean)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in self._blocks():
            rows, terms = block.rows, ~block.masked
            probs = block.state.probabilities(block.scores, block.masked)
            weights = _quotient(block.quantized, block.state.sum.unsqueeze(-1))
            dv = chain(weights.transpose(-1, -2), upstream[:, rows], terms=terms.transpose(-1, -2), start=dv)
            dprobs = chain(upstream[:, rows], v.transpose(-1, -2))
            delta = row_delta(probs if self.config.high_precision_delta else weights, dprobs, block.masked, self.layout)
            gradient = score_gradient(probs, dprobs, delta, block.masked)
            dq[:, rows] = chain(gradient, k, terms=terms) * self.scale
            dk = chain(gradient.transpose(-1, -2), q[:, rows], terms=terms.transpose(-1, -2), start=dk)
        return dq.reshape(self.heads, self.queries, self.head_dim), self._stored(dk * self.scale), self._stored(dv)

    def _stored(self, x: Tensor) -> Tensor:
        """[K, logical keys, D] to [K, T, D]."""
        if self.keys == self.stored_keys:
            return x
        return x.new_zeros(x.shape[0], self.stored_keys, x.shape[2]).index_copy(1, self.index, x)


def _quotient(a: Tensor, total: Tensor) -> Tensor:
    """``RN_div(a, total)``, +0 in rows without a term."""
    return torch.where(total == 0, 0.0, a / total)
