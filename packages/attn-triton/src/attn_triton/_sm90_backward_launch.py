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
from attn_triton._problem import Problem, key_grid, result_strides, row_grid
from attn_triton._sm90_configuration import CONFIGS, Sm90Config
from attn_triton._sm90_launch import check_supported, key_gap, problem_of, rows_of_tiles, traits

__all__ = ["attention_backward"]

_SINK_HEADS = 128


@dataclass(frozen=True)
class _Backward:
    """One call; ``dout`` has columns side by side, ``origin`` and ``delta`` are float32 workspace (``_row_values``)."""

    inputs: AttentionInputs
    problem: Problem
    dout: Tensor
    origin: Tensor
    delta: Tensor
    gap: Tensor | None

    @property
    def config(self) -> Sm90Config:
        return CONFIGS[self.inputs.q.shape[-1]]

    @property
    def factor(self) -> float:
        return score_factor(self.inputs.scale)

    def fill_rows(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        config, inputs = self.config.delta, self.inputs
        grid = row_grid(inputs, self.problem.sizes, config.owners)
        if grid.programs == 0:
            return
        kernel.attention_delta[(grid.programs,)](
            self.problem.arrays,
            self.problem.sizes.encoded,
            grid.plan,
            grid.per_item,
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
        grid = row_grid(inputs, self.problem.sizes, config.owners)
        if grid.programs == 0 or dq.numel() == 0:
            return
        kernel.attention_query_gradients[(grid.programs,)](
            self.problem.arrays,
            self.problem.sizes.encoded,
            grid.plan,
            grid.per_item,
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
        grid = key_grid(inputs, self.problem.sizes, config.owners)
        if grid.programs == 0 or dk.numel() == 0:
            return
        problem = self.problem
        if inputs.packed and inputs.q.stride(-1) != 1:
            problem = problem_of(replace(inputs, q=inputs.q.contiguous()))
        tiles = (None, None) if inputs.packed else tuple(rows_of_tiles(tensor, False, config.others) for tensor in (inputs.q, self.dout))
        _, dout_head, dout_row = result_strides(self.dout, inputs.packed)
        kernel.attention_key_gradients[(grid.programs,)](
            problem.arrays,
            problem.sizes.encoded,
            grid.plan,
            grid.per_item,
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

    def sink_gradients(self, dsinks: Tensor) -> None:
        sizes, heads = self.problem.sizes, dsinks.shape[0]
        if heads == 0:
            return
        items = torch.empty((sizes.batch, heads), dtype=torch.float32, device=dsinks.device)
        options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
        if items.numel():
            kernel.attention_sink_items[(items.numel(),)](
                self.problem.arrays, sizes.encoded, self.origin, self.delta, items, PACKED=self.inputs.packed, **{**options, "num_warps": 4}
            )
        kernel.attention_sinks[(triton.cdiv(heads, _SINK_HEADS),)](items, dsinks, sizes.batch, heads, HEADS=_SINK_HEADS, **options)


def attention_backward(
    inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each fresh, contiguous, with the shape and dtype of its input.

    Raises ValueError when the shape of ``dout``, ``out`` or a row value is not that of the call, UnsupportedProblem for what the kernels
    lack.
    """
    check_supported(inputs)
    _check_rows(inputs, dout, dlse, out, lse)
    make = torch.zeros if inputs.packed else torch.empty  # packed rows outside the segments belong to no program
    pair = ("k", "v") if needs & {"k", "v"} else ()
    found: dict[str, Tensor] = {}
    for name in (*(name for name in ("q", "sinks") if name in needs), *pair):
        tensor: Tensor = getattr(inputs, name)
        found[name] = make(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if any(gradient.numel() for gradient in found.values()):
        with on_device(inputs.q):
            _run(inputs, dout, dlse, out, lse, found)
    return {name: gradient for name, gradient in found.items() if name in needs}


def _run(inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, found: dict[str, Tensor]) -> None:
    dout = dout.to(inputs.q.dtype)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    problem = problem_of(inputs)
    call = _Backward(inputs, problem, dout, *(_row_values(inputs, problem, value) for value in (torch.inf, 0.0)), key_gap(inputs))
    call.fill_rows(out.contiguous(), lse.contiguous(), None if dlse is None else dlse.to(torch.float32).contiguous())
    if "q" in found:
        call.query_gradients(found["q"])
    if "k" in found:
        call.key_gradients(found["k"], found["v"])
    if "sinks" in found:
        call.sink_gradients(found["sinks"])


def _row_values(inputs: AttentionInputs, problem: Problem, of_none: float) -> Tensor:
    """Workspace for a value of every query, those of an item side by side and followed by ``of_none`` up to a multiple of ROW_PAD."""
    sizes = problem.sizes
    units = -(-sizes.queries // kernel.ROW_PAD) + sizes.batch + 1 if inputs.packed else -(-sizes.queries // kernel.ROW_PAD) * sizes.batch
    shape = (sizes.kv_heads * sizes.group * units * kernel.ROW_PAD,)
    return torch.full(shape, of_none, dtype=torch.float32, device=inputs.q.device)


def _check_rows(inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> None:
    for name, tensor in (("dout", dout), ("out", out)):
        if tensor.shape != inputs.q.shape:
            raise ValueError(f"attention_backward: {name} must have shape {list(inputs.q.shape)}; got {list(tensor.shape)}")
    for name, row in (("dlse", dlse), ("lse", lse)):
        if row is not None and row.shape != inputs.row_shape:
            raise ValueError(f"attention_backward: {name} must have shape {list(inputs.row_shape)}; got {list(row.shape)}")
