"""``joint_attn_softmax`` of ``ordered-v1``: rows on the last axis, prompt padding by logical compaction."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_reference._chain import row_blocks
from attn_reference._rounding import stored
from attn_reference._row import RowState, row_delta, row_state, score_gradient
from attn_reference._scores import SCORE_BLOCK
from attn_reference._tile import TILE, TileLayout

__all__ = ["row_groups", "softmax_backward", "softmax_forward"]


def softmax_forward(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scores [..., T], mask bool [B, T] or None -> probs of ``out_dtype``, row maximum and row sum (float32, scores.shape[:-1])."""
    rows = scores.reshape(-1, scores.shape[-1])
    probs = rows.new_empty(rows.shape, dtype=out_dtype)
    row_max, row_sum = (rows.new_empty(rows.shape[:1], dtype=torch.float32) for _ in range(2))
    for block, layout, removed in row_groups(scores, mask, TILE):
        x = rows[block].float()
        masked = (x == -torch.inf) | removed
        state = row_state(x, masked, layout)
        probs[block] = stored(state.probabilities(x, masked), out_dtype)
        row_max[block], row_sum[block] = state.max, state.sum
    return probs.reshape(scores.shape), row_max.reshape(scores.shape[:-1]), row_sum.reshape(scores.shape[:-1])


def softmax_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """dprobs [..., T] of any float dtype -> dscores in the dtype of scores."""
    rows, upstream = scores.reshape(-1, scores.shape[-1]), dprobs.reshape(-1, scores.shape[-1])
    gradient = torch.empty(rows.shape, dtype=scores.dtype, device=scores.device)
    top, total = row_max.reshape(-1), row_sum.reshape(-1)
    for block, layout, removed in row_groups(scores, mask, TILE):
        x, dp = rows[block].float(), upstream[block].float()
        masked = (x == -torch.inf) | removed
        probs = RowState(top[block], total[block]).probabilities(x, masked)
        delta = row_delta(probs, dp, masked, layout)
        gradient[block] = stored(score_gradient(probs, dp, delta, masked), scores.dtype)
    return gradient.reshape(scores.shape)


def row_groups(scores: Tensor, mask: Tensor | None, tile: int) -> Iterator[tuple[slice, TileLayout, Tensor]]:
    """Blocks of rows that share one mask, their layout in tiles of ``tile`` slots, and the removed keys, bool [T]."""
    keys, device = scores.shape[-1], scores.device
    count = scores.numel() // keys
    items = 1 if mask is None else mask.shape[0]
    for index in range(items):
        kept = None if mask is None else mask[index]
        layout = TileLayout.of(keys, device, kept=kept, tile=tile)
        removed = torch.zeros(keys, dtype=torch.bool, device=device) if kept is None else ~kept
        first, rows = index * (count // items), count // items
        for block in row_blocks(rows, keys, SCORE_BLOCK):
            yield slice(first + block.start, first + block.stop), layout, removed
