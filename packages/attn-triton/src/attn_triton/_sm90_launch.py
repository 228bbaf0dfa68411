"""Launches of the forward kernels of contract sm90-v1: results, descriptors, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec._sm90 import CONTRACT, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_triton import _sm90_forward_kernel as kernel
from attn_triton._configuration import on_device
from attn_triton._problem import Problem, attention_problem, result_strides, row_grid
from attn_triton._sm90_configuration import CONFIGS, HEAD_DIMS, TileConfig

__all__ = ["attention_forward", "check_supported", "rows_of_tiles", "traits"]

_ALIGNMENT = 16
"""Bytes: what the tensor memory accelerator asks of an address and of the strides between rows."""
FEW_PROGRAMS = 128
"""Fewer programs than that, about one a processor of an H100 or H200, and the segments become programs too."""


def check_supported(inputs: AttentionInputs) -> None:
    """Refuse what the kernels lack when they are called below the public functions."""
    reasons = []
    widths = inputs.q.shape[-1], inputs.v.shape[-1]
    if widths[0] not in HEAD_DIMS or widths[1] != widths[0]:
        reasons.append(f"head_dim={widths[0]}, value_dim={widths[1]} (supported: {', '.join(map(str, HEAD_DIMS))}, both the same)")
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"dtype {inputs.q.dtype} (supported: bfloat16, float16)")
    options = {
        "bias": inputs.bias is not None,
        "key_padding_mask": inputs.key_mask is not None or inputs.query_mask is not None,
        "dropout": inputs.dropout_p > 0.0,
    }
    reasons += [f"{name} (not supported)" for name, given in options.items() if given]
    if reasons:
        raise UnsupportedProblem("attn_triton", [f"{reason} with contract {CONTRACT}; ordered-v1 has it" for reason in reasons])


def attention_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out (layout and dtype of q) and LSE (float32, ``inputs.row_shape``)."""
    check_supported(inputs)
    q = inputs.q
    factor = score_factor(inputs.scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(inputs.row_shape, dtype=torch.float32, device=q.device)
    if inputs.packed:  # rows outside the segments belong to no program
        out.zero_()
        lse.fill_(-torch.inf)
    if lse.numel() == 0:
        return out, lse
    problem = attention_problem(inputs)
    with on_device(q):
        segments = _segments(inputs, problem)
        if segments > 1:
            _split(inputs, problem, factor, segments, out, lse)
        else:
            _whole(inputs, problem, factor, out, lse)
    return out, lse


def traits(inputs: AttentionInputs) -> dict[str, Any]:
    """Compile-time facts of a call that its kernels share."""
    return {
        "D": inputs.q.shape[-1],
        "WINDOWED": inputs.window_left >= 0 or inputs.k_start is not None,
        "PACKED": inputs.packed,
        "GARBAGE": inputs.packed or inputs.kv_lengths is not None,
    }


def rows_of_tiles(tensor: Tensor, packed: bool, size: int) -> TensorDescriptor:
    """Blocks [1, 1, size, D] of k, v, q or dout as [batch or 1, heads, rows, D]; a copy where the hardware cannot take the strides."""
    rows = tensor.transpose(0, 1).unsqueeze(0) if packed else tensor
    if rows.numel() == 0:  # a descriptor needs an element; no program reads one
        rows = tensor.new_zeros((1, 1, 1, tensor.shape[-1]))
    step = _ALIGNMENT // rows.element_size()
    strides = [stride if length > 1 else rows.shape[-1] for length, stride in zip(rows.shape[:3], rows.stride()[:3], strict=True)]
    if rows.stride(3) != 1 or rows.data_ptr() % _ALIGNMENT or any(stride <= 0 or stride % step for stride in strides):
        rows = rows.clone(memory_format=torch.contiguous_format)
        strides = list(rows.stride()[:3])
    return TensorDescriptor(rows, list(rows.shape), [*strides, 1], [1, 1, size, rows.shape[-1]])


def _segments(inputs: AttentionInputs, problem: Problem) -> int:
    """Key segments that become programs of their own, or 1. Only a question of speed: both ways give the same bits.

    Rows that fill no more than the smallest block (decode) are always split. Packed calls stay whole, since how many keys their segments
    have is known on the device alone.
    """
    sizes, configs = problem.sizes, CONFIGS[inputs.q.shape[-1]]
    rows = sizes.queries * sizes.group
    programs = sizes.batch * sizes.kv_heads * -(-rows // configs.forward.owners)
    if inputs.packed or (rows > configs.segments.owners and programs >= FEW_PROGRAMS):
        return 1
    lead = 0 if inputs.k_start is None else kernel.SEGMENT_KEYS - 1
    return -(-(sizes.keys + lead) // kernel.SEGMENT_KEYS)


def _whole(inputs: AttentionInputs, problem: Problem, factor: float, out: Tensor, lse: Tensor) -> None:
    config = CONFIGS[inputs.q.shape[-1]].forward
    grid = row_grid(inputs, problem.sizes, config.owners)
    if grid.programs == 0:
        return
    kernel.attention_forward[(grid.programs,)](
        problem.arrays,
        problem.sizes.encoded,
        grid.plan,
        grid.per_item,
        *_key_tiles(inputs),
        factor,
        out,
        *result_strides(out, inputs.packed),
        lse,
        ROWS=config.owners,
        STAGES=config.stages,
        **traits(inputs),
        **config.options,
    )


def _split(inputs: AttentionInputs, problem: Problem, factor: float, segments: int, out: Tensor, lse: Tensor) -> None:
    """The states of all segments, then their merge. The workspace holds float32 O for every row and segment."""
    configs = CONFIGS[inputs.q.shape[-1]]
    sizes, shared = problem.sizes, traits(inputs)
    parts_n, parts_sum = (torch.empty((segments, lse.numel()), dtype=torch.float32, device=lse.device) for _ in range(2))
    parts_o = torch.empty((segments, lse.numel(), inputs.q.shape[-1]), dtype=torch.float32, device=lse.device)
    config = _few_rows(configs.segments, sizes.queries * sizes.group)
    grid = row_grid(inputs, sizes, config.owners)
    kernel.attention_segments[(grid.programs * segments,)](
        problem.arrays,
        sizes.encoded,
        grid.plan,
        grid.per_item,
        segments,
        *_key_tiles(inputs),
        factor,
        parts_n,
        parts_sum,
        parts_o,
        ROWS=config.owners,
        STAGES=config.stages,
        **shared,
        **config.options,
    )
    grid = row_grid(inputs, sizes, configs.merge.owners)
    kernel.attention_merge[(grid.programs,)](
        problem.arrays,
        sizes.encoded,
        grid.plan,
        grid.per_item,
        segments,
        parts_n,
        parts_sum,
        parts_o,
        out,
        *result_strides(out, inputs.packed),
        lse,
        ROWS=configs.merge.owners,
        STAGES=configs.merge.stages,
        D=shared["D"],
        PACKED=inputs.packed,
        **configs.merge.options,
    )


def _few_rows(config: TileConfig, rows: int) -> TileConfig:
    """Blocks of 16 rows for a decode step, of 64 for longer chunks."""
    return config if rows <= config.owners else TileConfig(64, config.num_warps, config.stages)


def _key_tiles(inputs: AttentionInputs) -> tuple[TensorDescriptor, TensorDescriptor]:
    keys, values = (rows_of_tiles(tensor, inputs.packed, kernel.TILE_KEYS) for tensor in (inputs.k, inputs.v))
    return keys, values
