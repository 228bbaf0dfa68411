"""Launches of the backward kernels of contract sm90-v1: gradients, workspace, grids and configuration; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from attn_spec._sm90 import key_tile, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_triton import _sm90_backward_kernel as kernel
from attn_triton._configuration import on_device
from attn_triton._problem import Problem, result_strides
from attn_triton._remembered_launch import Kinds, Launches, kind_of, options_of, tensors_of
from attn_triton._sm90_configuration import CONFIGS, Sm90Config
from attn_triton._sm90_grid import fill_gap, key_blocks, new_gap, new_plans, row_blocks
from attn_triton._sm90_launch import check_supported, problem_of, rows_of_tiles, traits

__all__ = ["attention_backward", "fresh_gradients", "row_workspace", "sink_gradients", "with_unit_columns"]

_SINK_HEADS = 128
_KINDS = Kinds()


@dataclass(frozen=True)
class _Backward:
    """One call; ``dout`` has columns side by side, ``origin`` and ``delta`` (``row_workspace``), ``gap`` and ``plans`` are workspace."""

    launch: Launches
    inputs: AttentionInputs
    problem: Problem
    dout: Tensor
    origin: Tensor
    delta: Tensor
    gap: Tensor | None
    plans: tuple[Tensor, ...]

    def plan(self, number: int) -> Tensor | None:
        return self.plans[number] if self.plans else None

    @property
    def config(self) -> Sm90Config:
        return CONFIGS[self.inputs.q.shape[-1]]

    @property
    def factor(self) -> float:
        return score_factor(self.inputs.scale)

    def fill_rows(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        config, inputs = self.config.delta, self.inputs
        grid = row_blocks(self.launch, inputs, self.problem.sizes, self.plan(0), config.owners)
        if grid.programs == 0:
            return
        self.launch(
            kernel.attention_delta,
            grid.programs,
            *self.problem.on(grid),
            self.dout,
            *result_strides(self.dout, inputs.packed),
            out,
            *result_strides(out, inputs.packed),
            lse,
            dlse,
            self.delta,
            self.origin,
            ROWS=config.owners,
            D=inputs.q.shape[-1],
            PACKED=inputs.packed,
            **config.options,
        )

    def query_gradients(self, dq: Tensor) -> None:
        config, inputs = self.config.queries, self.inputs
        grid = row_blocks(self.launch, inputs, self.problem.sizes, self.plan(1), config.owners)
        if grid.programs == 0 or dq.numel() == 0:
            return
        self.launch(
            kernel.attention_query_gradients,
            grid.programs,
            *self.problem.on(grid),
            *(rows_of_tiles(tensor, inputs.packed, key_tile(inputs.k.shape[-1])) for tensor in (inputs.k, inputs.v)),
            self.gap,
            self.factor,
            self.dout,
            *result_strides(self.dout, inputs.packed),
            self.origin,
            self.delta,
            dq,
            *result_strides(dq, inputs.packed),
            ROWS=config.owners,
            STAGES=config.stages,
            **traits(inputs),
            **config.options,
        )

    def key_gradients(self, dk: Tensor, dv: Tensor) -> None:
        inputs = self.inputs
        config = self.config.keys
        grid = key_blocks(self.launch, inputs, self.problem.sizes, self.plan(2), config.owners)
        if grid.programs == 0 or dk.numel() == 0:
            return
        problem = self.problem
        if inputs.packed and inputs.q.stride(-1) != 1:
            problem = problem_of(replace(inputs, q=inputs.q.contiguous()))
        tiles = (None, None) if inputs.packed else tuple(rows_of_tiles(tensor, False, config.others) for tensor in (inputs.q, self.dout))
        _, dout_head, dout_row = result_strides(self.dout, inputs.packed)
        self.launch(
            kernel.attention_key_gradients,
            grid.programs,
            *problem.on(grid),
            *tiles,
            self.gap,
            self.factor,
            self.dout,
            dout_head,
            dout_row,
            self.origin,
            self.delta,
            dk,
            dv,
            *result_strides(dk, inputs.packed),
            ROWS=config.others,
            KEYS=config.owners,
            D=inputs.q.shape[-1],
            STAGES=config.stages,
            MASKED=inputs.causal or inputs.window_left >= 0 or inputs.window_right >= 0,
            PACKED=inputs.packed,
            **config.options,
        )


def sink_gradients(launch: Launches, problem: Problem, packed: bool, origin: Tensor, delta: Tensor, items: Tensor, dsinks: Tensor) -> None:
    """dsinks from the rows' ``origin`` and ``delta`` (``row_workspace``); ``items`` is float32 workspace [batch, H]."""
    batch, heads = items.shape
    if heads == 0:
        return
    options = {"num_stages": 1, "enable_fp_fusion": False}
    if batch:
        arguments = problem.arrays, problem.sizes.encoded, origin, delta, items
        launch(kernel.attention_sink_items, batch * heads, *arguments, PACKED=packed, num_warps=4, **options)
    programs = triton.cdiv(heads, _SINK_HEADS)
    launch(kernel.attention_sinks, programs, items, dsinks, batch, heads, HEADS=_SINK_HEADS, num_warps=1, **options)


def fresh_gradients(inputs: AttentionInputs, needs: frozenset[str]) -> dict[str, Tensor]:
    """Memory of the gradients in ``needs``: k and v together, and zeros for packed rows, of which those outside the segments belong to no
    program."""
    pair = frozenset({"k", "v"}) if needs & {"k", "v"} else frozenset()
    return inputs.gradients(needs | pair, torch.zeros if inputs.packed else torch.empty)


def with_unit_columns(dout: Tensor, dtype: torch.dtype) -> Tensor:
    """``dout`` in ``dtype`` with its columns side by side."""
    dout = dout.to(dtype)
    return dout if dout.stride(-1) == 1 else dout.contiguous()


def attention_backward(
    inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each fresh, contiguous, with the shape and dtype of its input.

    Raises ValueError when the shape of ``dout``, ``out`` or a row value is not that of the call, UnsupportedProblem for what the kernels
    lack.
    """
    check_supported(inputs)
    inputs.check_shapes({"dout": dout, "out": out}, {"dlse": dlse, "lse": lse})
    found = fresh_gradients(inputs, needs)
    if any(gradient.numel() for gradient in found.values()):
        with on_device(inputs.q):
            _run(inputs, dout, dlse, out, lse, found)
    return {name: gradient for name, gradient in found.items() if name in needs}


def _run(inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, found: dict[str, Tensor]) -> None:
    q = inputs.q
    dout = with_unit_columns(dout, q.dtype)
    rows = out.contiguous(), lse.contiguous(), None if dlse is None else dlse.to(torch.float32).contiguous()
    origin, delta = (row_workspace(inputs, value) for value in (torch.inf, 0.0))
    batch = q.shape[0] if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.numel() - 1
    items = torch.empty((batch, q.shape[1]), dtype=torch.float32, device=q.device) if "sinks" in found else None
    plans, gap = new_plans(inputs, 3), new_gap(inputs)
    given = (*tensors_of(inputs), dout, *rows)
    tensors = (*given, origin, delta, items, gap, *plans, *found.values())
    kind, config = kind_of(given, *found, *options_of(inputs)), CONFIGS[q.shape[-1]]
    launches = _KINDS.get(kind, config)
    if launches is not None:
        launches.again(tensors)
        return
    launches = Launches(tensors, config)
    call = _Backward(launches, inputs, problem_of(inputs), dout, origin, delta, gap, plans)
    fill_gap(launches, inputs, gap)
    call.fill_rows(*rows)
    if "q" in found:
        call.query_gradients(found["q"])
    if "k" in found:
        call.key_gradients(found["k"], found["v"])
    if items is not None:
        sink_gradients(launches, call.problem, inputs.packed, origin, delta, items, found["sinks"])
    _KINDS.keep(kind, launches)


def row_workspace(inputs: AttentionInputs, of_none: float) -> Tensor:
    """Workspace for a value of every query, those of an item side by side and followed by ``of_none`` up to a multiple of ROW_PAD."""
    (heads, queries), pad = (inputs.q.shape[1], inputs.q.shape[0 if inputs.packed else 2]), kernel.ROW_PAD
    if inputs.cu_seqlens_q is None:
        shape = (heads * -(-queries // pad) * inputs.q.shape[0] * pad,)
        if queries % pad == 0:
            return torch.empty(shape, dtype=torch.float32, device=inputs.q.device)
    else:
        shape = (heads * (-(-queries // pad) + inputs.cu_seqlens_q.numel()) * pad,)
    return torch.full(shape, of_none, dtype=torch.float32, device=inputs.q.device)
