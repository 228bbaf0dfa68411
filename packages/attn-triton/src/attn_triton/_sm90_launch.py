"""Launches of the forward kernels of contract sm90-v1: results, descriptors, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_spec import UnsupportedProblem
from attn_spec._sm90 import CONTRACT, key_tile, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_triton import _sm90_forward_kernel as kernel
from attn_triton._configuration import on_device
from attn_triton._problem import Problem, attention_problem, result_strides
from attn_triton._remembered_launch import Kinds, Launches, kind_of, options_of, tensors_of
from attn_triton._sm90_configuration import CONFIGS, HEAD_DIMS, TileConfig
from attn_triton._sm90_grid import fill_gap, new_gap, new_plans, row_blocks

__all__ = [
    "attention_forward",
    "attention_states",
    "check_supported",
    "merged_states",
    "problem_of",
    "rows_of_tiles",
    "traits",
]

States = tuple[Tensor, Tensor, Tensor]

_ALIGNMENT = 16
"""Bytes: what the tensor memory accelerator asks of an address and of the strides between rows."""
FEW_PROGRAMS = 128
"""Fewer programs than that, about one a processor of an H100 or H200, and the segments become programs too."""
MOST_WORKSPACE = 1 << 28
"""Bytes of O of all segments of packed rows; above them the segments stay in one program."""

_KINDS = Kinds()


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


@dataclass(frozen=True)
class _Call:
    """One call; ``plans`` are workspace for those of its launches, two for packed inputs and none for others."""

    launch: Launches
    inputs: AttentionInputs
    problem: Problem
    plans: tuple[Tensor, ...] = ()

    def plan(self, number: int) -> Tensor | None:
        return self.plans[number] if self.plans else None


def attention_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """out (layout and dtype of q) and LSE (float32, ``inputs.row_shape``)."""
    check_supported(inputs)
    q, segments, config = inputs.q, _segments(inputs), CONFIGS[inputs.q.shape[-1]]
    out, lse = q.new_empty(q.shape), q.new_empty(inputs.row_shape, dtype=torch.float32)
    if inputs.packed:  # rows outside the segments belong to no program
        out.zero_()
        lse.fill_(-torch.inf)
    if lse.numel() == 0:
        return out, lse
    parts = _workspace(lse, segments, q.shape[-1]) if segments > 1 else None
    plans, gap = new_plans(inputs, 2), new_gap(inputs)
    given = tensors_of(inputs)
    tensors = (*given, out, lse, gap, *plans, *(parts or ()))
    kind = kind_of(given, segments, *options_of(inputs))
    launches = _KINDS.get(kind, config)
    with on_device(q):
        if launches is not None:
            launches.again(tensors)
        else:
            launches = Launches(tensors, config)
            call = _Call(launches, inputs, problem_of(inputs), plans)
            if parts is None:
                fill_gap(launches, inputs, gap)
                _whole(call, gap, out, lse)
            else:
                _states(call, segments, parts)
                _merge(call, segments, parts, out, lse)
            _KINDS.keep(kind, launches)
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
    """The call for kernels that take masked keys as a gap."""
    return attention_problem(inputs if inputs.key_mask is None else replace(inputs, key_mask=None))


def _segments(inputs: AttentionInputs) -> int:
    """Key segments that become programs of their own, or 1. Only a question of speed: both ways give the same bits.

    Rows that fill no more than the smallest block (decode) are split unless there are as many programs as the processors hold at once, of
    as many keys each. Those of packed segments are split by their mean, and while the workspace stays small: how many keys a packed segment
    has is known on the device alone.
    """
    if inputs.key_mask is not None:
        return 1
    (heads, queries), (kv_heads, keys) = ((x.shape[1], x.shape[0 if inputs.packed else 2]) for x in (inputs.q, inputs.k))
    width, configs = inputs.q.shape[-1], CONFIGS[inputs.q.shape[-1]]
    rows, owners = queries * heads // max(kv_heads, 1), configs.segments.owners
    lead = 0 if inputs.k_start is None else kernel.SEGMENT_KEYS - 1
    segments = -(-(keys + lead) // kernel.SEGMENT_KEYS)
    if inputs.cu_seqlens_q is not None:
        splits = rows <= owners * (inputs.cu_seqlens_q.numel() - 1) and 4 * segments * queries * heads * width <= MOST_WORKSPACE
    elif rows <= owners:
        splits = inputs.kv_lengths is not None or inputs.q.shape[0] * kv_heads < 2 * FEW_PROGRAMS
    else:
        splits = inputs.q.shape[0] * kv_heads * -(-rows // configs.forward.owners) < FEW_PROGRAMS
    return max(segments, 1) if splits else 1


def _whole(call: _Call, gap: Tensor | None, out: Tensor, lse: Tensor) -> None:
    inputs, sizes, configs = call.inputs, call.problem.sizes, CONFIGS[out.shape[-1]]
    few = not inputs.packed and sizes.queries * sizes.group <= configs.segments.owners
    config = configs.segments if few else configs.forward
    grid = row_blocks(call.launch, inputs, sizes, call.plan(0), config.owners)
    if grid.programs == 0:
        return
    call.launch(
        kernel.attention_forward,
        grid.programs,
        *call.problem.on(grid),
        *_key_tiles(inputs),
        gap,
        score_factor(inputs.scale),
        out,
        *result_strides(out, inputs.packed),
        lse,
        ROWS=config.owners,
        STAGES=config.stages,
        **traits(inputs),
        **config.options,
    )


def attention_states(inputs: AttentionInputs, count: int) -> States:
    """n and l float32 [count, *row_shape] and o [count, *row_shape, D] of the segments from that of stored key 0 on; dense inputs."""
    check_supported(inputs)
    parts = _workspace(inputs.q.new_empty(inputs.row_shape, dtype=torch.float32), count, inputs.q.shape[-1])
    if parts[0].numel():
        with on_device(inputs.q):
            _states(_Call(Launches(), inputs, problem_of(inputs)), count, parts)
    return parts


def merged_states(n: Tensor, l: Tensor, o: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D] and LSE [B, H, S] of the states of segments, ascending; sinks float32 [H]."""
    out, lse = torch.empty(o.shape[1:], dtype=dtype, device=o.device), torch.empty(n.shape[1:], dtype=torch.float32, device=o.device)
    if lse.numel():
        segments, (batch, heads, _, width) = n.shape[0], out.shape
        keys = out.new_empty(1).expand(batch, heads, segments * kernel.SEGMENT_KEYS, width)  # no key is read
        inputs = AttentionInputs(out, keys, keys, sinks=sinks)
        with on_device(out):
            states = n.contiguous(), l.contiguous(), o.contiguous()
            _merge(_Call(Launches(), inputs, attention_problem(inputs)), segments, states, out, lse)
    return out, lse


def _workspace(rows: Tensor, segments: int, width: int) -> States:
    """n and l [segments, *rows.shape] and O [segments, *rows.shape, width], float32 on the device of ``rows``."""
    shape = (segments, *rows.shape)
    return rows.new_empty(shape), rows.new_empty(shape), rows.new_empty((*shape, width))


def _states(call: _Call, segments: int, parts: States) -> None:
    inputs, sizes = call.inputs, call.problem.sizes
    rows = sizes.queries * sizes.group // (sizes.batch if inputs.packed else 1)
    config = _few_rows(CONFIGS[inputs.q.shape[-1]].segments, rows)
    grid = row_blocks(call.launch, inputs, sizes, call.plan(0), config.owners, segments)
    call.launch(
        kernel.attention_segments,
        grid.programs,
        *call.problem.on(grid),
        segments,
        *_key_tiles(inputs),
        score_factor(inputs.scale),
        *parts,
        ROWS=config.owners,
        STAGES=config.stages,
        **traits(inputs),
        **config.options,
    )


def _merge(call: _Call, segments: int, parts: States, out: Tensor, lse: Tensor) -> None:
    inputs, sizes, config = call.inputs, call.problem.sizes, CONFIGS[out.shape[-1]].merge
    grid = row_blocks(call.launch, inputs, sizes, call.plan(1), config.owners)
    call.launch(
        kernel.attention_merge,
        grid.programs,
        *call.problem.on(grid),
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
