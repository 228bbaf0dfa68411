"""Launches of the attention backward kernels: gradients, workspace, grids and configuration; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_backward_kernel as kernel
from attn_triton import _attention_backward_sums_kernel as sums_kernel
from attn_triton._attention_launch import check_supported
from attn_triton._configuration import on_device, padded
from attn_triton._problem import Problem, attention_problem, key_grid, result_strides, row_grid
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["CONFIGS", "SELECTIONS", "Columns", "PairConfig", "attention_backward"]


SELECTIONS = (False, True)
"""Launches of a sum: over every pair, then, for the blocks in which that left a NaN, without the terms of masked pairs."""


@dataclass(frozen=True)
class PairConfig:
    """Block of pairs of one step and how the kernels are launched. No field moves a bit.

    ``owners`` rows or keys belong to a program, ``others`` stream by; a chain of scores reads ``chunk`` columns a step. Powers of two.
    """

    owners: int
    others: int
    chunk: int
    num_warps: int

    def selecting(self, select: bool, chains: int) -> PairConfig:
        """For one of ``SELECTIONS``: a sum that leaves terms out keeps its operands in registers, so it has fewer. ``chains`` is 2 with dP.

        These are blocks for which sm_90 code spills no register.
        """
        return replace(self, others=32 // chains, chunk=16 * chains) if select else self

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options; the contract rounds every product."""
        return {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


CONFIGS: dict[str, tuple[PairConfig, PairConfig, PairConfig]] = {
    "cuda": (PairConfig(32, 64, 16, 4), PairConfig(32, 64, 16, 8), PairConfig(64, 64, 16, 8)),
    "rocm": (PairConfig(32, 32, 16, 4), PairConfig(32, 32, 16, 8), PairConfig(32, 32, 16, 4)),
    "cpu": (PairConfig(256, 256, 128, 1), PairConfig(256, 256, 128, 1), PairConfig(128, 128, 128, 1)),
}
"""By device: for results of up to 128 columns; for wider ones, whose accumulators fill the registers; for delta (its owners) and dbias."""


class Columns(NamedTuple):
    """Copies of q, k, v and dout (``d``) with columns first: the element of a row in column c is ``c * X_column`` after its first."""

    q: Tensor | None
    q_batch: int
    q_head: int
    q_column: int
    k: Tensor | None
    k_batch: int
    k_head: int
    k_column: int
    v: Tensor | None
    v_batch: int
    v_head: int
    v_column: int
    d: Tensor | None
    d_batch: int
    d_head: int
    d_column: int


@dataclass(frozen=True)
class _Backward:
    """One call: the problem, its copies and the row states."""

    inputs: AttentionInputs
    problem: Problem
    columns: Columns
    dout: Tensor
    row_max: Tensor
    row_sum: Tensor
    configs: tuple[PairConfig, PairConfig, PairConfig]
    dot: bool

    def config(self, width: int) -> PairConfig:
        """The configuration for accumulators of ``width`` columns."""
        return self.configs[0] if width <= 128 else self.configs[1]

    def delta(self, dlse: Tensor | None, dsink: Tensor | None) -> Tensor:
        """float32 [rows] in the shape of LSE; with ``dsink``, of that shape, the rows' sink gradients as well."""
        delta = torch.empty_like(self.row_max)
        config = self.configs[2]
        grid = row_grid(self.inputs, self.problem.sizes, config.owners)
        if grid.programs and delta.numel():
            kernel.attention_delta[(grid.programs,)](
                self.problem.arrays,
                self.problem.sizes.encoded,
                self.columns,
                grid.plan,
                grid.per_item,
                self.row_max,
                self.row_sum,
                dlse,
                delta,
                dsink,
                ROWS=config.owners,
                CHUNK=config.chunk,
                DOT=self.dot,
                **config.options,
            )
        return delta

    def query_sums(self, delta: Tensor, dq: Tensor) -> None:
        width = self.inputs.q.shape[-1]
        grid = row_grid(self.inputs, self.problem.sizes, self.config(width).owners)
        if grid.programs == 0 or dq.numel() == 0:
            return
        spoiled = torch.zeros(grid.programs, dtype=torch.int32, device=dq.device)
        for select in SELECTIONS:
            config = self.config(width).selecting(select, 2)
            kernel.attention_query_sums[(grid.programs,)](
                self.problem.arrays,
                self.problem.sizes.encoded,
                self.columns,
                grid.plan,
                grid.per_item,
                self.row_max,
                self.row_sum,
                delta,
                dq,
                *result_strides(dq, self.inputs.packed),
                spoiled,
                ROWS=config.owners,
                KEYS=config.others,
                COLUMNS=padded(width),
                CHUNK=config.chunk,
                SELECT=select,
                DOT=self.dot,
                INTEGER_ROUNDING=INTERPRETED,
                **config.options,
            )

    def key_sums(self, delta: Tensor | None, rows_of: Tensor, gradient: Tensor) -> None:
        """dk from the rows of q and delta, or dv from the rows of dout."""
        width = gradient.shape[-1]
        grid = key_grid(self.inputs, self.problem.sizes, self.config(width).owners)
        if grid.programs == 0 or gradient.numel() == 0:
            return
        spoiled = torch.zeros(grid.programs, dtype=torch.int32, device=gradient.device)
        for select in SELECTIONS:
            config = self.config(width).selecting(select, 1 if delta is None else 2)
            kernel.attention_key_sums[(grid.programs,)](
                self.problem.arrays,
                self.problem.sizes.encoded,
                self.columns,
                grid.plan,
                grid.per_item,
                self.row_max,
                self.row_sum,
                delta,
                rows_of,
                *result_strides(rows_of, self.inputs.packed),
                rows_of.stride(-1),
                gradient,
                *result_strides(gradient, self.inputs.packed),
                spoiled,
                ROWS=config.others,
                KEYS=config.owners,
                COLUMNS=padded(width),
                CHUNK=config.chunk,
                SELECT=select,
                DOT=self.dot,
                INTEGER_ROUNDING=INTERPRETED,
                **config.options,
            )

    def sink_sums(self, dsink: Tensor, dsinks: Tensor) -> None:
        sizes, heads = self.problem.sizes, dsinks.shape[0]
        if heads == 0:
            return
        options = {"DOT": self.dot, "num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
        blocks = triton.cdiv(heads, sums_kernel.SINK_HEADS)
        items = torch.empty((sizes.batch, heads), dtype=torch.float32, device=dsinks.device)
        if sizes.batch:
            sums_kernel.attention_sink_rows[(sizes.batch * blocks,)](self.problem.arrays, sizes.encoded, dsink, items, **options)
        sums_kernel.attention_sink_items[(blocks,)](items, dsinks, sizes.batch, heads, **options)

    def bias_sums(self, delta: Tensor, dbias: Tensor) -> None:
        config = self.configs[2]
        batch, heads, queries, keys = dbias.shape
        query_blocks, key_blocks = triton.cdiv(queries, config.owners), triton.cdiv(keys, config.others)
        if dbias.numel() == 0:
            return
        mask = self.inputs.key_mask
        sums_kernel.attention_bias_sums[(batch * heads * query_blocks * key_blocks,)](
            self.problem.arrays,
            self.problem.sizes.encoded,
            self.columns,
            self.row_max,
            self.row_sum,
            delta,
            None if mask is None else mask.to(torch.uint8).contiguous(),
            dbias,
            batch,
            heads,
            query_blocks,
            key_blocks,
            ROWS=config.owners,
            KEYS=config.others,
            CHUNK=config.chunk,
            OVER_QUERIES=queries == 1,
            OVER_KEYS=keys == 1,
            DOT=self.dot,
            **config.options,
        )


def attention_backward(
    inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks, bias), each fresh, contiguous, with the shape and dtype of its input.

    Raises ValueError when a shape of ``dout`` or of the row values is not that of the call, UnsupportedProblem for what the kernels lack.
    """
    check_supported(inputs)
    inputs.check_shapes({"dout": dout}, {"dlse": dlse, "row_max": row_max, "row_sum": row_sum})
    found: dict[str, Tensor] = {name: _gradient(inputs, name) for name in ("q", "k", "v", "sinks", "bias") if name in needs}
    if not any(gradient.numel() for gradient in found.values()):
        return found
    device, needs_delta = platform(inputs.q.device), bool(found.keys() - {"v"})
    with on_device(inputs.q):
        call = _Backward(
            inputs,
            attention_problem(inputs),
            _columns(inputs, dout, needs_delta),
            dout,
            row_max.to(torch.float32).contiguous(),
            row_sum.to(torch.float32).contiguous(),
            CONFIGS[device],
            device == "cuda",
        )
        if "v" in found:
            call.key_sums(None, dout, found["v"])
        if not needs_delta:
            return found
        dsink = torch.empty_like(call.row_max) if "sinks" in found else None
        delta = call.delta(None if dlse is None else dlse.to(torch.float32).contiguous(), dsink)
        if "q" in found:
            call.query_sums(delta, found["q"])
        if "k" in found:
            call.key_sums(delta, inputs.q, found["k"])
        if dsink is not None:
            call.sink_sums(dsink, found["sinks"])
        if "bias" in found:
            call.bias_sums(delta, found["bias"])
    return found


def _gradient(inputs: AttentionInputs, name: str) -> Tensor:
    """Memory of a gradient: zeros where rows may belong to no program (packed rows outside the segments, keys that a mask drops)."""
    tensor: Tensor = getattr(inputs, name)
    partly = name in ("q", "k", "v") and (inputs.packed or (name != "q" and inputs.key_mask is not None))
    return (torch.zeros if partly else torch.empty)(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _columns(inputs: AttentionInputs, dout: Tensor, with_upstream: bool) -> Columns:
    return Columns(
        *_turned(inputs.q, inputs.packed),
        *_turned(inputs.k, inputs.packed),
        *(_turned(inputs.v, inputs.packed) if with_upstream else (None, 0, 0, 0)),
        *(_turned(dout, inputs.packed) if with_upstream else (None, 0, 0, 0)),
    )


def _turned(tensor: Tensor, packed: bool) -> tuple[Tensor, int, int, int]:
    """Copy [B, H, D, S], packed [H, D, total], and its strides of batch (0 when packed), head and column."""
    copy = (tensor.permute(1, 2, 0) if packed else tensor.transpose(2, 3)).contiguous()
    batch, head, column = (0, *copy.stride()[:2]) if packed else copy.stride()[:3]
    return copy, batch, head, column
