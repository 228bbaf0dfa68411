"""Launches of the kernels of contract nvfp4-sm90-v1: operands, results, workspace, grids; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_spec import QATConfig
from attn_spec._sm90 import key_tile, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_triton import _qat_sm90_kernel as kernel
from attn_triton._configuration import on_device
from attn_triton._nvfp4_launch import operands
from attn_triton._problem import Problem, attention_problem, fresh_results, key_grid, result_strides, row_grid
from attn_triton._remembered_launch import Launches
from attn_triton._sm90_backward_launch import fresh_gradients, row_workspace, sink_gradients, with_unit_columns
from attn_triton._sm90_configuration import TileConfig
from attn_triton._sm90_launch import rows_of_tiles

__all__ = ["CONFIGS", "CONTRACT", "QatConfigs", "qat_backward", "qat_forward"]

CONTRACT = "nvfp4-sm90-v1"
Saved = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class QatConfigs:
    """How the kernels are launched; no field moves a bit."""

    forward: TileConfig
    rows: TileConfig
    queries: TileConfig
    keys: TileConfig


CONFIGS = {
    64: QatConfigs(TileConfig(64, 4, 2), TileConfig(64, 4, 2), TileConfig(64, 4, 2), TileConfig(64, 4, 2, others=64)),
    128: QatConfigs(TileConfig(128, 8, 2), TileConfig(128, 8, 2), TileConfig(128, 8, 2), TileConfig(64, 4, 2, others=64)),
}
"""By head dim; for 128 the quickest of those tried on one H200 (Triton 3.6, 2026-11-30)."""


def _traits(inputs: AttentionInputs) -> dict[str, Any]:
    return {"D": inputs.q.shape[-1], "PACKED": inputs.packed, "GARBAGE": inputs.packed}


def qat_forward(inputs: AttentionInputs, config: QATConfig, scales: tuple[float, float]) -> Saved:
    """out, LSE, and n and l with the sink (float32, ``inputs.row_shape``). ``scales`` are the outer scales of P."""
    q, factor = inputs.q, score_factor(inputs.scale)
    out, lse, row_max, row_sum = fresh_results(inputs, q.dtype)
    if lse.numel() == 0:
        return out, lse, row_max, row_sum
    with on_device(q):
        found = operands(inputs, config, q.dtype)
        call = replace(inputs, q=found.q.quantized, k=found.k.quantized, v=found.v.quantized)
        problem, launch = attention_problem(call), CONFIGS[q.shape[-1]].forward
        grid = row_grid(call, problem.sizes, launch.owners)
        if grid.programs:
            kernel.qat_forward[(grid.programs,)](
                *problem.on(grid),
                *(rows_of_tiles(tensor, call.packed, key_tile(call.k.shape[-1])) for tensor in (call.k, call.v)),
                factor,
                *_scales(config, scales),
                out,
                *result_strides(out, call.packed),
                lse,
                row_max,
                row_sum,
                ROWS=launch.owners,
                STAGES=launch.stages,
                QUANTIZE=config.quantize_p,
                **_traits(call),
                **launch.options,
            )
    return out, lse, row_max, row_sum


def _scales(config: QATConfig, scales: tuple[float, float]) -> tuple[float, float]:
    return scales if config.quantize_p else (1.0, 1.0)


@dataclass(frozen=True)
class _Pass:
    """One backward: ``call`` has the operands of the scores, ``back`` those of the gradients; workspace as in ``row_workspace``."""

    call: AttentionInputs
    back: AttentionInputs
    problem: Problem
    dout: Tensor
    config: QATConfig
    scales: tuple[float, float]
    factor: float
    maxima: Tensor
    inverses: Tensor
    decoders: Tensor
    deltas: Tensor
    origins: Tensor

    @property
    def configs(self) -> QatConfigs:
        return CONFIGS[self.call.q.shape[-1]]

    def _tiles(self, *tensors: Tensor) -> tuple[Any, ...]:
        return tuple(rows_of_tiles(tensor, self.call.packed, key_tile(self.call.k.shape[-1])) for tensor in tensors)

    def fill_rows(self, saved: Saved, dlse: Tensor | None) -> None:
        launch = self.configs.rows
        grid = row_grid(self.call, self.problem.sizes, launch.owners)
        if grid.programs == 0:
            return
        kernel.qat_row_values[(grid.programs,)](
            *self.problem.on(grid),
            *self._tiles(self.call.k, self.back.v),
            self.factor,
            self.scales[1],
            self.dout,
            *result_strides(self.dout, self.call.packed),
            saved[0],
            *result_strides(saved[0], self.call.packed),
            *saved[1:],
            dlse,
            self.maxima,
            self.inverses,
            self.decoders,
            self.deltas,
            self.origins,
            ROWS=launch.owners,
            STAGES=launch.stages,
            HIGH=self.config.high_precision_delta,
            **_traits(self.call),
            **launch.options,
        )

    def query_gradients(self, dq: Tensor) -> None:
        launch = self.configs.queries
        grid = row_grid(self.call, self.problem.sizes, launch.owners)
        if grid.programs == 0 or dq.numel() == 0:
            return
        kernel.qat_query_gradients[(grid.programs,)](
            *self.problem.on(grid),
            *self._tiles(self.call.k, self.back.k, self.back.v),
            self.factor,
            self.dout,
            *result_strides(self.dout, self.call.packed),
            self.maxima,
            self.inverses,
            self.deltas,
            dq,
            *result_strides(dq, self.call.packed),
            ROWS=launch.owners,
            STAGES=launch.stages,
            SAME=self.back.k is self.call.k,
            **_traits(self.call),
            **launch.options,
        )

    def key_gradients(self, dk: Tensor, dv: Tensor) -> None:
        launch, packed = self.configs.keys, self.call.packed
        same = self.back.q is self.call.q
        # Rows of q and of its other form are read with the same strides.
        q = self.call.q.contiguous()
        b = q if same else self.back.q.contiguous()
        call = replace(self.call, q=q, v=self.back.v)
        problem = attention_problem(call)
        grid = key_grid(call, problem.sizes, launch.owners)
        if grid.programs == 0 or dk.numel() == 0:
            return
        tiles = (None,) * 3 if packed else tuple(rows_of_tiles(tensor, False, launch.others) for tensor in (q, b, self.dout))
        _, dout_head, dout_row = result_strides(self.dout, packed)
        kernel.qat_key_gradients[(grid.programs,)](
            *problem.on(grid),
            *tiles,
            b,
            self.factor,
            *self.scales,
            self.dout,
            dout_head,
            dout_row,
            self.maxima,
            self.inverses,
            self.decoders,
            self.deltas,
            dk,
            dv,
            *result_strides(dk, packed),
            ROWS=launch.others,
            KEYS=launch.owners,
            D=call.q.shape[-1],
            STAGES=launch.stages,
            QUANTIZE=self.config.quantize_p,
            SAME=same,
            MASKED=call.causal,
            PACKED=packed,
            **launch.options,
        )


def qat_backward(
    inputs: AttentionInputs,
    config: QATConfig,
    scales: tuple[float, float],
    dout: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    needs: frozenset[str],
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each fresh, contiguous, with the shape and dtype of its input."""
    found = fresh_gradients(inputs, needs)
    if any(gradient.numel() for gradient in found.values()):
        with on_device(inputs.q):
            _run(inputs, config, scales, dout, dlse, saved, found)
    return {name: gradient for name, gradient in found.items() if name in needs}


def _run(
    inputs: AttentionInputs,
    config: QATConfig,
    scales: tuple[float, float],
    dout: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    found: dict[str, Tensor],
) -> None:
    dout = with_unit_columns(dout, inputs.q.dtype)
    parts = operands(inputs, config, inputs.q.dtype)
    call = replace(inputs, q=parts.q.quantized, k=parts.k.quantized, v=parts.v.quantized)
    back = replace(inputs, q=parts.q.backward(config), k=parts.k.backward(config), v=parts.v.backward(config))
    problem = attention_problem(call)
    maxima, origins = (row_workspace(inputs, torch.inf) for _ in range(2))
    inverses, decoders, deltas = (row_workspace(inputs, 0.0) for _ in range(3))
    work = _Pass(
        call, back, problem, dout, config, _scales(config, scales), score_factor(inputs.scale), maxima, inverses, decoders, deltas, origins
    )
    work.fill_rows(tuple(tensor.contiguous() for tensor in saved), None if dlse is None else dlse.float().contiguous())  # type: ignore[arg-type]
    if "q" in found:
        work.query_gradients(found["q"])
    if "k" in found:
        work.key_gradients(found["k"], found["v"])
    if "sinks" in found:
        items = torch.empty((problem.sizes.batch, inputs.q.shape[1]), dtype=torch.float32, device=inputs.q.device)
        sink_gradients(Launches(), problem, inputs.packed, origins, deltas, items, found["sinks"])
