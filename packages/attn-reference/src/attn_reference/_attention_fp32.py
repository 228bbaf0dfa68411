"""``attention_fp32``: plain matmul and softmax in float32, for values and second derivatives. It follows no contract's bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attn_spec._validation import describe
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import info
from torch import Tensor

from attn_reference._dropout import keep_scale, kept_pairs
from attn_reference._segment import segments

__all__ = ["attention_fp32"]


def attention_fp32(
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
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` upcast to float32, whatever autocast and TF32 say, differentiable twice, forwards too; O(S T) memory.

    Args:
        q, k, v and the keywords: as in ``attention``; masks, rows without a key, sinks and dropout decisions are the same, and dropout
            needs ``dropout_seed``. Keys that no query sees and queries that see no key may hold anything; NaN or inf elsewhere spoils
            its head.

    Returns:
        ``out`` float32 [B, H, S, V], or ``(out, lse)`` with lse float32 [B, H, S].

    Raises:
        TypeError, ValueError: as ``attention``.

    Source: docs/contracts/ordered-v1.md for the meaning; the order of its sums is torch's.
    """
    starts = {"q_start": q_start, "k_start": k_start}
    arrays = {"q": q, "k": k, "v": v, "key_padding_mask": key_padding_mask, "kv_lengths": kv_lengths, "sinks": sinks, "bias": bias}
    arrays.update({name: start for name, start in starts.items() if isinstance(start, Tensor)})
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "dropout_p": dropout_p, "dropout_seed": dropout_seed}
    options.update({name: start for name, start in starts.items() if not isinstance(start, Tensor)})
    described = {name: info("attention_fp32", name, tensor) for name, tensor in arrays.items()}
    describe("attention", described, options, caller="attention_fp32")
    if dropout_p > 0.0 and dropout_seed is None:
        raise ValueError("attention_fp32: dropout_p > 0 needs dropout_seed, since a fresh mask would not be golden")
    left, right = (-1 if side is None else int(side) for side in (window or (None, None)))
    with torch.autocast(q.device.type, enabled=False):
        inputs = AttentionInputs(
            q=q.float(),
            k=k.float(),
            v=v.float(),
            key_mask=key_padding_mask,
            kv_lengths=None if kv_lengths is None else kv_lengths.long(),
            q_start=_per_item(q_start, q),
            k_start=_per_item(k_start, q),
            sinks=None if sinks is None else sinks.float(),
            bias=None if bias is None else bias.float(),
            dropout_seed=_seed(dropout_seed, q) if dropout_p > 0.0 else None,
            causal=causal,
            scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            window_left=left,
            window_right=right,
            dropout_p=float(dropout_p),
        )
        out, lse = _evaluate(inputs)
    return (out, lse) if return_lse else out


def _evaluate(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    group = inputs.q.shape[1] // inputs.k.shape[1]
    items = list(segments(inputs))
    keys = inputs.k.shape[2]
    visible = (
        torch.stack([item.visible() for item in items]).unsqueeze(1)
        if items
        else inputs.q.new_empty(0, 1, inputs.q.shape[2], keys, dtype=torch.bool)
    )
    # What no query of the item sees is replaced before any product, so that what it holds (NaN, inf) reaches neither values nor gradients.
    seen = visible.any(dim=2).unsqueeze(-1)
    k = torch.where(seen, inputs.k, 0.0).repeat_interleave(group, dim=1)
    v = torch.where(seen, inputs.v, 0.0).repeat_interleave(group, dim=1)
    q = torch.where(visible.any(dim=3).unsqueeze(-1), inputs.q, 0.0)
    scores = _product(q, k.transpose(-1, -2)) * inputs.scale
    if inputs.bias is not None:
        scores = scores + inputs.bias
    scores = torch.where(visible, scores, -torch.inf)
    unmasked = scores != -torch.inf
    sink = None if inputs.sinks is None else inputs.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    logits = scores if sink is None else torch.cat((scores, sink), dim=-1)
    live = (logits != -torch.inf).any(dim=-1, keepdim=True)
    # Dead rows are computed on zeros, so that neither softmax nor its derivatives see a row of -inf.
    usable = torch.where(live, logits, 0.0)
    lse = torch.where(live.squeeze(-1), torch.logsumexp(usable, dim=-1), -torch.inf)
    probs = torch.where(unmasked, torch.softmax(usable, dim=-1)[..., :keys], 0.0)
    return _product(_dropped(probs, inputs), v), lse


def _dropped(probs: Tensor, inputs: AttentionInputs) -> Tensor:
    if inputs.dropout_seed is None:
        return probs
    batch, head, query, key = (torch.arange(size, device=probs.device) for size in probs.shape)
    axes = (batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), query.view(-1, 1), key)
    kept = kept_pairs(inputs.dropout_p, inputs.dropout_seed, *axes)
    return torch.where(kept, probs * keep_scale(inputs.dropout_p, probs.device), 0.0)


def _per_item(start: int | Tensor | None, q: Tensor) -> Tensor | None:
    if start is None:
        return None
    return start.long() if isinstance(start, Tensor) else torch.full(q.shape[:1], start, dtype=torch.int64, device=q.device)


def _seed(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        return seed.to(device=q.device, dtype=torch.int64).reshape(())
    assert seed is not None
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=q.device)


def _product(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = _Product.apply(a, b)
    return found


class _Product(torch.autograd.Function):
    """``a @ b`` in float32 without TF32, bfloat16 passes or autocast, in the derivatives too, whenever and wherever they run."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast(a.device.type, enabled=False), _full_precision():
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        (upstream,) = gradients
        da = _product(upstream, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        db = _product(a.transpose(-1, -2), upstream) if ctx.needs_input_grad[1] else None
        return da, db

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        da, db = tangents
        return _product(da, b) + _product(a, db)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Float32 products are float32 inside; the caller's settings return afterwards."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    callers = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, caller in zip(settings, callers, strict=True):
            setting.fp32_precision = caller
