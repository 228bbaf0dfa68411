"""Launches of the attention forward kernels: results, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_forward_kernel as kernel
from attn_triton import _pairs_launch
from attn_triton._configuration import Config, on_device, padded
from attn_triton._pairs_launch import Pairs, pairs_of
from attn_triton._pairs_launch import configs_of as pair_configs
from attn_triton._problem import MAX_HEAD_DIM, Problem, attention_problem, block_sides, fresh_results, row_grid
from attn_triton._remembered_launch import Kinds, Launches, kind_of, options_of, tensors_of
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["CONFIGS", "attention_forward", "check_supported"]

_SELECT_COLUMNS = 128
_KINDS = Kinds()


@dataclass(frozen=True)
class OutputLaunch:
    """One launch of the kernel of out, from column ``first`` on: over every pair, or (``select``) without the terms of masked ones."""

    config: Config
    columns: int
    first: int
    select: bool

    @property
    def part(self) -> slice:
        """Its columns of v and out."""
        return slice(self.first, self.first + self.columns)

    def problem(self, problem: Problem, v: Tensor) -> Problem:
        """``problem`` with these columns of ``v``."""
        values = v[..., self.part]
        return replace(problem, arrays=problem.arrays._replace(v=values, value_dim=values.shape[-1]))

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time arguments and compiler options."""
        sizes = {"ROWS": self.config.rows, "KEYS": self.config.keys, "COLUMNS": self.columns, "CHUNK": self.config.chunk}
        return {**sizes, "SELECT": self.select, **self.config.options}


@dataclass(frozen=True)
class ForwardConfigs:
    """Of the kernel of row states, of the kernel of out by the number of columns that it holds, and of the second launch of that.

    ``indexed`` is for row states with a bias or a padding mask, whose addresses take registers. ``select``, the second launch, has the
    rows of the first.
    """

    states: Config
    indexed: Config
    outputs: Mapping[int, Config]
    select: Config

    def output_launches(self, value_dim: int) -> list[OutputLaunch]:
        """All columns at once; then the second launch, a few columns at a time, since two accumulators are live there."""
        columns = padded(value_dim)
        width = min(columns, _SELECT_COLUMNS)
        first = OutputLaunch(self.outputs[min(limit for limit in self.outputs if limit >= columns)], columns, 0, select=False)
        return [first, *(OutputLaunch(self.select, width, begin, select=True) for begin in range(0, value_dim, width))]


CONFIGS = {
    "cuda": ForwardConfigs(
        states=Config(rows=32, num_warps=8, keys=256, chunk=16),
        indexed=Config(rows=32, num_warps=8, chunk=16),
        outputs={128: Config(rows=32, num_warps=4, chunk=16), 256: Config(rows=32, num_warps=8, chunk=16)},
        select=Config(rows=32, num_warps=8, keys=16, chunk=16),
    ),
    "cuda, not 9.x": ForwardConfigs(
        states=Config(rows=32, num_warps=8, chunk=16),
        indexed=Config(rows=32, num_warps=8, chunk=16),
        outputs={128: Config(rows=32, num_warps=4, keys=32, chunk=16), 256: Config(rows=32, num_warps=8, keys=32, chunk=16)},
        select=Config(rows=32, num_warps=8, keys=16, chunk=16),
    ),
    "rocm": ForwardConfigs(
        states=Config(rows=32, num_warps=4, chunk=16),
        indexed=Config(rows=32, num_warps=4, chunk=16),
        outputs={256: Config(rows=32, num_warps=4, chunk=16)},
        select=Config(rows=32, num_warps=4, keys=16, chunk=16),
    ),
    "cpu": ForwardConfigs(
        states=Config(rows=128, num_warps=1, keys=256, chunk=128),
        indexed=Config(rows=128, num_warps=1, keys=256, chunk=128),
        outputs={256: Config(rows=128, num_warps=1, keys=256, chunk=128)},
        select=Config(rows=128, num_warps=1, keys=256, chunk=128),
    ),
}
"""By device. On NVIDIA these are the largest blocks that the compiler keeps in registers, and 16 columns a step keep a loop inside the
instruction cache. An interpreted operation costs much, however small its block, so there the blocks are large."""


def configs_of(device: torch.device) -> ForwardConfigs:
    """Configurations for the device; for a GPU of NVIDIA those of the target that Triton compiles for."""
    name = platform(device)
    if name == "cuda" and not INTERPRETED and triton.runtime.driver.active.get_current_target().arch // 10 != 9:
        name = "cuda, not 9.x"
    return CONFIGS[name]


def check_supported(inputs: AttentionInputs) -> None:
    """Refuse what the kernels lack when they are called below the public functions."""
    reasons = []
    if inputs.dropout_seed is not None or inputs.dropout_p > 0.0:
        reasons.append("dropout (not supported)")
    widest = max(inputs.q.shape[-1], inputs.v.shape[-1])
    if widest > MAX_HEAD_DIM:
        reasons.append(f"head_dim={widest} (supported: up to {MAX_HEAD_DIM})")
    if reasons:
        raise UnsupportedProblem("attn_triton", reasons)


def attention_forward(inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (layout of q, V columns, ``out_dtype``), LSE, row max and row sum (float32, ``inputs.row_shape``)."""
    check_supported(inputs)
    q, given = inputs.q, tensors_of(inputs)
    out, lse, row_max, row_sum = results = fresh_results(inputs, out_dtype)
    if lse.numel():
        configs, few = pair_configs(inputs)
        sign = math.copysign(1.0, inputs.scale)  # 0.0 equals -0.0
        kind = kind_of(given, few, sign, _pairs_launch.WORKSPACE, out_dtype, *options_of(inputs))
        launches = _KINDS.get(kind, configs)
        with on_device(q):
            if launches is not None:
                launches.again((*given, *results))
            else:
                launches = Launches((*given, *results), configs)
                _forward(pairs_of(inputs, attention_problem(inputs), launches), out, (lse, row_max, row_sum))
                _KINDS.keep(kind, launches)
    return results


def _forward(pairs: Pairs, out: Tensor, states: tuple[Tensor, Tensor, Tensor]) -> None:
    inputs, ranges = pairs.inputs, pairs.ranges(1)
    (scores,), of_tiles = pairs.numbers(1), pairs.sums(1, 2)
    copies = None if pairs.few else (pairs.rows_copy(inputs.q), pairs.keys_copy(inputs.k))
    values = pairs.values(inputs.v)
    for space in pairs.workspaces(1):
        if copies is None:
            pairs.scores_of_few(space, scores, ranges)
        else:
            pairs.products(space, *copies, scores, ranges, final=True)
        pairs.states(space, scores, ranges, of_tiles, states)
        pairs.probabilities(space, scores, ranges, *states[1:])
        pairs.row_sums(space, scores, ranges, values, 1.0, out)


def _row_states(inputs: AttentionInputs, problem: Problem, config: Config, dot: bool, *results: Tensor) -> None:
    rows, _ = block_sides(problem.sizes, config.rows, config.keys)
    grid = row_grid(inputs, problem.sizes, rows)
    if grid.programs == 0:
        return
    kernel.attention_row_states[(grid.programs,)](
        *problem.on(grid),
        *results,
        ROWS=rows,
        KEYS=config.keys,
        CHUNK=config.chunk,
        DOT=dot,
        **config.options,
    )
