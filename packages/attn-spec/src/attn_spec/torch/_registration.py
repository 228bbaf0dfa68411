"""torch.library operators over one engine's kernels: schema, kernel, fake, autograd and vmap, defined once for every torch backend.

Operators take and return tensors and plain numbers only, so that torch.compile, opcheck and export see all of them. Optional gradients
that were not asked for come back as empty tensors, since a schema has no optional results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_spec._capabilities import Capabilities
from attn_spec.torch import _vmap
from attn_spec.torch._kernels import AttentionInputs, Kernels, TensorCoreKernels
from attn_spec.torch._operation import Gradient, Operation

__all__ = ["register"]

_ATTENTION_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? query_mask, Tensor? key_mask, Tensor? kv_lengths, Tensor? q_start, Tensor? k_start, "
    "Tensor? sinks, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqlens_q, Tensor? seqlens_k, Tensor? dropout_seed, "
    "bool causal, float scale, int window_left, int window_right, float dropout_p"
)
_NAMES = tuple(part.split()[-1] for part in _ATTENTION_ARGUMENTS.split(", "))
_TENSORS = _NAMES[:15]
_SECOND = "has no second derivative; use attn_reference.attention_fp32 to differentiate twice"

_SOFTMAX_SCHEMA = "(Tensor scores, Tensor? mask, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)"
_SOFTMAX_BACKWARD_SCHEMA = "(Tensor dprobs, Tensor scores, Tensor? mask, Tensor row_max, Tensor row_sum) -> Tensor"
_SCHEMAS = {
    "joint_attn_softmax": _SOFTMAX_SCHEMA,
    "joint_attn_softmax_backward": _SOFTMAX_BACKWARD_SCHEMA,
    "joint_attn_softmax_v2": _SOFTMAX_SCHEMA,
    "joint_attn_softmax_v2_backward": _SOFTMAX_BACKWARD_SCHEMA,
    "joint_attn_qk_gemm": "(Tensor q, Tensor k, float scale, ScalarType out_dtype) -> Tensor",
    "joint_attn_qk_gemm_backward": "(Tensor dscores, Tensor q, Tensor k, float scale, bool need_q, bool need_k) -> (Tensor, Tensor)",
    "joint_attn_av_gemm": "(Tensor probs, Tensor v, ScalarType out_dtype) -> Tensor",
    "joint_attn_av_gemm_backward": "(Tensor dout, Tensor probs, Tensor v, bool need_probs, bool need_v) -> (Tensor, Tensor)",
    "attention": f"({_ATTENTION_ARGUMENTS}, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_backward": (
        f"(Tensor dout, Tensor? dlse, Tensor row_max, Tensor row_sum, {_ATTENTION_ARGUMENTS}, bool need_q, bool need_k, bool need_v, "
        "bool need_sinks, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}

_SCHEMAS["attention_sm90"] = f"({_ATTENTION_ARGUMENTS}) -> (Tensor, Tensor)"
_SCHEMAS["attention_sm90_backward"] = _SCHEMAS["attention_backward"].replace("Tensor row_max, Tensor row_sum", "Tensor out, Tensor lse")


def register(namespace: str, kernels: Kernels, capabilities: Capabilities) -> dict[str, Operation]:
    """Define ``torch.ops.<namespace>.*`` for the operators (of joint_attn_*, attention) and contracts that ``kernels`` has; the operations
    by name, "NAME_v2" or "NAME_sm90" for another contract than the default."""
    library = torch.library.Library(namespace, "DEF")
    _LIBRARIES.append(library)
    found: dict[str, Operation] = {}
    for name, (operator, contract) in _IMPLEMENTED.items():
        if operator not in capabilities.operators or contract not in capabilities.contracts:
            continue
        forward, backward, fake, fake_backward = _IMPLEMENTATIONS[name](kernels)
        for suffix, implementation, abstract in (("", forward, fake), ("_backward", backward, fake_backward)):
            library.define(name + suffix + _SCHEMAS[name + suffix])
            library.impl(name + suffix, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}{suffix}", abstract, lib=library)
        rule, rule_backward = _VMAP[name]
        once = _operation(library, namespace, f"{name}_backward", backward, (_keeps_nothing, _raises_twice(namespace, name)), rule_backward)
        inference = _INFERENCE[name](kernels) if name in _INFERENCE else None
        found[name] = _operation(library, namespace, name, forward, _AUTOGRAD[name](once), rule, inference)
    return found


def _operation(
    library: torch.library.Library,
    namespace: str,
    name: str,
    kernel: Callable[..., Any],
    gradient: Gradient,
    rule: Callable[..., Any],
    inference: Callable[..., Any] | None = None,
) -> Operation:
    operation = Operation(getattr(getattr(torch.ops, namespace), name).default, kernel, _tensors(name), gradient, rule, inference)
    setup, formula = gradient
    torch.library.register_autograd(f"{namespace}::{name}", formula, setup_context=setup, lib=library)
    torch.library.register_vmap(f"{namespace}::{name}", operation.vmap, lib=library)
    return operation


def _tensors(name: str) -> int:
    """How many arguments of a schema, from the first, are tensors."""
    return sum(part.strip().startswith(("Tensor", "(Tensor")) for part in _SCHEMAS[name].partition(" -> ")[0].split(","))


_LIBRARIES: list[torch.library.Library] = []
"""Libraries stay registered as long as they are referenced."""


def _raises_twice(namespace: str, name: str) -> Callable[..., Any]:
    def twice(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{namespace}: {name} {_SECOND}")

    return twice


def _keeps_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Setup of a gradient that only raises."""


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


# --- softmax ------------------------------------------------------------------------------------------------------------------------------


def _softmax(kernels: Kernels) -> tuple[Callable[..., Any], ...]:
    return kernels.softmax_forward, kernels.softmax_backward, *_softmax_fakes()


def _softmax_v2(kernels: Kernels) -> tuple[Callable[..., Any], ...]:
    return kernels.softmax_v2_forward, kernels.softmax_v2_backward, *_softmax_fakes()


def _softmax_fakes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def fake(scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        rows = scores.shape[:-1]
        return (
            scores.new_empty(scores.shape, dtype=out_dtype),
            scores.new_empty(rows, dtype=torch.float32),
            scores.new_empty(rows, dtype=torch.float32),
        )

    def fake_backward(dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        return scores.new_empty(scores.shape)

    return fake, fake_backward


def _softmax_inference(method: str) -> Callable[[Kernels], Callable[..., Any] | None]:
    def of(kernels: Kernels) -> Callable[..., Any] | None:
        """Probabilities without the row state, from an engine that has a kernel call of its own for it."""
        inference = getattr(kernels, method, None)
        return None if inference is None else lambda arguments, wanted: (inference(*arguments),)

    return of


def _softmax_autograd(backward: Operation) -> Gradient:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, mask, _ = inputs
        ctx.set_materialize_grads(False)  # of the statistics: a kernel that fills zeros for each
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(scores, mask, *output[1:])

    def gradient(ctx: Any, dprobs: Tensor | None, *unused: Any) -> tuple[Any, ...]:
        return None if dprobs is None else backward(dprobs, *ctx.saved_tensors), None, None

    return setup, gradient


# --- products -----------------------------------------------------------------------------------------------------------------------------


def _qk_gemm(kernels: Kernels) -> tuple[Callable[..., Any], ...]:
    def backward(dscores: Tensor, q: Tensor, k: Tensor, scale: float, need_q: bool, need_k: bool) -> tuple[Tensor, Tensor]:
        dq, dk = kernels.qk_gemm_backward(dscores, q, k, scale, (need_q, need_k))
        return _empty(q) if dq is None else dq, _empty(k) if dk is None else dk

    def fake(q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        return q.new_empty((*q.shape[:3], k.shape[2]), dtype=out_dtype)

    def fake_backward(dscores: Tensor, q: Tensor, k: Tensor, scale: float, need_q: bool, need_k: bool) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape if need_q else 0), k.new_empty(k.shape if need_k else 0)

    return kernels.qk_gemm_forward, backward, fake, fake_backward


def _qk_gemm_autograd(backward: Operation) -> Gradient:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.scale = inputs[2]

    def gradient(ctx: Any, dscores: Tensor) -> tuple[Any, ...]:
        need_q, need_k = ctx.needs_input_grad[:2]
        dq, dk = backward(dscores, *ctx.saved_tensors, ctx.scale, need_q, need_k)
        return dq if need_q else None, dk if need_k else None, None, None

    return setup, gradient


def _av_gemm(kernels: Kernels) -> tuple[Callable[..., Any], ...]:
    def backward(dout: Tensor, probs: Tensor, v: Tensor, need_probs: bool, need_v: bool) -> tuple[Tensor, Tensor]:
        dprobs, dv = kernels.av_gemm_backward(dout, probs, v, (need_probs, need_v))
        return _empty(probs) if dprobs is None else dprobs, _empty(v) if dv is None else dv

    def fake(probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
        return probs.new_empty((*probs.shape[:3], v.shape[3]), dtype=out_dtype)

    def fake_backward(dout: Tensor, probs: Tensor, v: Tensor, need_probs: bool, need_v: bool) -> tuple[Tensor, Tensor]:
        return probs.new_empty(probs.shape if need_probs else 0), v.new_empty(v.shape if need_v else 0)

    return kernels.av_gemm_forward, backward, fake, fake_backward


def _av_gemm_autograd(backward: Operation) -> Gradient:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    def gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        need_probs, need_v = ctx.needs_input_grad[:2]
        dprobs, dv = backward(dout, *ctx.saved_tensors, need_probs, need_v)
        return dprobs if need_probs else None, dv if need_v else None, None

    return setup, gradient


# --- attention ----------------------------------------------------------------------------------------------------------------------------


def _inputs(arguments: tuple[Any, ...]) -> AttentionInputs:
    return AttentionInputs(*arguments)


def _attention(kernels: Kernels) -> tuple[Callable[..., Any], ...]:
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return kernels.attention_forward(_inputs(arguments[:-1]), arguments[-1])

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, out_dtype = _inputs(arguments[:-1]), arguments[-1]
        rows = [inputs.q.new_empty(inputs.row_shape, dtype=torch.float32) for _ in range(3)]
        return inputs.q.new_empty((*inputs.q.shape[:-1], inputs.v.shape[-1]), dtype=out_dtype), *rows

    return forward, _attention_backward(kernels.attention_backward), fake, _fake_attention_backward


def _attention_sm90(kernels: TensorCoreKernels) -> tuple[Callable[..., Any], ...]:
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return kernels.attention_sm90_forward(_inputs(arguments))

    def fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = _inputs(arguments)
        return inputs.q.new_empty(inputs.q.shape), inputs.q.new_empty(inputs.row_shape, dtype=torch.float32)

    return forward, _attention_backward(kernels.attention_sm90_backward), fake, _fake_attention_backward


_DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")


def _attention_backward(gradients_of: Callable[..., dict[str, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """``kernel(inputs, dout, dlse, *saved, needs)`` with the arguments of the registered operator."""

    def backward(dout: Tensor, dlse: Tensor | None, first: Tensor, second: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        inputs = _inputs(arguments[: len(_NAMES)])
        needs = frozenset(name for name, need in zip(_DIFFERENTIABLE, arguments[len(_NAMES) :], strict=True) if need)
        gradients = gradients_of(inputs, dout, dlse, first, second, needs)
        return tuple(gradients[name] if name in needs else _empty(inputs.q) for name in _DIFFERENTIABLE)

    return backward


def _fake_attention_backward(dout: Tensor, dlse: Tensor | None, first: Tensor, second: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs = _inputs(arguments[: len(_NAMES)])
    tensors = (inputs.q, inputs.k, inputs.v, inputs.sinks, inputs.bias)
    return tuple(
        tensor.new_empty(tensor.shape) if need and tensor is not None else _empty(inputs.q)
        for tensor, need in zip(tensors, arguments[len(_NAMES) :], strict=True)
    )


def _attention_inference(kernels: Kernels) -> Callable[..., Any] | None:
    """out and LSE without the row state, or out alone, from an engine that has a kernel call of its own for it."""
    inference = getattr(kernels, "attention_inference", None)
    return None if inference is None else lambda arguments, wanted: inference(_inputs(arguments[:-1]), arguments[-1], wanted != 1)


def _attention_autograd(backward: Operation) -> Gradient:
    """The row state is saved; it is no output of the public function."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        _keep(ctx, inputs, output, output[2:])

    return setup, _attention_gradient(backward, 1)


def _attention_sm90_autograd(backward: Operation) -> Gradient:
    """out and LSE are saved."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs, output, output)

    return setup, _attention_gradient(backward, 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: len(_TENSORS)], *saved)
    ctx.options = inputs[len(_TENSORS) : len(_NAMES)]
    ctx.out = (output[0].shape, output[0].dtype)


def _attention_gradient(backward: Operation, others: int) -> Callable[..., tuple[Any, ...]]:
    """The formula for an operator with ``others`` arguments after those of attention."""

    def gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Any) -> tuple[Any, ...]:
        *tensors, first, second = ctx.saved_tensors
        if dout is None:
            dout = tensors[0].new_zeros(ctx.out[0], dtype=ctx.out[1])
        needs = [ctx.needs_input_grad[_NAMES.index(name)] for name in _DIFFERENTIABLE]
        found = backward(dout, dlse, first, second, *tensors, *ctx.options, *needs)
        gradients = dict(zip(_DIFFERENTIABLE, found, strict=True))
        wanted = {name for name, need in zip(gradients, needs, strict=True) if need}
        return (*(gradients[name] if name in wanted else None for name in _NAMES), *(None,) * others)

    return gradient


_IMPLEMENTED = {
    "joint_attn_softmax": ("joint_attn_softmax", "ordered-v1"),
    "joint_attn_softmax_v2": ("joint_attn_softmax", "ordered-v2"),
    "joint_attn_qk_gemm": ("joint_attn_qk_gemm", "ordered-v1"),
    "joint_attn_av_gemm": ("joint_attn_av_gemm", "ordered-v1"),
    "attention": ("attention", "ordered-v1"),
    "attention_sm90": ("attention", "sm90-v1"),
}
"""Operator and contract of each registered name."""
_IMPLEMENTATIONS: dict[str, Callable[[Any], tuple[Callable[..., Any], ...]]] = {
    "joint_attn_softmax": _softmax,
    "joint_attn_softmax_v2": _softmax_v2,
    "joint_attn_qk_gemm": _qk_gemm,
    "joint_attn_av_gemm": _av_gemm,
    "attention": _attention,
    "attention_sm90": _attention_sm90,
}
_AUTOGRAD = {
    "joint_attn_softmax": _softmax_autograd,
    "joint_attn_softmax_v2": _softmax_autograd,
    "joint_attn_qk_gemm": _qk_gemm_autograd,
    "joint_attn_av_gemm": _av_gemm_autograd,
    "attention": _attention_autograd,
    "attention_sm90": _attention_sm90_autograd,
}
_INFERENCE = {
    "joint_attn_softmax": _softmax_inference("softmax_inference"),
    "joint_attn_softmax_v2": _softmax_inference("softmax_v2_inference"),
    "attention": _attention_inference,
}
_VMAP = {
    "joint_attn_softmax": (_vmap.softmax, _vmap.softmax_backward),
    "joint_attn_softmax_v2": (_vmap.softmax, _vmap.softmax_backward),
    "joint_attn_qk_gemm": (_vmap.product, _vmap.product),
    "joint_attn_av_gemm": (_vmap.product, _vmap.product),
    "attention": (_vmap.attention, _vmap.attention_backward),
    "attention_sm90": (_vmap.attention, _vmap.attention_backward),
}
