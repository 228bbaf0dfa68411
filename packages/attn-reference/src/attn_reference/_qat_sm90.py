"""One pass each way of ``nvfp4-sm90-v1`` (docs/contracts/nvfp4-v1.md section 3): tensor-core steps over operands in NVFP4.

Axes as in ``_sm90_attention``: K kv heads, R rows (query head in its group, then query), keys on the grid of tiles ("cells").
"""

from __future__ import annotations

import torch
from attn_spec import QATConfig
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_reference._elementary import ln
from attn_reference._fma import fma
from attn_reference._qat_operand import Operand, operands
from attn_reference._rounding import nearest
from attn_reference._segment import Segment, fresh_results, segments
from attn_reference._sm90_arithmetic import chain, ex2, halves
from attn_reference._sm90_attention import _LN_2, _LOG2_E, _dsinks, _Item, _over_queries
from attn_reference.nvfp4 import rounded

__all__ = ["CONTRACT", "backward", "forward"]

CONTRACT = "nvfp4-sm90-v1"
_CLASSES = 8


class _Quantized:
    """Operands of one batch item or packed segment in half: rows of q [K, R, D], keys on the grid [K, cells, D]."""

    def __init__(self, segment: Segment, config: QATConfig) -> None:
        inputs = segment.inputs
        self.item, self.config, self.half = _Item(segment), config, inputs.q.dtype
        stored = segment.key_rows(inputs.k), segment.key_rows(inputs.v)
        q, k, v = operands(segment.query_rows(inputs.q), *stored, config)
        self.q, self.k, self.v = self._halves(q, k, v, lambda operand: operand.quantized)
        self.q_back, self.k_back, self.v_back = self._halves(q, k, v, lambda operand: operand.backward(config))
        self.visible = self.item.visible()
        self.decoding = self.item.constant(1.0) / self.item.constant(config.p_scale if config.quantize_p else 1.0)

    def _halves(self, q: Operand, k: Operand, v: Operand, which: object) -> tuple[Tensor, Tensor, Tensor]:
        assert callable(which)
        cells = [x.original.new_zeros(x.original.shape[0], self.item.cells, x.original.shape[2], dtype=self.half) for x in (k, v)]
        for cell, operand in zip(cells, (k, v), strict=True):
            cell[:, : operand.original.shape[1]] = nearest(which(operand), self.half)
        return self.item.rows(nearest(which(q), self.half)), cells[0], cells[1]

    def scores(self, block: slice) -> Tensor:
        return self.item.scores(self.q[:, block], self.k, self.visible[block])

    def exponentials(self, scores: Tensor, n: Tensor) -> Tensor:
        """e of rows with maxima n [K, rows]; masked pairs are +0."""
        origin = torch.where(n == -torch.inf, 0.0, n)
        return ex2(fma(scores, self.item.factor, -origin.unsqueeze(-1)))

    def codes_times_scales(self, e: Tensor, shown: Tensor) -> Tensor:
        """P in half, without the outer decoding scale; masked pairs are +0."""
        if not self.config.quantize_p:
            return nearest(torch.where(shown, e, 0.0), self.half)
        values = rounded(e, outer=self.config.p_scale, decode_outer=False)
        return nearest(torch.where(shown, values, 0.0), self.half)

    def sum_of_classes(self, terms: Tensor) -> Tensor:
        """[..., cells] to [...]: halves of each tile down to eight classes, tiles ascending, then halves of the classes."""
        total = terms.new_zeros(*terms.shape[:-1], _CLASSES)
        for tile in self.item.tiles():
            total = total + halves(terms[..., tile], _CLASSES)
        return halves(total).squeeze(-1)


def forward(inputs: AttentionInputs, config: QATConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, LSE, and n and l with the sink (float32, ``inputs.row_shape``); n is -inf and l 0 in a row without key and sink."""
    out, lse, row_max, row_sum = fresh_results(inputs, inputs.q.dtype)
    for segment in segments(inputs):
        if not segment.positions.queries:
            continue
        call = _Quantized(segment, config)
        item, sinks = call.item, call.item.sinks()
        rows_out = torch.zeros_like(call.q)
        values = [call.q.new_zeros(call.q.shape[:2], dtype=torch.float32) for _ in range(3)]
        for block in item.blocks():
            scores = call.scores(block)
            n = scores.amax(-1) * item.factor
            dead = n == -torch.inf
            sink = torch.full_like(n, -torch.inf) if sinks is None else sinks[:, block]
            logit = sink * _LOG2_E
            n = torch.maximum(n, logit)
            e = call.exponentials(scores, n)
            total = call.sum_of_classes(e) + ex2(logit - torch.where(n == -torch.inf, 0.0, n))
            o = chain(call.codes_times_scales(e, call.visible[block]), call.v)
            found = torch.where(dead.unsqueeze(-1), 0.0, o * (call.decoding / total).unsqueeze(-1))
            rows_out[:, block] = nearest(found, out.dtype)
            log = fma(n, torch.full_like(n, _LN_2), ln(total))
            for into, value in zip(values, (torch.where(dead, sink, log), n, total), strict=True):
                into[:, block] = value
        segment.query_rows(out).copy_(item.heads(rows_out))
        for whole, value in zip((lse, row_max, row_sum), values, strict=True):
            segment.row_values(whole).copy_(item.heads(value))
    return out, lse, row_max, row_sum


def backward(
    inputs: AttentionInputs,
    config: QATConfig,
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    needs: frozenset[str],
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each with the shape and dtype of its input."""
    found = inputs.gradients(needs, torch.zeros)
    for segment in segments(inputs):
        if not segment.positions.queries:
            continue
        parts = _segment_backward(_Quantized(segment, config), dout, dlse, saved)
        if "q" in found:
            segment.query_rows(found["q"]).copy_(parts["q"])
        for name in found.keys() & {"k", "v"}:
            segment.key_rows(found[name]).copy_(parts[name])
        if "sinks" in found:
            found["sinks"] = found["sinks"] + parts["sinks"]
    return found


def _segment_backward(call: _Quantized, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> dict[str, Tensor]:
    item, config, half = call.item, call.config, call.half
    segment = item.segment
    do, out = (item.rows(segment.query_rows(tensor)) for tensor in (dout.to(half), saved[0]))
    lse, n, total = (item.rows(segment.row_values(value)) for value in saved[1:])
    inverse = torch.where(total == 0, 0.0, 1.0 / total)
    decoding = torch.where(total == 0, 0.0, call.decoding / total)
    cotangent = torch.zeros_like(n) if dlse is None else item.rows(segment.row_values(dlse).float())
    delta = torch.zeros_like(n)
    weights, gradients = (call.q.new_zeros((*n.shape, item.cells)) for _ in range(2))
    for block in item.blocks():
        shown = call.visible[block]
        e = call.exponentials(call.scores(block), n[:, block])
        quantized = call.codes_times_scales(e, shown).float() * decoding[:, block].unsqueeze(-1)
        probs = torch.where(shown, e * inverse[:, block].unsqueeze(-1), 0.0)
        dp = chain(do[:, block], call.v_back.transpose(-1, -2))
        if config.high_precision_delta:
            found = call.sum_of_classes(torch.where(shown, probs * dp, 0.0))
        else:
            found = halves(do[:, block].float() * out[:, block].float()).squeeze(-1)
        delta[:, block] = found if dlse is None else found - cotangent[:, block]
        ds = probs * (dp - delta[:, block].unsqueeze(-1))
        weights[:, block], gradients[:, block] = (nearest(torch.where(shown, x, 0.0), half) for x in (quantized, ds))
    dq = torch.zeros_like(call.q, dtype=torch.float32)
    for tile in item.tiles():
        dq = dq + chain(gradients[..., tile], call.k_back[:, tile])
    scale = item.constant(segment.inputs.scale)
    used = slice(0, segment.positions.used_keys)
    base = lse * _LOG2_E
    return {
        "q": item.heads(nearest(dq * scale, half)),
        "k": nearest(_over_queries(item, gradients[..., used], call.q_back) * scale, half),
        "v": nearest(_over_queries(item, weights[..., used], do), half),
        "sinks": _dsinks(item, delta, torch.where(base == -torch.inf, torch.inf, base)),
    }
