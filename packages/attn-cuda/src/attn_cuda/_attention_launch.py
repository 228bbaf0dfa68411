"""Kernel calls of ``attention``, dense and packed: the problem as the C interface takes it, the workspace and the results."""

from __future__ import annotations

from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_cuda._arrays import Launch, address, allocator, array, dtype_codes, module_for, place

__all__ = ["MAX_HEAD_DIM", "AttentionKernels", "prepare_attention", "problem_of", "tensors_of", "with_contiguous_options"]

MAX_HEAD_DIM = 256
"""Largest head dim of q, k and v that the kernels hold."""
_NULL = (0, 0, 0)
_OPTIONS = (
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
_POINTERS = len(_OPTIONS)
_TENSORS = [field.name for field in fields(AttentionInputs)][:14]
_PLACES = {name: _OPTIONS.index(name) if name in _OPTIONS else _POINTERS for name in _TENSORS}
"""The place of each tensor of the registered operator, in its order, among the options; the bias is behind them."""


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
        _check_rows(inputs, dout, dlse, row_max, row_sum)
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks, "bias": inputs.bias}
        found = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in tensors.items()
            if tensor is not None and name in needs
        }
        if any(gradient.numel() for gradient in found.values()):
            codes = dtype_codes(module)
            problem = problem_of(codes, inputs)
            device, stream = place(inputs.q)
            rows = [None if row is None else row.to(torch.float32).contiguous() for row in (dlse, row_max, row_sum)]
            pointers = (*map(address, rows), *(address(found.get(name)) for name in tensors))
            gradients = (array(codes, dout), *pointers, *(found["bias"].shape if "bias" in found else (1, 1, 1, 1)))
            workspace = _workspace(inputs.q, module.attention_backward_workspace(device, problem, inputs.scale, gradients))
            module.attention_backward(device, stream, problem, inputs.scale, gradients, address(workspace))
            del rows, workspace
        return found


def _forward(inputs: AttentionInputs, out_dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    """out and the first ``count`` of LSE, row max and row sum."""
    inputs = with_contiguous_options(inputs)
    found: tuple[Tensor, ...] = _forward_launch(inputs, out_dtype, count)([tensor.data_ptr() for tensor in tensors_of(inputs).values()])
    return found


def prepare_attention(arguments: tuple[Any, ...], wanted: int) -> Launch | None:
    """The call of the registered operator for its first ``wanted`` results, or None for one that needs copies first."""
    inputs, out_dtype = AttentionInputs(*arguments[:-1]), arguments[-1]
    if with_contiguous_options(inputs) is not inputs:
        return None
    launch = _forward_launch(inputs, out_dtype, wanted - 1)
    return launch if wanted > 1 else lambda addresses: launch(addresses)[0]


def _forward_launch(inputs: AttentionInputs, out_dtype: torch.dtype, count: int) -> Launch:
    """out and the first ``count`` of LSE, row max and row sum. The kernels keep the others in the workspace: allocations are a large part
    of a small call. Options must be contiguous."""
    module, q, scale, tensors = _module(inputs), inputs.q, inputs.scale, tensors_of(inputs)
    codes, device, index = dtype_codes(module), q.device, q.device.index
    *outer, _ = q.shape
    results = [allocator((*outer, inputs.v.shape[-1]), out_dtype, device)]
    results += [allocator(inputs.row_shape, torch.float32, device)] * count
    if 0 in outer:
        return lambda addresses: tuple([allocate() for allocate in results])
    problem = problem_of(codes, inputs)
    workspace_of = allocator((module.attention_forward_workspace(index, problem, scale),), torch.uint8, device)
    batch, (_, *of_q), (_, *of_k), (_, *of_v), no_pointers, no_bias, *rest = problem
    code, nulls, run, stream_of = codes[out_dtype], _NULL[count:], module.attention_forward, torch._C._cuda_getCurrentRawStream
    places = [_PLACES[name] for name in tensors][3:]

    def launch(addresses: list[int]) -> tuple[Tensor, ...]:
        pointers, bias = no_pointers, no_bias
        if places:
            given = [0] * (_POINTERS + 1)
            for place, address in zip(places, addresses[3:], strict=True):
                given[place] = address
            pointers = tuple(given[:_POINTERS])
            bias = None if no_bias is None else (given[_POINTERS], *no_bias[1:])
        arrays = (addresses[0], *of_q), (addresses[1], *of_k), (addresses[2], *of_v)
        found = tuple([allocate() for allocate in results])
        out, *rows = [tensor.data_ptr() for tensor in found]
        workspace = workspace_of()
        run(index, stream_of(index), (batch, *arrays, pointers, bias, *rest), scale, (out, code, *rows, *nulls), workspace.data_ptr())
        return found

    return launch


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


def _check_rows(inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor) -> None:
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    if dout.shape != shape:
        raise ValueError(f"attention_backward: dout must have shape {list(shape)}; got {list(dout.shape)}")
    for name, row in (("dlse", dlse), ("row_max", row_max), ("row_sum", row_sum)):
        if row is not None and row.shape != inputs.row_shape:
            raise ValueError(f"attention_backward: {name} must have shape {list(inputs.row_shape)}; got {list(row.shape)}")


def tensors_of(inputs: AttentionInputs) -> dict[str, Tensor]:
    """The tensors that are given, in the order of the registered operator."""
    return {name: tensor for name in _PLACES if (tensor := getattr(inputs, name)) is not None}


def with_contiguous_options(inputs: AttentionInputs) -> AttentionInputs:
    """The kernels take strides of q, k, v and bias only."""
    copied: dict[str, Any] = {
        name: tensor.contiguous() for name, tensor in tensors_of(inputs).items() if name in _OPTIONS and not tensor.is_contiguous()
    }
    return replace(inputs, **copied) if copied else inputs


def problem_of(codes: dict[torch.dtype, int], inputs: AttentionInputs) -> tuple[Any, ...]:
    """The problem as the extension takes it; options must be contiguous."""
    q, bias, segments = inputs.q, inputs.bias, inputs.cu_seqlens_q
    arrays = array(codes, q), array(codes, inputs.k), array(codes, inputs.v)
    pointers = tuple([address(getattr(inputs, name)) for name in _OPTIONS])
    shift = None if bias is None else array(codes, bias)
    batch = q.shape[0] if segments is None else segments.numel() - 1
    return (batch, *arrays, pointers, shift, inputs.causal, inputs.window_left, inputs.window_right)


def _workspace(like: Tensor, size: int) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None
