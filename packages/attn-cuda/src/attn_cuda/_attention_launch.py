"""Kernel calls of ``attention``, dense and packed: the problem as the C interface takes it, the workspace and the results."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs, Launches
from torch import Tensor

from attn_cuda._arrays import Launch, address, allocator, array, dtype_codes, module_for, place
from attn_cuda._describer import describer

__all__ = ["MAX_HEAD_DIM", "OPTIONS", "AttentionKernels", "prepare_attention", "problem_of", "tensors_of", "with_contiguous_options"]

MAX_HEAD_DIM = 256
"""Largest head dim of q, k and v that the kernels hold."""
OPTIONS = (
    "query_mask",
    "key_mask",
    "kv_lengths",
    "q_start",
    "k_start",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqlens_q",
    "seqlens_k",
    "sinks",
)
"""What the kernels read as contiguous arrays, in the order of the C interface."""
_INPUTS = ("q", "k", "v", *OPTIONS, "bias")
"""All tensors, in the order of the C interface."""
_TENSORS = [field.name for field in fields(AttentionInputs)][:14]
"""All tensors, in the order of the registered operator."""


class AttentionKernels:
    """Attention of the ``cuda`` engine, on the current stream of the tensors' device.

    Inputs may have any strides; one whose rows are not contiguous multiples of 16 bytes is copied to the workspace first.
    """

    def attention_forward(self, inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out (layout of q, V columns, ``out_dtype``), LSE, row max and row sum (float32, ``inputs.row_shape``)."""
        out, lse, row_max, row_sum = _forward(inputs, out_dtype, 3)
        return out, lse, row_max, row_sum

    def attention_inference(self, inputs: AttentionInputs, out_dtype: torch.dtype, wants_lse: bool) -> tuple[Tensor, ...]:
        """out and, where it is wanted, LSE."""
        return _forward(inputs, out_dtype, 1 if wants_lse else 0)

    def attention_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """Gradients of the names in ``needs`` (q, k, v, sinks, bias), each with the shape and dtype of its input."""
        inputs = with_contiguous_options(inputs)
        module = _module(inputs, dout, dlse, row_max, row_sum)
        inputs.check_shapes({"dout": dout}, {"dlse": dlse, "row_max": row_max, "row_sum": row_sum})
        found = inputs.gradients(needs)
        if any(gradient.numel() for gradient in found.values()):
            codes = dtype_codes(module)
            problem = problem_of(codes, inputs)
            device, stream = place(inputs.q)
            rows = [None if row is None else row.to(torch.float32).contiguous() for row in (dlse, row_max, row_sum)]
            pointers = (*map(address, rows), *(address(found.get(name)) for name in ("q", "k", "v", "sinks", "bias")))
            gradients = (array(codes, dout), *pointers, *(found["bias"].shape if "bias" in found else (1, 1, 1, 1)))
            workspace = _workspace(inputs.q, module.attention_backward_workspace(device, problem, inputs.scale, gradients))
            module.attention_backward(device, stream, problem, inputs.scale, gradients, address(workspace))
            del rows, workspace
        return found


def _forward(inputs: AttentionInputs, out_dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    """out and the first ``count`` of LSE, row max and row sum."""
    inputs = with_contiguous_options(inputs)
    found: Tensor | tuple[Tensor, ...] = _FORWARD(out_dtype, count, *_VALUES(inputs))
    return (found,) if isinstance(found, Tensor) else found


def prepare_attention(arguments: tuple[Any, ...], wanted: int) -> Launch | None:
    """The call of the registered operator for its first ``wanted`` results, or None for one that needs copies first."""
    inputs, out_dtype = AttentionInputs(*arguments[:-1]), arguments[-1]
    if with_contiguous_options(inputs) is not inputs:
        return None
    return _forward_launch(inputs, out_dtype, wanted - 1)


def _forward_launch(inputs: AttentionInputs, out_dtype: torch.dtype, count: int) -> Launch:
    """out alone, or a tuple with the first ``count`` of LSE, row max and row sum. The kernels keep the others in the workspace: allocations
    are a large part of a small call. Options must be contiguous."""
    module, q, scale, tensors = _module(inputs), inputs.q, inputs.scale, tensors_of(inputs)
    codes, device, index = dtype_codes(module), q.device, q.device.index
    out_of, row_of = allocator(inputs.out_shape, out_dtype, device), allocator(inputs.row_shape, torch.float32, device)
    results = [out_of, *[row_of] * count]
    if 0 in q.shape[:-1]:
        return lambda addresses: tuple([allocate() for allocate in results]) if count else out_of()
    problem = problem_of(codes, inputs)
    workspace_of = allocator((module.attention_forward_workspace(index, problem, scale),), torch.uint8, device)
    run = module.AttentionForward(index, problem, scale, codes[out_dtype], tuple([_INPUTS.index(name) for name in tensors])).run
    stream_of = torch._C._cuda_getCurrentRawStream

    def launch_alone(addresses: list[int]) -> Tensor:
        out, workspace = out_of(), workspace_of()
        run(stream_of(index), addresses, [out.data_ptr()], workspace.data_ptr())
        return out

    def launch(addresses: list[int]) -> tuple[Tensor, ...]:
        found = tuple([allocate() for allocate in results])
        workspace = workspace_of()
        run(stream_of(index), addresses, [tensor.data_ptr() for tensor in found], workspace.data_ptr())
        return found

    return launch if count else launch_alone


_OPTION_TENSORS = attrgetter(*OPTIONS)
_VALUES = attrgetter(*[field.name for field in fields(AttentionInputs)])
_FORWARD = Launches(lambda out_dtype, count, *values: _forward_launch(AttentionInputs(*values), out_dtype, count), describer)


def _module(inputs: AttentionInputs, *others: Tensor | None) -> ModuleType:
    """The compiled module, once the inputs are known to be ones that it runs."""
    module = module_for(*tensors_of(inputs).values(), *others)
    reasons = []
    if inputs.dropout_seed is not None or inputs.dropout_p > 0.0:
        reasons.append("dropout (not supported)")
    widest = max(inputs.q.shape[-1], inputs.v.shape[-1])
    if widest > MAX_HEAD_DIM:
        reasons.append(f"head_dim={widest} (supported: up to {MAX_HEAD_DIM})")
    if reasons:
        raise UnsupportedProblem("attn_cuda", reasons)
    return module


def tensors_of(inputs: AttentionInputs) -> dict[str, Tensor]:
    """The tensors that are given, in the order of the registered operator."""
    return {name: tensor for name in _TENSORS if (tensor := getattr(inputs, name)) is not None}


def with_contiguous_options(inputs: AttentionInputs) -> AttentionInputs:
    """The kernels take strides of q, k, v and bias only."""
    given = zip(OPTIONS, _OPTION_TENSORS(inputs), strict=True)
    copied: dict[str, Any] = {name: tensor.contiguous() for name, tensor in given if tensor is not None and not tensor.is_contiguous()}
    return replace(inputs, **copied) if copied else inputs


def problem_of(codes: dict[torch.dtype, int], inputs: AttentionInputs) -> tuple[Any, ...]:
    """The problem as the extension takes it; options must be contiguous."""
    q, bias, segments = inputs.q, inputs.bias, inputs.cu_seqlens_q
    arrays = array(codes, q), array(codes, inputs.k), array(codes, inputs.v)
    pointers = tuple([address(getattr(inputs, name)) for name in OPTIONS])
    shift = None if bias is None else array(codes, bias)
    batch = q.shape[0] if segments is None else segments.numel() - 1
    return (batch, *arrays, pointers, shift, inputs.causal, inputs.window_left, inputs.window_right)


def _workspace(like: Tensor, size: int) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None
