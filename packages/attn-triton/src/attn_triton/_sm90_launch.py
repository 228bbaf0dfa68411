"""Launches of the forward kernels of contract sm90-v1: results, descriptors, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec._sm90 import CONTRACT, key_tile, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_triton import _sm90_forward_kernel as kernel
from attn_triton._configuration import on_device
from attn_triton._problem import Grid, Problem, Sizes, attention_problem, block_counts, result_strides, row_grid
from attn_triton._sm90_configuration import CONFIGS, HEAD_DIMS, TileConfig

__all__ = ["attention_forward", "attention_states", "check_supported", "key_gap", "merged_states", "problem_of", "rows_of_tiles", "traits"]

States = tuple[Tensor, Tensor, Tensor]

_ALIGNMENT = 16
"""Bytes: what the tensor memory accelerator asks of an address and of the strides between rows."""
FEW_PROGRAMS = 128
"""Fewer programs than that, about one a processor of an H100 or H200, and the segments become programs too."""
MOST_WORKSPACE = 1 << 28
"""Bytes of O of all segments of packed rows; above them the segments stay in one program."""


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
        "query_mask": inputs.query_mask is not None,
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
    problem = problem_of(inputs)
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
        "N": key_tile(inputs.q.shape[-1]),
        "WINDOWED": inputs.window_left >= 0 or inputs.k_start is not None,
        "PACKED": inputs.packed,
        "GARBAGE": inputs.packed or inputs.kv_lengths is not None,
    }


def key_gap(inputs: AttentionInputs) -> Tensor | None:
    """int64 [B, 2]: the first masked key and the one after the last, where ``key_mask`` is given (``JointLayout.key_mask``)."""
    if inputs.key_mask is None:
        return None
    kept = inputs.key_mask.to(torch.int64)
    begin = kept.cumprod(1).sum(1)
    return torch.stack((begin, begin + kept.shape[1] - kept.sum(1)), 1)


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


def problem_of(inputs: AttentionInputs) -> Problem:
    """The call for kernels that take masked keys as ``key_gap``."""
    return attention_problem(inputs if inputs.key_mask is None else replace(inputs, key_mask=None))


def _segments(inputs: AttentionInputs, problem: Problem) -> int:
    """Key segments that become programs of their own, or 1. Only a question of speed: both ways give the same bits.

    Rows that fill no more than the smallest block (decode) are always split, those of packed segments by their mean, and while the
    workspace stays small: how many keys a packed segment has is known on the device alone.
    """
    sizes, configs = problem.sizes, CONFIGS[inputs.q.shape[-1]]
    rows, owners = sizes.queries * sizes.group, configs.segments.owners
    if inputs.key_mask is not None:
        return 1
    lead = 0 if inputs.k_start is None else kernel.SEGMENT_KEYS - 1
    segments = -(-(sizes.keys + lead) // kernel.SEGMENT_KEYS)
    if inputs.packed:
        splits = rows <= owners * sizes.batch and 4 * segments * rows * sizes.kv_heads * inputs.q.shape[-1] <= MOST_WORKSPACE
    else:
        splits = rows <= owners or sizes.batch * sizes.kv_heads * -(-rows // configs.forward.owners) < FEW_PROGRAMS
    return segments if splits else 1


def _segment_grid(inputs: AttentionInputs, sizes: Sizes, size: int, segments: int) -> Grid:
    """Blocks of ``size`` rows times segments of keys; packed: as many programs as there are when no segment has many of both."""
    grid = row_grid(inputs, sizes, size)
    if grid.plan is None:
        return replace(grid, programs=grid.programs * segments)
    assert inputs.cu_seqlens_k is not None
    keys = block_counts(inputs.cu_seqlens_k, inputs.seqlens_k, sizes.keys, 1, kernel.SEGMENT_KEYS).clamp(min=1)
    plan = torch.cat((grid.plan[:1], torch.cumsum((grid.plan[1:] - grid.plan[:-1]) * keys, dim=0)))
    return Grid(plan, 0, grid.programs + (sizes.keys // kernel.SEGMENT_KEYS) * sizes.kv_heads)


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
        key_gap(inputs),
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
    parts = _workspace(segments, lse.shape, out.shape[-1], lse.device)
    _states(inputs, problem, factor, segments, parts)
    _merge(inputs, problem, segments, parts, out, lse)


def attention_states(inputs: AttentionInputs, count: int) -> States:
    """n and l float32 [count, *row_shape] and o [count, *row_shape, D] of the segments from that of stored key 0 on; dense inputs."""
    check_supported(inputs)
    parts = _workspace(count, inputs.row_shape, inputs.q.shape[-1], inputs.q.device)
    if parts[0].numel():
        with on_device(inputs.q):
            _states(inputs, problem_of(inputs), score_factor(inputs.scale), count, parts)
    return parts


def merged_states(n: Tensor, l: Tensor, o: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D] and LSE [B, H, S] of the states of segments, ascending; sinks float32 [H]."""
    out, lse = torch.empty(o.shape[1:], dtype=dtype, device=o.device), torch.empty(n.shape[1:], dtype=torch.float32, device=o.device)
    if lse.numel():
        segments, (batch, heads, _, width) = n.shape[0], out.shape
        keys = out.new_empty(1).expand(batch, heads, segments * kernel.SEGMENT_KEYS, width)  # no key is read
        inputs = AttentionInputs(out, keys, keys, sinks=sinks)
        with on_device(out):
            _merge(inputs, attention_problem(inputs), segments, (n.contiguous(), l.contiguous(), o.contiguous()), out, lse)
    return out, lse


def _workspace(segments: int, rows: Sequence[int], width: int, device: torch.device) -> States:
    n, total = (torch.empty((segments, *rows), dtype=torch.float32, device=device) for _ in range(2))
    return n, total, torch.empty((segments, *rows, width), dtype=torch.float32, device=device)


def _states(inputs: AttentionInputs, problem: Problem, factor: float, segments: int, parts: States) -> None:
    sizes = problem.sizes
    rows = sizes.queries * sizes.group // (sizes.batch if inputs.packed else 1)
    config = _few_rows(CONFIGS[inputs.q.shape[-1]].segments, rows)
    grid = _segment_grid(inputs, sizes, config.owners, segments)
    kernel.attention_segments[(grid.programs,)](
        problem.arrays,
        sizes.encoded,
        grid.plan,
        grid.per_item,
        segments,
        *_key_tiles(inputs),
        factor,
        *parts,
        ROWS=config.owners,
        STAGES=config.stages,
        **traits(inputs),
        **config.options,
    )


def _merge(inputs: AttentionInputs, problem: Problem, segments: int, parts: States, out: Tensor, lse: Tensor) -> None:
    config = CONFIGS[out.shape[-1]].merge
    grid = row_grid(inputs, problem.sizes, config.owners)
    kernel.attention_merge[(grid.programs,)](
        problem.arrays,
        problem.sizes.encoded,
        grid.plan,
        grid.per_item,
        segments,
        *parts,
        out,
        *result_strides(out, inputs.packed),
        lse,
        ROWS=config.owners,
        N=key_tile(out.shape[-1]),
        D=out.shape[-1],
        STAGES=config.stages,
        PACKED=inputs.packed,
        **config.options,
    )


def _few_rows(config: TileConfig, rows: int) -> TileConfig:
    """Blocks of 16 rows for a decode step, of 64 for longer chunks."""
    return config if rows <= config.owners else TileConfig(64, config.num_warps, config.stages)


def _key_tiles(inputs: AttentionInputs) -> tuple[TensorDescriptor, TensorDescriptor]:
    keys, values = (rows_of_tiles(tensor, inputs.packed, key_tile(inputs.k.shape[-1])) for tensor in (inputs.k, inputs.v))
    return keys, values
