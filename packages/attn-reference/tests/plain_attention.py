"""Attention by its formula, with ordinary autograd, in the dtype of q: float64 is the measure, float32 a plain computation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

INF = float("inf")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_start: int | Tensor | None = None,
    k_start: int | Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in the dtype of q; ``keep`` [B, H, S, T] is dropout's decision."""
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    used = torch.full((batch,), keys) if kv_lengths is None else kv_lengths.long()
    first_key = torch.zeros(batch, dtype=torch.int64) + (0 if k_start is None else k_start)
    first_query = first_key + used - queries if q_start is None else torch.zeros(batch, dtype=torch.int64) + q_start
    stored = torch.arange(keys)
    position = (first_query.view(-1, 1) + torch.arange(queries)).view(batch, 1, queries, 1)
    key = (first_key.view(-1, 1) + stored).view(batch, 1, 1, keys)
    visible = (stored < used.view(-1, 1)).view(batch, 1, 1, keys).expand(batch, 1, queries, keys)
    if key_padding_mask is not None:
        visible = visible & key_padding_mask.view(batch, 1, 1, keys)
    if causal:
        visible = visible & (key <= position)
    left, right = window or (None, None)
    if left is not None:
        visible = visible & (key >= position - left)
    if right is not None:
        visible = visible & (key <= position + right)
    group = heads // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * (1 / math.sqrt(head_dim) if scale is None else scale)
    scores = torch.where(visible, scores if bias is None else scores + bias, -INF)
    sink = torch.full((heads,), -INF, dtype=q.dtype) if sinks is None else sinks
    logits = torch.cat([scores, sink.view(1, -1, 1, 1).expand(batch, heads, queries, 1)], -1)
    live = (logits > -INF).any(-1)
    usable = torch.where(live.unsqueeze(-1), logits, 0.0)
    lse = torch.where(live, torch.logsumexp(usable, -1), -INF)
    probs = torch.where(logits > -INF, torch.softmax(usable, -1), 0.0)[..., :keys]
    if keep is not None:
        probs = torch.where(keep, probs / (1 - dropout_p), 0.0)
    return probs @ v.repeat_interleave(group, 1), lse
