"""Kernel calls of ``attention``, dense and packed: the problem as the C interface takes it, the workspace and the results."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_cuda._arrays import address, array, dtype_codes, module_for, place

__all__ = ["MAX_HEAD_DIM", "AttentionKernels", "options_of", "problem_of"]

MAX_HEAD_DIM = 256
"""Largest head dim of q, k and v that the kernels hold."""
_NULL = (0, 0, 0)
_POINTERS = 10


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
        options = options_of(inputs)
        module = _module(inputs, (*options.values(), dout, dlse, row_max, row_sum))
        _check_rows(inputs, dout, dlse, row_max, row_sum)
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks, "bias": inputs.bias}
        found = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in tensors.items()
            if tensor is not None and name in needs
        }
        if any(gradient.numel() for gradient in found.values()):
            codes = dtype_codes(module)
            problem, kept = problem_of(codes, inputs, options)
            device, stream = place(inputs.q)
            rows = [None if row is None else row.to(torch.float32).contiguous() for row in (dlse, row_max, row_sum)]
            pointers = (*map(address, rows), *(address(found.get(name)) for name in tensors))
            gradients = (array(codes, dout), *pointers, *(found["bias"].shape if "bias" in found else (1, 1, 1, 1)))
            workspace = _workspace(inputs.q, module.attention_backward_workspace(device, problem, inputs.scale, gradients))
            module.attention_backward(device, stream, problem, inputs.scale, gradients, address(workspace))
            del kept, rows, workspace
        return found


def _forward(inputs: AttentionInputs, out_dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    """out and the first ``count`` of LSE, row max and row sum. The kernels keep the others in the workspace: allocations are a large part
    of a small call."""
    options = options_of(inputs)
    module = _module(inputs, options.values())
    q, scale = inputs.q, inputs.scale
    *outer, _ = q.shape
    out = q.new_empty((*outer, inputs.v.shape[-1]), dtype=out_dtype)
    rows = [q.new_empty(inputs.row_shape, dtype=torch.float32) for _ in range(count)]
    if 0 not in outer:
        codes = dtype_codes(module)
        problem, kept = problem_of(codes, inputs, options)
        device, stream = place(q)
        workspace = q.new_empty(module.attention_forward_workspace(device, problem, scale), dtype=torch.uint8)
        results = (out.data_ptr(), codes[out_dtype], *[row.data_ptr() for row in rows], *_NULL[count:])
        module.attention_forward(device, stream, problem, scale, results, workspace.data_ptr())
        del kept, workspace
    return out, *rows


def _module(inputs: AttentionInputs, others: Iterable[Tensor | None]) -> ModuleType:
    """The compiled module, once the inputs are known to be ones that it runs."""
    module = module_for(inputs.q, inputs.k, inputs.v, inputs.bias, *others)
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


def options_of(inputs: AttentionInputs) -> dict[int, Tensor]:
    """The tensors that the kernels read as contiguous ones, by their place in the C interface."""
    places = (
        inputs.query_mask,
        inputs.key_mask,
        inputs.kv_lengths,
        inputs.q_start,
        inputs.k_start,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        inputs.seqlens_q,
        inputs.seqlens_k,
        inputs.sinks,
    )
    return {place: tensor for place, tensor in enumerate(places) if tensor is not None}


def problem_of(codes: dict[torch.dtype, int], inputs: AttentionInputs, options: dict[int, Tensor]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The problem as the extension takes it, and the tensors that it points to until the kernels are enqueued."""
    q, bias, segments = inputs.q, inputs.bias, inputs.cu_seqlens_q
    kept, pointers = [], [0] * _POINTERS
    for where, tensor in options.items():
        kept.append(tensor.contiguous())
        pointers[where] = kept[-1].data_ptr()
    arrays = array(codes, q), array(codes, inputs.k), array(codes, inputs.v)
    shift = None if bias is None else array(codes, bias)
    batch = q.shape[0] if segments is None else segments.numel() - 1
    return (batch, *arrays, tuple(pointers), shift, inputs.causal, inputs.window_left, inputs.window_right), kept


def _workspace(like: Tensor, size: int) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None
