"""``attention`` of ``ordered-v1``, dense and packed: forward and backward, each a composition of chains and softmax rows."""

from __future__ import annotations

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_reference._chain import chain, ordered_sum, row_blocks
from attn_reference._rounding import stored
from attn_reference._row import RowState, row_delta, row_state, score_gradient
from attn_reference._scores import SCORE_BLOCK, Grouped
from attn_reference._segment import Segment, fresh_results, segments

__all__ = ["attention_backward", "attention_forward"]


def attention_forward(inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (layout of q, V columns), LSE, row maximum and row sum (float32, ``inputs.row_shape``)."""
    out, lse, row_max, row_sum = fresh_results(inputs, out_dtype)
    for segment in segments(inputs):
        result, state = _segment_forward(segment)
        segment.query_rows(out).copy_(stored(result, out_dtype))
        segment.row_values(lse).copy_(state.log_sum_exp())
        segment.row_values(row_max).copy_(state.max)
        segment.row_values(row_sum).copy_(state.sum)
    return out, lse, row_max, row_sum


def _segment_forward(segment: Segment) -> tuple[Tensor, RowState]:
    """float32 out [H, S, V] and the row states [H, S]."""
    group = Grouped(segment)
    out = group.v.new_zeros(group.kv_heads, group.rows, group.v.shape[-1])
    row_max, row_sum = out.new_zeros(out.shape[:-1]), out.new_zeros(out.shape[:-1])
    for block in row_blocks(group.rows, group.kv_heads * segment.positions.keys, SCORE_BLOCK):
        scores, masked = group.scores(block)
        state = row_state(scores, masked, group.layout, None if group.sinks is None else group.sinks[:, block])
        probs, terms = _weights(group, block, state.probabilities(scores, masked), masked)
        out[:, block] = chain(probs, group.v, terms=terms)
        row_max[:, block], row_sum[:, block] = state.max, state.sum
    return group.ungrouped(out), RowState(group.ungrouped(row_max), group.ungrouped(row_sum))


def _weights(group: Grouped, block: slice, probs: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the values after dropout, and the pairs that have a term in the chains of out and dv."""
    dropout = group.dropout(block)
    if dropout is None:
        return probs, ~masked
    kept, scale = dropout
    return probs * scale, ~masked & kept


def attention_backward(
    inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks, bias), each with the shape and dtype of its input."""
    found = inputs.gradients(needs, torch.zeros)  # zero where no segment writes
    for segment in segments(inputs):
        state = RowState(segment.row_values(row_max), segment.row_values(row_sum))
        parts = _segment_backward(segment, segment.query_rows(dout), None if dlse is None else segment.row_values(dlse), state, needs)
        if "q" in parts:
            segment.query_rows(found["q"]).copy_(stored(parts["q"], inputs.q.dtype))
        for name, tensor in (("k", inputs.k), ("v", inputs.v)):
            if name in parts:
                segment.key_rows(found[name]).copy_(stored(parts[name], tensor.dtype))
        if "sinks" in parts:
            found["sinks"] = found["sinks"] + ordered_sum(parts["sinks"], parts["sinks"].new_zeros(found["sinks"].shape[0], 1)).squeeze(-1)
        if "bias" in parts:
            into = segment.index if found["bias"].shape[0] > 1 else 0
            found["bias"][into] = ordered_sum(parts["bias"], found["bias"][into])
    return {name: stored(gradient, gradient.dtype) if name in ("sinks", "bias") else gradient for name, gradient in found.items()}


def _segment_backward(segment: Segment, dout: Tensor, dlse: Tensor | None, state: RowState, needs: frozenset[str]) -> dict[str, Tensor]:
    """float32 gradients of one segment: q [H, S, D], k, v [K, T, *], and per row: sinks [H, S], bias [H, S, T]."""
    group = Grouped(segment)
    upstream = group.grouped(dout)
    max_, sum_ = group.grouped(state.max), group.grouped(state.sum)
    cotangent = None if dlse is None else group.grouped(dlse)
    dq, dk, dv = torch.zeros_like(group.q), torch.zeros_like(group.k), torch.zeros_like(group.v)
    dsinks = torch.zeros_like(max_)
    dscores = max_.new_zeros((*max_.shape, segment.positions.keys)) if "bias" in needs else None
    for block in row_blocks(group.rows, group.kv_heads * segment.positions.keys, SCORE_BLOCK):
        rows = RowState(max_[:, block], sum_[:, block])
        scores, masked = group.scores(block)
        probs = rows.probabilities(scores, masked)
        if "v" in needs:
            weights, terms = _weights(group, block, probs, masked)
            dv = chain(weights.transpose(-1, -2), upstream[:, block], terms=terms.transpose(-1, -2), start=dv)
        if not needs - {"v"}:
            continue
        dprobs = _dprobs(group, block, upstream[:, block])
        delta = row_delta(probs, dprobs, masked, group.layout, None if cotangent is None else cotangent[:, block])
        gradient = score_gradient(probs, dprobs, delta, masked)
        if "q" in needs:
            dq[:, block] = chain(gradient, group.k, terms=~masked) * group.scale
        if "k" in needs:
            dk = chain(gradient.transpose(-1, -2), group.q[:, block], terms=~masked.transpose(-1, -2), start=dk)
        if "sinks" in needs and group.sinks is not None:
            sink = group.sinks[:, block]
            dsinks[:, block] = torch.where(sink == -torch.inf, 0.0, -rows.sink_probability(sink) * delta)
        if dscores is not None:
            dscores[:, block] = gradient
    parts = {"q": group.ungrouped(dq), "k": dk * group.scale, "v": dv, "sinks": group.ungrouped(dsinks)}
    if dscores is not None:
        parts["bias"] = group.ungrouped(dscores)
    return {name: part for name, part in parts.items() if name in needs}


def _dprobs(group: Grouped, block: slice, upstream: Tensor) -> Tensor:
    """dP of each pair: the chain over the value dim, with dropout scaled where kept and +0 where dropped."""
    dprobs = chain(upstream, group.v.transpose(-1, -2))
    dropout = group.dropout(block)
    if dropout is None:
        return dprobs
    kept, scale = dropout
    return torch.where(kept, dprobs * scale, 0.0)
