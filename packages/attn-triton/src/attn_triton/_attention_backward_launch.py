"""Launches of the attention backward kernels: gradients, workspace, grids and configuration; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Mapping
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
from attn_triton._pair_copies import columns_together
from attn_triton._pairs_launch import Pairs, pairs_of
from attn_triton._problem import Problem, attention_problem, block_sides, key_grid, result_strides, row_grid
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
        return replace(self, others=32 // chains, chunk=16 * chains) if select and not INTERPRETED else self

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
    """One call of kernels that compute P and dS again, as 4-bit attention does: the problem, its copies and the row states."""

    inputs: AttentionInputs
    problem: Problem
    columns: Columns
    dout: Tensor
    row_max: Tensor
    row_sum: Tensor
    configs: tuple[PairConfig, PairConfig, PairConfig]
    dot: bool

    def config(self, width: int, *, of_rows: bool) -> PairConfig:
        """The configuration for accumulators of ``width`` columns that belong to rows or, else, to keys."""
        return self.fitted(self.configs[0] if width <= 128 else self.configs[1], of_rows=of_rows)

    def fitted(self, config: PairConfig, *, of_rows: bool = True) -> PairConfig:
        """``config`` with blocks that suit this problem (``block_sides``)."""
        if of_rows:
            owners, others = block_sides(self.problem.sizes, config.owners, config.others)
        else:
            others, owners = block_sides(self.problem.sizes, config.others, config.owners)
        return replace(config, owners=owners, others=others)

    def delta(self, dlse: Tensor | None, dsink: Tensor | None) -> Tensor:
        """float32 [rows] in the shape of LSE; with ``dsink``, of that shape, the rows' sink gradients as well."""
        delta = torch.empty_like(self.row_max)
        config = self.fitted(self.configs[2])
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
        grid = row_grid(self.inputs, self.problem.sizes, self.config(width, of_rows=True).owners)
        if grid.programs == 0 or dq.numel() == 0:
            return
        spoiled = torch.zeros(grid.programs, dtype=torch.int32, device=dq.device)
        for select in SELECTIONS:
            config = self.config(width, of_rows=True).selecting(select, 2)
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
        grid = key_grid(self.inputs, self.problem.sizes, self.config(width, of_rows=False).owners)
        if grid.programs == 0 or gradient.numel() == 0:
            return
        spoiled = torch.zeros(grid.programs, dtype=torch.int32, device=gradient.device)
        for select in SELECTIONS:
            config = self.config(width, of_rows=False).selecting(select, 1 if delta is None else 2)
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
        config = self.fitted(self.configs[2])
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
    problem = attention_problem(inputs)
    state = (row_max.to(torch.float32).contiguous(), row_sum.to(torch.float32).contiguous())
    with on_device(inputs.q):
        delta = torch.empty_like(state[0]) if found.keys() - {"v"} else None
        dsink = torch.empty_like(state[0]) if "sinks" in found else None
        rows = (*state, None if dlse is None else dlse.to(torch.float32).contiguous(), delta, dsink)
        _pair_sums(pairs_of(inputs, problem, backward=True), dout, rows, found)
        columns = _columns(inputs, dout, True) if "bias" in found else Columns(*(None, 0, 0, 0) * 4)
        device = platform(inputs.q.device)
        call = _Backward(inputs, problem, columns, dout, *state, CONFIGS[device], device == "cuda")
        if dsink is not None:
            call.sink_sums(dsink, found["sinks"])
        if delta is not None and "bias" in found:
            call.bias_sums(delta, found["bias"])
    return found


_RowNumbers = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _pair_sums(pairs: Pairs, dout: Tensor, rows: _RowNumbers, found: Mapping[str, Tensor]) -> None:
    """dq, dk and dv of those in ``found``, and delta and dsink unless they are None.

    ``rows`` are the row maximum and sum, dLSE, delta and dsink: float32, in the shape of LSE. P and dS of as many rows as a workspace holds
    are in memory at a time.
    """
    inputs, scale = pairs.inputs, pairs.problem.sizes.scale
    row_max, row_sum, dlse, delta, dsink = rows
    arrays = 1 if delta is None else 2
    numbers, ranges, (of_tiles,) = pairs.numbers(arrays), pairs.ranges(arrays), pairs.sums(arrays, 1)
    probs = numbers[0]
    q, k = pairs.rows_copy(inputs.q), pairs.keys_copy(inputs.k)
    upstream = None if delta is None else (pairs.rows_copy(dout), pairs.keys_copy(inputs.v))
    spaces, keys = list(pairs.workspaces(arrays)), pairs.key_grid()
    carry = {name: pairs.carry(found[name].shape[-1]) if len(spaces) > 1 else None for name in ("k", "v") if name in found}
    rows_of = {"k": columns_together(inputs.q), "v": columns_together(dout)}
    keys_of_q = pairs.values(inputs.k)
    for space in spaces:
        pairs.products(space, q, k, probs, ranges, final=True)
        pairs.probabilities(space, probs, ranges, row_max, row_sum)
        if "v" in found:
            pairs.key_sums(space, keys, probs, ranges, rows_of["v"], 1.0, carry["v"], found["v"])
        if delta is None or upstream is None:
            continue
        pairs.products(space, *upstream, numbers[1], ranges, final=False)
        pairs.deltas(space, probs, numbers[1], ranges, of_tiles, (row_max, row_sum, dlse, delta, dsink))
        if found.keys() & {"q", "k"}:
            pairs.gradients(space, probs, numbers[1], ranges, delta)
        if "q" in found:
            pairs.row_sums(space, numbers[1], ranges, keys_of_q, scale, found["q"])
        if "k" in found:
            pairs.key_sums(space, keys, numbers[1], ranges, rows_of["k"], scale, carry["k"], found["k"])


def _gradient(inputs: AttentionInputs, name: str) -> Tensor:
    """Memory of a gradient: zeros where some rows belong to no program (packed rows outside the segments, dropped keys, no queries)."""
    tensor: Tensor = getattr(inputs, name)
    partly = name in ("q", "k", "v") and (inputs.packed or (name != "q" and (inputs.key_mask is not None or inputs.q.shape[2] == 0)))
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
