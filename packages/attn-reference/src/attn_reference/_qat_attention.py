"""``qat_attention``: checks, autograd and the loop over batch items of ``nvfp4-ordered-v1``."""

from __future__ import annotations

from typing import Any

import torch
from attn_spec import QATConfig, UnsupportedProblem
from attn_spec._qat_validation import check_qat_attention
from attn_spec.torch._arguments import autocast, refuse_forward_mode, scale_of
from attn_spec.torch._arrays import info
from torch import Tensor

from attn_reference._engine import attention
from attn_reference._ieee import keeps_subnormals
from attn_reference._qat_item import Item
from attn_reference._rounding import stored

__all__ = ["qat_attention"]

_OP = "qat_attention"
_DEFAULT = QATConfig()


def qat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    config: QATConfig = _DEFAULT,
) -> Tensor:
    """Attention with operands rounded to NVFP4 and straight-through gradients, contract ``nvfp4-ordered-v1`` (docs/contracts/nvfp4-v1.md).

    Args:
        q: [B, H, S, D]; k, v: [B, K, T, D]; one dtype of float32, bfloat16, float16; any strides; H a multiple of K;
            D a multiple of 16 from 16 to 256.
        causal: bottom-right, as in ``attention``.
        scale: None is 1/sqrt(D); any finite number, 0 and negative ones included.
        key_padding_mask: bool [B, T], True keeps the key.
        config: what is quantized, and how.

    Returns:
        [B, H, S, D] in the dtype of q.

    Raises:
        TypeError, ValueError: a bad argument, by name and value.
        UnsupportedProblem: a configuration that would let a causal call read later tokens, or a device without data.
    """
    q, k, v = autocast(q, k, v)
    arrays = {"q": q, "k": k, "v": v, "key_padding_mask": key_padding_mask}
    described = {name: info(_OP, name, tensor) for name, tensor in arrays.items()}
    check_qat_attention("attn_reference", described, causal=causal, scale=scale, config=config)
    if q.device.type == "meta":
        raise UnsupportedProblem("attn_reference", ("device meta",))
    if not config.enabled:
        return attention(q, k, v, causal=causal, scale=scale, key_padding_mask=key_padding_mask)
    refuse_forward_mode(_OP, (q, k, v))
    result: Tensor = _Forward.apply(q, k, v, key_padding_mask, causal, scale_of(scale, q), config)
    return result


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, config: QATConfig) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = causal, scale, config
        return _forward(q, k, v, mask, causal, scale, config)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _Backward.apply(upstream[0], *ctx.saved_tensors, *ctx.options)
        asked = ctx.needs_input_grad[:3]
        return (*(gradient if needed else None for gradient, needed in zip(gradients, asked, strict=True)), None, None, None, None)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
        del ctx
        return _backward(dout, q, k, v, mask, *options)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(f"{_OP}: has no second derivative")


def _item(index: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, config: QATConfig) -> Item | None:
    """Batch item ``index``; None where it has no query or no key."""
    kept = None if mask is None else mask[index]
    keys = k.shape[2] if kept is None else int(kept.sum())
    if not q.shape[2] or not keys:
        return None
    return Item(q[index], k[index], v[index], kept, causal=causal, scale=scale, config=config)


@keeps_subnormals
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for index in range(q.shape[0]):
        item = _item(index, q, k, v, *rest)
        if item is not None:
            out[index] = stored(item.forward(), q.dtype)
    return out


@keeps_subnormals
def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    found = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    for index in range(q.shape[0]):
        item = _item(index, q, k, v, *rest)
        if item is not None:
            for into, gradient in zip(found, item.backward(dout[index]), strict=True):
                into[index] = stored(gradient, into.dtype)
    return found
