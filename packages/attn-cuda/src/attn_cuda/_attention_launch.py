"""Kernel calls of ``attention``, dense and packed: the problem as the C interface takes it, the workspace and the results."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_cuda._arrays import address, array, dtype_code, module_for, place

__all__ = ["MAX_HEAD_DIM", "AttentionKernels"]

MAX_HEAD_DIM = 256
"""Largest head dim of q, k and v that the kernels hold."""


class AttentionKernels:
    """Attention of the ``cuda`` engine, on the current stream of the tensors' device.

    Inputs may have any strides; one whose rows are not contiguous multiples of 16 bytes is copied to the workspace first.
    """

    def attention_forward(self, inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out (layout of q, V columns, ``out_dtype``), LSE, row max and row sum (float32, ``inputs.row_shape``)."""
        module = _module(inputs)
        out, lse = _results(inputs, out_dtype)
        row_max, row_sum = torch.empty_like(lse), torch.empty_like(lse)
        _forward(module, inputs, out, lse, (row_max, row_sum))
        return out, lse, row_max, row_sum

    def attention_inference(self, inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out and LSE; the row state goes to the workspace, since allocations are a large part of a small call."""
        module = _module(inputs)
        out, lse = _results(inputs, out_dtype)
        _forward(module, inputs, out, lse, None)
        return out, lse

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
            gradients = (*array(module, dout), *pointers, *(found["bias"].shape if "bias" in found else (1, 1, 1, 1)))
            workspace = _workspace(inputs.q, module.attention_backward_workspace(device, problem, gradients))
            module.attention_backward(device, stream, problem, gradients, address(workspace))
            del kept, rows, workspace
        return found


def _results(inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = inputs.q
    out = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]), dtype=out_dtype)
    return out, q.new_empty(inputs.row_shape, dtype=torch.float32)


def _forward(module: ModuleType, inputs: AttentionInputs, out: Tensor, lse: Tensor, states: tuple[Tensor, Tensor] | None) -> None:
    """Enqueue the kernels; ``states`` are row max and row sum, or None to forget them."""
    if not lse.numel():
        return
    problem, kept = _problem(module, inputs)
    device, stream = place(out)
    size = module.attention_forward_workspace(device, problem)
    workspace: Tensor | None
    if states is None:
        size, row = _aligned(size), _aligned(4 * lse.numel())
        workspace = out.new_empty(size + 2 * row, dtype=torch.uint8)
        row_max = workspace.data_ptr() + size
        addresses = row_max, row_max + row
    else:
        workspace = _workspace(out, size)
        addresses = states[0].data_ptr(), states[1].data_ptr()
    results = (out.data_ptr(), dtype_code(module, out.dtype), lse.data_ptr(), *addresses)
    module.attention_forward(device, stream, problem, results, address(workspace))
    del kept, workspace


def _aligned(size: int) -> int:
    """Bytes up to the next multiple of 256, the alignment of an allocation."""
    return (size + 255) // 256 * 256


def _module(inputs: AttentionInputs, *others: Tensor | None) -> ModuleType:
    """The compiled module, once the inputs are known to be ones that it runs."""
    module = module_for(inputs.q, inputs.k, inputs.v, inputs.bias, *_options(inputs), *others)
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


def _options(inputs: AttentionInputs) -> tuple[Tensor | None, ...]:
    """The tensors that the kernels read as contiguous ones, in the order of the C interface."""
    return (
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


def _problem(module: ModuleType, inputs: AttentionInputs) -> tuple[Any, list[Tensor | None]]:
    """The problem as the C interface takes it, and the tensors that it points to until the kernels are enqueued."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    if inputs.cu_seqlens_q is not None:
        (queries, heads, head_dim), (keys, kv_heads) = q.shape, k.shape[:2]
        batch = inputs.cu_seqlens_q.numel() - 1
    else:
        (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    kept = [None if tensor is None else tensor.contiguous() for tensor in _options(inputs)]
    kept.append(bias)
    values = (
        *(batch, heads, kv_heads, queries, keys, head_dim, v.shape[-1]),
        *array(module, q),
        *array(module, k),
        *array(module, v),
        *[0 if tensor is None else tensor.data_ptr() for tensor in kept],
        *((0, 0, 0, 0) if bias is None else _bias_strides(bias)),
        *(inputs.causal, inputs.window_left, inputs.window_right),
    )
    return module.attention(values, inputs.scale), kept


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


def _workspace(like: Tensor, size: int) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None
