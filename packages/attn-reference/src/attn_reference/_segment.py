"""One batch item, or one packed segment, as the contract sees it: heads first, with its own lengths and positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_reference._visibility import Positions, visible_pairs

__all__ = ["Segment", "fresh_results", "segments"]


@dataclass(frozen=True)
class Segment:
    """A view into the tensors of one call.

    ``index`` is the batch item or segment; ``rows`` and ``stored`` are slices of the packed query and key axes, None when dense.
    """

    inputs: AttentionInputs
    index: int
    positions: Positions
    rows: slice | None = None
    stored: slice | None = None

    def query_rows(self, tensor: Tensor) -> Tensor:
        """The view [H, S, X] of a tensor laid out like q."""
        return tensor[self.index] if self.rows is None else tensor[self.rows].transpose(0, 1)

    def key_rows(self, tensor: Tensor) -> Tensor:
        """The view [K, T, X] of a tensor laid out like k."""
        return tensor[self.index] if self.stored is None else tensor[self.stored].transpose(0, 1)

    def row_values(self, tensor: Tensor) -> Tensor:
        """The view [H, S] of a tensor laid out like LSE."""
        return tensor[self.index] if self.rows is None else tensor[:, self.rows]

    def bias(self) -> Tensor | None:
        """[H|1, S|1, T|1]."""
        bias = self.inputs.bias
        return None if bias is None else bias[self.index if bias.shape[0] > 1 else 0]

    def kept_keys(self) -> Tensor | None:
        """bool [T], the keys that remain after compaction; None when all do."""
        mask = self.inputs.key_mask
        return None if mask is None else mask[self.index]

    def visible(self) -> Tensor:
        """bool [S, T]."""
        inputs = self.inputs
        return visible_pairs(
            self.positions,
            inputs.q.device,
            causal=inputs.causal,
            left=inputs.window_left,
            right=inputs.window_right,
            query_mask=None if inputs.query_mask is None else inputs.query_mask[self.index],
            key_mask=self.kept_keys(),
        )


def fresh_results(inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, LSE, row maximum and row sum as they are where no segment writes."""
    out = inputs.q.new_zeros(inputs.out_shape, dtype=out_dtype)
    lse, row_max, row_sum = (inputs.q.new_full(inputs.row_shape, value, dtype=torch.float32) for value in (-torch.inf, -torch.inf, 0.0))
    return out, lse, row_max, row_sum


def segments(inputs: AttentionInputs) -> Iterator[Segment]:
    """Batch items, or packed segments, in order."""
    return _packed(inputs) if inputs.packed else _dense(inputs)


def _dense(inputs: AttentionInputs) -> Iterator[Segment]:
    batch, _, queries, _ = inputs.q.shape
    keys = inputs.k.shape[2]
    for index in range(batch):
        used = _at(inputs.kv_lengths, index, keys)
        if not 0 <= used <= keys:
            raise ValueError(f"attention: kv_lengths must lie in [0, {keys}]; got {used} for batch item {index}")
        k_start = _at(inputs.k_start, index, 0)
        q_start = _at(inputs.q_start, index, k_start + used - queries)
        yield Segment(inputs, index, Positions(queries, keys, used, q_start, k_start))


def _packed(inputs: AttentionInputs) -> Iterator[Segment]:
    rows = _slices("q", inputs.cu_seqlens_q, inputs.seqlens_q, inputs.q.shape[0])
    stored = _slices("k", inputs.cu_seqlens_k, inputs.seqlens_k, inputs.k.shape[0])
    for index, (row, key) in enumerate(zip(rows, stored, strict=True)):
        queries, keys = row.stop - row.start, key.stop - key.start
        yield Segment(inputs, index, Positions(queries, keys, keys, keys - queries, 0), row, key)


def _slices(name: str, offsets: Tensor | None, used: Tensor | None, total: int) -> list[slice]:
    assert offsets is not None
    bounds = offsets.tolist()
    if bounds[0] < 0 or bounds[-1] > total or bounds != sorted(bounds):
        raise ValueError(f"attention_varlen: cu_seqlens_{name} must not decrease and must lie in [0, {total}]; got {bounds}")
    sizes = [end - begin for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
    lengths = sizes if used is None else used.tolist()
    if any(not 0 <= length <= size for length, size in zip(lengths, sizes, strict=True)):
        raise ValueError(f"attention_varlen: seqlens_{name} must lie between 0 and the segment sizes {sizes}; got {lengths}")
    return [slice(begin, begin + length) for begin, length in zip(bounds[:-1], lengths, strict=True)]


def _at(values: Tensor | None, index: int, default: int) -> int:
    return default if values is None else int(values[index])
