"""The public operators of 4-bit attention, and their autograd function over an engine's kernels."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_spec._qat import QATConfig
from attn_spec._sm90 import score_factor
from attn_spec.torch._arguments import autocast, float32, offsets_of, scale_of
from attn_spec.torch._kernels import AttentionInputs

if TYPE_CHECKING:
    from attn_spec.torch._acceptance import Acceptance

__all__ = ["QatOperators"]

_ORDERED, _SM90 = "nvfp4-ordered-v1", "nvfp4-sm90-v1"
_PLAIN = {None: None, _ORDERED: "ordered-v1", _SM90: "sm90-v1"}
"""The contract of ``attention`` that stands in for each one when nothing is quantized."""
_DIFFERENTIABLE = ("q", "k", "v", "sinks")
_TENSORS = tuple(field.name for field in fields(AttentionInputs) if "Tensor" in str(field.type))
Outputs = Tensor | tuple[Tensor, Tensor]


class QatOperators:
    """``qat_attention`` and ``qat_attention_varlen`` of an engine; a base of ``Operators``."""

    _check: Acceptance
    _kernels: Any

    def qat_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        config: QATConfig = QATConfig(),  # noqa: B008 (frozen)
        contract: str | None = None,
    ) -> Outputs:
        """Attention with operands rounded to NVFP4 and straight-through gradients.

        Args:
            q: [B, H, S, D]; k, v: [B, K, T, D]; one dtype of float32, bfloat16, float16; any strides; H a multiple of K;
                D a multiple of 16 from 16 to 256.
            causal: bottom-right, as in ``attention``.
            scale: None is 1/sqrt(D); any finite number, 0 and negative ones included (nvfp4-sm90-v1: positive ones alone).
            key_padding_mask: bool [B, T], True keeps the key.
            sinks: [H] logits after scaling, as in ``attention``.
            return_lse: also return the log-sum-exp, float32 [B, H, S], natural logarithm, sink included.
            config: what is quantized, and how.
            contract: None is nvfp4-ordered-v1; nvfp4-sm90-v1 is for the tensor cores of Hopper, with other bits and fewer options.

        Returns:
            ``out`` [B, H, S, D] in the dtype of q, or ``(out, lse)``.

        Raises:
            TypeError, ValueError: a bad argument, by name and value. UnsupportedProblem: this backend does not run it, or the
                configuration would let a causal call read later tokens.

        Source: docs/contracts/nvfp4-v1.md.
        """
        q, k, v = autocast(q, k, v)
        arrays = {"q": q, "k": k, "v": v, "key_padding_mask": key_padding_mask, "sinks": sinks}
        options = {"causal": causal, "scale": scale, "return_lse": return_lse, "config": config}
        self._check("qat_attention", arrays, options, contract, q, k, v, sinks)
        if not config.enabled:
            found: Outputs = self.attention(  # type: ignore[attr-defined]
                q, k, v, causal=causal, scale=scale, key_padding_mask=key_padding_mask, sinks=sinks, return_lse=return_lse,
                contract=_PLAIN[contract],
            )  # fmt: skip
            return found
        inputs = AttentionInputs(q, k, v, key_mask=key_padding_mask, sinks=float32(sinks), causal=causal, scale=scale_of(scale, q))
        return self._quantized(inputs, config, contract, return_lse)

    def qat_attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        seqlens_q: Tensor | None = None,
        seqlens_k: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        config: QATConfig = QATConfig(),  # noqa: B008 (frozen)
        contract: str | None = None,
    ) -> Outputs:
        """``qat_attention`` over packed segments, each one a call of its own lengths.

        Args:
            q: [total_q, H, D]; k, v: [total_k, K, D].
            cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k: as in ``attention_varlen``.
            causal, scale, sinks, return_lse, config, contract: as in ``qat_attention``.

        Returns:
            ``out`` [total_q, H, D], or ``(out, lse)`` with lse float32 [H, total_q]. Rows outside every used segment are +0 with lse
            -inf, and their gradients are +0.

        Raises:
            TypeError, ValueError: bad dtype, shape, device, offsets or option. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/nvfp4-v1.md.
        """
        q, k, v = autocast(q, k, v)
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k,
            "sinks": sinks,
        }
        options = {"causal": causal, "scale": scale, "return_lse": return_lse, "config": config}
        self._check("qat_attention_varlen", arrays, options, contract, q, k, v, sinks)
        if not config.enabled:
            found: Outputs = self.attention_varlen(  # type: ignore[attr-defined]
                q, k, v, cu_seqlens_q, cu_seqlens_k, seqlens_q=seqlens_q, seqlens_k=seqlens_k, causal=causal, scale=scale, sinks=sinks,
                return_lse=return_lse, contract=_PLAIN[contract],
            )  # fmt: skip
            return found
        offsets_q, used_q = offsets_of("qat_attention_varlen", "q", cu_seqlens_q, seqlens_q, q.shape[0])
        offsets_k, used_k = offsets_of("qat_attention_varlen", "k", cu_seqlens_k, seqlens_k, k.shape[0])
        inputs = AttentionInputs(
            q,
            k,
            v,
            sinks=float32(sinks),
            cu_seqlens_q=offsets_q,
            cu_seqlens_k=offsets_k,
            seqlens_q=used_q,
            seqlens_k=used_k,
            causal=causal,
            scale=scale_of(scale, q),
        )
        return self._quantized(inputs, config, contract, return_lse)

    def _quantized(self, inputs: AttentionInputs, config: QATConfig, contract: str | None, return_lse: bool) -> Outputs:
        if contract == _SM90:
            score_factor(inputs.scale, contract, "qat_attention_varlen" if inputs.packed else "qat_attention")
        tensors = tuple(getattr(inputs, name) for name in _TENSORS)
        call = self._kernels, config, contract or _ORDERED, inputs.causal, inputs.scale
        out, lse, *_ = _Quantized.apply(*tensors, *call)
        return (out, lse) if return_lse else out


def _inputs(tensors: tuple[Tensor | None, ...], causal: bool, scale: float) -> AttentionInputs:
    return AttentionInputs(**dict(zip(_TENSORS, tensors, strict=True)), causal=causal, scale=scale)  # type: ignore[arg-type]


class _Quantized(torch.autograd.Function):
    """Tensors of ``AttentionInputs``, then kernels, config, contract, causal and scale, to out, LSE and the row state (no gradient)."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        tensors, call = arguments[: len(_TENSORS)], arguments[len(_TENSORS) :]
        kernels, config, contract, causal, scale = call
        found: tuple[Tensor, ...] = kernels.qat_forward(_inputs(tensors, causal, scale), config, contract)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs[: len(_TENSORS)], *output)
        ctx.call = inputs[len(_TENSORS) :]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(tensors[len(_TENSORS)])
        needs = frozenset(name for name in _DIFFERENTIABLE if ctx.needs_input_grad[_TENSORS.index(name)])
        found = dict(zip(_DIFFERENTIABLE, _Gradients.apply(dout, dlse, needs, ctx.call, *tensors), strict=True))
        return (*(found[name] if name in needs else None for name in _TENSORS), *(None for _ in ctx.call))

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        raise NotImplementedError(_NO_VMAP)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        dout: Tensor, dlse: Tensor | None, needs: frozenset[str], call: tuple[Any, ...], *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        kernels, config, contract, causal, scale = call
        inputs, saved = _inputs(tensors[: len(_TENSORS)], causal, scale), tensors[len(_TENSORS) :]
        found = kernels.qat_backward(inputs, config, contract, dout, dlse, saved, needs)
        return tuple(found.get(name) for name in _DIFFERENTIABLE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Keeps nothing: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("qat_attention: has no second derivative; use attn_reference.attention_fp32 to differentiate twice")

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        raise NotImplementedError(_NO_VMAP)


_NO_VMAP = "qat_attention: torch.func.vmap is not supported (nor jacrev and hessian, which map); samples may be items of the batch"
