"""Rules of torch.vmap: the mapped axis becomes part of the batch axis, so that one kernel call computes all samples.

Folding is used where it gives each sample the bits of a call of its own: batch items do not see each other. Where something crosses
them (dropout counts batch items; the gradients of sinks, and of a bias that broadcasts over the batch, are sums over it; sinks have no
batch axis; packed input has none either), each sample is a call of its own. An argument that is not mapped is repeated, except a bias
that broadcasts over the batch. The gradient of an unmapped argument outside the map is torch's sum over the samples, in no stated order.

A rule takes the registered operator and is called as torch.library.register_vmap states: ``rule(info, in_dims, *arguments)`` gives the
results and the axis of each that counts samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attn_spec.torch._kernels import AttentionInputs

__all__ = ["attention", "attention_backward", "product", "softmax", "softmax_backward"]

Operator = Callable[..., Any]
Rule = Callable[..., tuple[Any, Any]]


def softmax(operator: Operator) -> Rule:
    """scores [..., T], mask [B, T]: rows stand alone, so that only a mask ties axis 0 to the batch."""

    def rule(info: Any, in_dims: tuple[int | None, ...], scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Any, Any]:
        has_batch_axis = scores.ndim > 1 + (in_dims[0] is not None)
        fold = _folder(_samples(info), has_batch_axis)
        results = operator(fold(scores, in_dims[0]), fold(mask, in_dims[1]), out_dtype)
        return tuple(_apart(result, _samples(info)) for result in results) if has_batch_axis else results, (0, 0, 0)

    return rule


def softmax_backward(operator: Operator) -> Rule:
    def rule(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None) -> tuple[Tensor, int]:
        scores = tensors[1]
        assert scores is not None
        has_batch_axis = scores.ndim > 1 + (in_dims[1] is not None)
        dscores = operator(*map(_folder(_samples(info), has_batch_axis), tensors, in_dims))
        return _apart(dscores, _samples(info)) if has_batch_axis else dscores, 0

    return rule


def product(operator: Operator) -> Rule:
    """The products, forward and backward: every tensor has the batch axis first; a gradient that was not asked for is empty."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        fold = _folder(_samples(info))
        results = operator(
            *(fold(value, dim) if isinstance(value, Tensor) else value for value, dim in zip(arguments, in_dims, strict=True))
        )
        return _all_apart(results, _samples(info))

    return rule


def attention(operator: Operator) -> Rule:
    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        inputs, dims = AttentionInputs(*arguments[:_TENSORS]), dict(zip(_NAMES, in_dims, strict=False))
        if _crosses(inputs, dims):
            return _each(operator, info, in_dims, arguments)
        folded = _folded(inputs, dims, _samples(info), whole_bias=dims["bias"] is not None)
        return _all_apart(operator(*folded, *arguments[len(folded) :]), _samples(info))

    return rule


def attention_backward(operator: Operator) -> Rule:
    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        rows, row_dims, rest, rest_dims = arguments[:4], in_dims[:4], arguments[4:], in_dims[4:]
        inputs, dims = AttentionInputs(*rest[:_TENSORS]), dict(zip(_NAMES, rest_dims, strict=False))
        need_sinks, need_bias = rest[-2:]
        if _crosses(inputs, dims) or need_sinks or (need_bias and not _has_each_item(inputs, dims)):
            return _each(operator, info, in_dims, arguments)
        fold = _folder(_samples(info))
        folded = _folded(inputs, dims, _samples(info), whole_bias=need_bias or dims["bias"] is not None)
        return _all_apart(operator(*map(fold, rows, row_dims), *folded, *rest[len(folded) :]), _samples(info))

    return rule


_TENSORS = 15
"""Tensors among the arguments of the attention operator, its first ones."""
_NAMES = tuple(field.name for field in fields(AttentionInputs))[:_TENSORS]
Dims = dict[str, int | None]
"""The mapped axis of each tensor by name."""


def _crosses(inputs: AttentionInputs, dims: Dims) -> bool:
    """Whether samples that share a batch axis would differ from samples alone, in bits or in the order of a gradient's sum."""
    shared_bias = dims["bias"] is not None and not _has_each_item(inputs, dims)
    return inputs.packed or inputs.dropout_seed is not None or dims["sinks"] is not None or shared_bias


def _has_each_item(inputs: AttentionInputs, dims: Dims) -> bool:
    """Whether the bias of a sample has a value, hence a gradient, of its own for every batch item."""
    bias, q = _front(inputs.bias, dims["bias"], 1), _front(inputs.q, dims["q"], 1)
    return bias.shape[1] == q.shape[1]


def _folded(inputs: AttentionInputs, dims: Dims, size: int, *, whole_bias: bool) -> list[Tensor | None]:
    """The tensors of the attention operator with samples in the batch axis; ``whole_bias``: the bias must have that axis too."""
    fold, batch = _folder(size), _front(inputs.q, dims["q"], size).shape[1]
    tensors = [
        fold(getattr(inputs, name), dims[name]) for name in ("q", "k", "v", "query_mask", "key_mask", "kv_lengths", "q_start", "k_start")
    ]
    bias = inputs.bias
    if bias is not None and (whole_bias or bias.shape[0] != 1):
        bias = _front(bias, dims["bias"], size)
        bias = bias.expand(size, batch, *bias.shape[2:]).flatten(0, 1)
    return [*tensors, inputs.sinks, bias, None, None, None, None, None]


def _samples(info: Any) -> int:
    """Size of the mapped axis. ValueError for 0: the results of no sample have no shape to take."""
    size: int = info.batch_size
    if size == 0:
        raise ValueError("torch.vmap: the mapped axis has size 0; at least one sample is needed")
    return size


def _front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor:
    """The samples of a tensor on axis 0, repeated without a copy when it is not mapped."""
    assert tensor is not None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _folder(size: int, has_batch_axis: bool = True) -> Callable[[Tensor | None, int | None], Tensor | None]:
    """[B, ...] of ``size`` samples to [samples * B, ...]; without a batch axis the samples are the batch."""

    def fold(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        front = _front(tensor, dim, size)
        return front.flatten(0, 1) if has_batch_axis else front

    return fold


def _apart(result: Tensor, size: int) -> Tensor:
    """[samples * B, ...] to [samples, B, ...]."""
    return result.unflatten(0, (size, result.shape[0] // size))


def _all_apart(results: Any, size: int) -> tuple[Any, Any]:
    """Results with samples on axis 0; an empty one stands for a gradient that was not asked for."""
    if isinstance(results, Tensor):
        return _apart(results, size), 0
    absent = [result.ndim == 1 and result.numel() == 0 for result in results]
    apart = [result if none else _apart(result, size) for result, none in zip(results, absent, strict=True)]
    return tuple(apart), tuple(None if none else 0 for none in absent)


def _each(operator: Operator, info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """A call for each sample; results with samples on axis 0."""
    samples = [
        operator(*(value if dim is None else value.select(dim, sample) for value, dim in zip(arguments, in_dims, strict=True)))
        for sample in range(_samples(info))
    ]
    return tuple(torch.stack(results) for results in zip(*samples, strict=True)), (0,) * len(samples[0])
