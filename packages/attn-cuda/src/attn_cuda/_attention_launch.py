"""Kernel calls of ``attention``, dense and packed: the problem as the C interface takes it, the workspace and the results."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_cuda._arrays import Array, address, array, dtype_code, module_for, place

__all__ = ["MAX_HEAD_DIM", "AttentionKernels"]

MAX_HEAD_DIM = 256
"""Largest head dim of q, k and v that the kernels hold."""

_OPTIONS = ("kv_lengths", "q_start", "k_start", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "sinks")

Problem = tuple[Any, ...]


class AttentionKernels:
    """Attention of the ``cuda`` engine, on the current stream of the tensors' device.

    Inputs may have any strides; one whose rows are not contiguous multiples of 16 bytes is copied to the workspace first.
    """

    def attention_forward(self, inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out (layout of q, V columns, ``out_dtype``), LSE, row max and row sum (float32, ``inputs.row_shape``)."""
        module = _module(inputs)
        q = inputs.q
        out = torch.empty((*q.shape[:-1], inputs.v.shape[-1]), dtype=out_dtype, device=q.device)
        lse, row_max, row_sum = (torch.empty(inputs.row_shape, dtype=torch.float32, device=q.device) for _ in range(3))
        if lse.numel():
            problem, kept = _problem(module, inputs)
            device, stream = place(q)
            workspace = _workspace(q, module.attention_forward_workspace(device, problem))
            results = (out.data_ptr(), dtype_code(module, out_dtype), lse.data_ptr(), row_max.data_ptr(), row_sum.data_ptr())
            module.attention_forward(device, stream, problem, results, address(workspace))
            del kept, workspace
        return out, lse, row_max, row_sum

    def attention_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """Gradients of the names in ``needs`` (q, k, v, sinks, bias), each with the shape and dtype of its input."""
        module = _module(inputs, dout, dlse, row_max, row_sum)
        _check_rows(inputs, dout, dlse, row_max, row_sum)
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks, "bias": inputs.bias}
        found = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in tensors.items()
            if tensor is not None and name in needs
        }
        if any(gradient.numel() for gradient in found.values()):
            problem, kept = _problem(module, inputs)
            device, stream = place(inputs.q)
            rows = [None if row is None else row.to(torch.float32).contiguous() for row in (dlse, row_max, row_sum)]
            pointers = (*map(address, rows), *(address(found.get(name)) for name in tensors))
            gradients = (array(module, dout), pointers, tuple(found["bias"].shape) if "bias" in found else (1, 1, 1, 1))
            workspace = _workspace(inputs.q, module.attention_backward_workspace(device, problem, gradients))
            module.attention_backward(device, stream, problem, gradients, address(workspace))
            del kept, rows, workspace
        return found


def _module(inputs: AttentionInputs, *others: Tensor | None) -> ModuleType:
    """The compiled module, once the inputs are known to be ones that it runs."""
    tensors = (inputs.k, inputs.v, inputs.query_mask, inputs.key_mask, inputs.bias, *(getattr(inputs, name) for name in _OPTIONS), *others)
    module = module_for(inputs.q, *tensors)
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


def _problem(module: ModuleType, inputs: AttentionInputs) -> tuple[Problem, list[Tensor | None]]:
    """The problem, and the tensors that it points to until the kernels are enqueued."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.packed:
        assert inputs.cu_seqlens_q is not None
        (queries, heads, head_dim), (keys, kv_heads) = q.shape, k.shape[:2]
        batch = inputs.cu_seqlens_q.numel() - 1
    else:
        (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    kept = [None if tensor is None else tensor.contiguous() for tensor in (inputs.query_mask, inputs.key_mask)]
    kept += [None if tensor is None else tensor.contiguous() for tensor in (getattr(inputs, name) for name in _OPTIONS)]
    kept.append(inputs.bias)
    arrays: tuple[Array, Array, Array] = (array(module, q), array(module, k), array(module, v))
    bias_strides = (0, 0, 0, 0) if inputs.bias is None else _bias_strides(inputs.bias)
    return (
        (batch, heads, kv_heads, queries, keys, head_dim, v.shape[-1]),
        arrays,
        tuple(map(address, kept)),
        bias_strides,
        inputs.causal,
        inputs.window_left,
        inputs.window_right,
        inputs.scale,
    ), kept


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


def _workspace(like: Tensor, size: int) -> Tensor | None:
    return torch.empty(size, dtype=torch.uint8, device=like.device) if size else None
