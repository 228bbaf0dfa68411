"""4-bit attention over batch items or packed segments: ``nvfp4-ordered-v1`` (``_qat_item``) and ``nvfp4-sm90-v1`` (``_qat_sm90``)."""

from __future__ import annotations

import torch
from attn_spec import QATConfig
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_reference import _qat_sm90
from attn_reference._chain import ordered_sum
from attn_reference._qat_item import Item
from attn_reference._rounding import stored
from attn_reference._segment import fresh_results, segments

__all__ = ["qat_backward", "qat_forward"]


def qat_forward(inputs: AttentionInputs, config: QATConfig, contract: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (layout and dtype of q), LSE, and the row maximum and sum (float32, ``inputs.row_shape``)."""
    if contract == _qat_sm90.CONTRACT:
        return _qat_sm90.forward(inputs, config)
    out, lse, row_max, row_sum = fresh_results(inputs, inputs.q.dtype)
    for segment in segments(inputs):
        if segment.positions.queries:
            result, state = Item(segment, config).forward()
            segment.query_rows(out).copy_(stored(result, out.dtype))
            segment.row_values(lse).copy_(state.log_sum_exp())
            segment.row_values(row_max).copy_(state.max)
            segment.row_values(row_sum).copy_(state.sum)
    return out, lse, row_max, row_sum


def qat_backward(
    inputs: AttentionInputs,
    config: QATConfig,
    contract: str,
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    needs: frozenset[str],
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each with the shape and dtype of its input."""
    if contract == _qat_sm90.CONTRACT:
        return _qat_sm90.backward(inputs, config, dout, dlse, saved, needs)
    found = inputs.gradients(needs, torch.zeros)
    for segment in segments(inputs):
        if not segment.positions.queries:
            continue
        parts = Item(segment, config).backward(segment.query_rows(dout), None if dlse is None else segment.row_values(dlse))
        if "q" in found:
            segment.query_rows(found["q"]).copy_(stored(parts["q"], inputs.q.dtype))
        for name in found.keys() & {"k", "v"}:
            segment.key_rows(found[name]).copy_(stored(parts[name], inputs.k.dtype))
        if "sinks" in found:
            heads = len(found["sinks"])
            found["sinks"] = found["sinks"] + ordered_sum(parts["sinks"], parts["sinks"].new_zeros(heads, 1)).squeeze(-1)
    if "sinks" in found:
        found["sinks"] = stored(found["sinks"], torch.float32)
    return found
