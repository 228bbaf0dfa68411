"""Kernel calls of contract sm90-v1 on Hopper's tensor cores, and why they cannot run here."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from attn_spec import Problem, UnsupportedProblem
from attn_spec._sm90 import CONTRACT, score_factor
from attn_spec.torch import AttentionInputs, Launches
from torch import Tensor

from attn_cuda._arrays import Launch, address, allocator, array, dtype_codes, module_for, place
from attn_cuda._attention_launch import OPTIONS, problem_of, tensors_of, with_contiguous_options
from attn_cuda._describer import describer
from attn_cuda._extension import extension

__all__ = ["Sm90Kernels", "prepare_sm90", "sm90_reasons"]

HEAD_DIMS = (64, 128)
"""Head dims of q, k and v; docs/adr/0008-head-dim-256.md says why 256 is attn_triton's."""
_NEEDS = f"contract {CONTRACT} needs an NVIDIA GPU of compute capability 9.0; attn_reference has its bits on the CPU"


class Sm90Kernels:
    """Attention of contract sm90-v1, on the current stream of the tensors' device.

    ``key_mask`` drops keys in place (``TensorCoreKernels.attention_sm90_forward``), of dense calls that mask nothing else.
    Inputs may have any strides; those that the copy engine cannot address are copied to the workspace first.
    """

    def attention_sm90_forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """out (layout and dtype of q) and LSE (float32, ``inputs.row_shape``)."""
        found: tuple[Tensor, Tensor] = _FORWARD(*_VALUES(with_contiguous_options(inputs)))
        return found

    def attention_sm90_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """Gradients of the names in ``needs`` (q, k, v, sinks), each fresh, contiguous, with the shape and dtype of its input."""
        inputs = with_contiguous_options(inputs)
        module = _module(inputs, dout, dlse, out, lse)
        inputs.check_shapes({"dout": dout, "out": out}, {"dlse": dlse, "lse": lse})
        found = inputs.gradients(needs)
        if any(gradient.numel() for gradient in found.values()):
            codes, scale = dtype_codes(module), inputs.scale
            problem = problem_of(codes, inputs)
            device, stream = place(inputs.q)
            rows = [None if row is None else row.to(torch.float32).contiguous() for row in (lse, dlse)]
            upstream = dout.to(inputs.q.dtype)
            pointers = (*map(address, rows), *(address(found.get(name)) for name in ("q", "k", "v", "sinks")))
            gradients = (array(codes, upstream), array(codes, out), *pointers)
            size = module.sm90_backward_workspace(device, problem, scale, gradients)
            workspace = inputs.q.new_empty(size, dtype=torch.uint8)
            module.sm90_backward(device, stream, problem, scale, score_factor(scale), gradients, workspace.data_ptr())
            del rows, upstream, workspace
        return found


def prepare_sm90(arguments: tuple[Any, ...], wanted: int) -> Launch | None:
    """The call of the registered operator for its first ``wanted`` results, or None for one that needs copies first."""
    inputs = AttentionInputs(*arguments)
    if with_contiguous_options(inputs) is not inputs:
        return None
    launch = _forward_launch(inputs)
    return launch if wanted > 1 else lambda addresses: launch(addresses)[0]


def _forward_launch(inputs: AttentionInputs) -> Launch:
    """out and LSE. Options must be contiguous."""
    module, q, scale = _module(inputs), inputs.q, inputs.scale
    device, index, factor = q.device, q.device.index, score_factor(scale)
    out_of, lse_of = allocator(tuple(q.shape), q.dtype, device), allocator(inputs.row_shape, torch.float32, device)
    if 0 in inputs.row_shape:
        return lambda addresses: (out_of(), lse_of())
    problem = problem_of(dtype_codes(module), inputs)
    batch, *arrays, pointers, bias, causal, left, right = problem
    facts = [array[1:] for array in arrays]
    numbers = [OPTIONS.index(name) for name in list(tensors_of(inputs))[len(arrays) :]]
    workspace_of = allocator((module.sm90_forward_workspace(index, problem, scale),), torch.uint8, device)
    stream_of, absent = torch._C._cuda_getCurrentRawStream, [0] * len(pointers)

    def launch(addresses: list[int]) -> tuple[Tensor, Tensor]:
        out, lse, workspace = out_of(), lse_of(), workspace_of()
        q, k, v, *options = addresses
        given = absent.copy()
        for number, option in zip(numbers, options, strict=True):
            given[number] = option
        call = batch, (q, *facts[0]), (k, *facts[1]), (v, *facts[2]), given, bias, causal, left, right
        module.sm90_forward(index, stream_of(index), call, scale, factor, out.data_ptr(), lse.data_ptr(), workspace.data_ptr())
        return out, lse

    return launch


_VALUES = attrgetter(*[field.name for field in fields(AttentionInputs)])
_FORWARD = Launches(lambda *values: _forward_launch(AttentionInputs(*values)), describer)


def sm90_reasons(problem: Problem) -> tuple[str, ...]:
    """What the kernels of contract sm90-v1 lack for ``problem``, beyond what the contract refuses."""
    found = []
    if problem.head_dim == problem.value_dim and problem.head_dim not in HEAD_DIMS:
        found.append(
            f"head_dim={problem.head_dim} with contract {CONTRACT} (supported: {', '.join(map(str, HEAD_DIMS))}; "
            "attn_triton: 256 too; others: ordered-v1)"
        )
    reason = _device_reason(None)
    return tuple(found) if reason is None else (*found, reason)


@torch.compiler.assume_constant_result
def _device_reason(device: int | None) -> str | None:
    """Why contract sm90-v1 does not run on a device, or None; whether there is a device at all is another question."""
    module = extension()
    if isinstance(module, str):
        return None
    if not module.SM90:
        return f"attn-cuda was built for {module.ARCHITECTURES}, without 90a ({_NEEDS})"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_capability(device)
    return None if found == (9, 0) else f"compute capability {'.'.join(map(str, found))} ({_NEEDS})"


def _masks_besides(inputs: AttentionInputs) -> bool:
    """Whether something else than ``key_mask`` masks or moves keys."""
    starts = inputs.kv_lengths, inputs.q_start, inputs.k_start, inputs.cu_seqlens_q
    return inputs.causal or max(inputs.window_left, inputs.window_right) >= 0 or any(start is not None for start in starts)


def _module(inputs: AttentionInputs, *others: Tensor | None) -> ModuleType:
    """The compiled module, once the inputs are known to be ones that it runs."""
    module = module_for(*tensors_of(inputs).values(), *others)
    reasons = []
    widths = inputs.q.shape[-1], inputs.v.shape[-1]
    if widths[0] not in HEAD_DIMS or widths[1] != widths[0]:
        reasons.append(f"head_dim={widths[0]}, value_dim={widths[1]} (supported: {', '.join(map(str, HEAD_DIMS))}, both the same)")
    if any(tensor.dtype != inputs.q.dtype for tensor in (inputs.k, inputs.v)) or inputs.q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"dtype {inputs.q.dtype} (supported: bfloat16, float16, of q, k and v alike)")
    options = {
        "bias": inputs.bias is not None,
        "key_padding_mask": inputs.query_mask is not None or (inputs.key_mask is not None and _masks_besides(inputs)),
        "dropout": inputs.dropout_p > 0.0,
    }
    reasons += [f"{name} (not supported)" for name, given in options.items() if given]
    reasons = [f"{reason} with contract {CONTRACT}; ordered-v1 has it" for reason in reasons]
    reason = _device_reason(inputs.q.device.index)
    if reason is not None:
        reasons.append(reason)
    if reasons:
        raise UnsupportedProblem("attn_cuda", reasons)
    return module
