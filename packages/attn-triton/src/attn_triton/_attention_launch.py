"""Launches of the attention forward kernels: results, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

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
from attn_triton._configuration import Config, on_device, padded
from attn_triton._problem import MAX_HEAD_DIM, Problem, attention_problem, fresh_results, result_strides, row_grid
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["CONFIGS", "attention_forward", "check_supported"]


_SELECT_COLUMNS = 128


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
    q, configs = inputs.q, configs_of(inputs.q.device)
    out, lse, row_max, row_sum = fresh_results(inputs, out_dtype)
    if lse.numel() == 0:
        return out, lse, row_max, row_sum
    dot = platform(q.device) == "cuda"
    problem = attention_problem(inputs, columns_first=dot)
    with on_device(q):
        indexed = inputs.bias is not None or inputs.key_mask is not None
        _row_states(inputs, problem, configs.indexed if indexed else configs.states, dot, lse, row_max, row_sum)
        _outputs(inputs, problem, configs, dot, row_max, row_sum, out)
    return out, lse, row_max, row_sum


def _row_states(inputs: AttentionInputs, problem: Problem, config: Config, dot: bool, *results: Tensor) -> None:
    grid = row_grid(inputs, problem.sizes, config.rows)
    if grid.programs == 0:
        return
    kernel.attention_row_states[(grid.programs,)](
        *problem.on(grid),
        *results,
        ROWS=config.rows,
        KEYS=config.keys,
        CHUNK=config.chunk,
        DOT=dot,
        **config.options,
    )


def _outputs(
    inputs: AttentionInputs, problem: Problem, configs: ForwardConfigs, dot: bool, row_max: Tensor, row_sum: Tensor, out: Tensor
) -> None:
    """out, then again the blocks that a masked pair's infinity or NaN spoiled."""
    launches = configs.output_launches(out.shape[-1])
    grid = row_grid(inputs, problem.sizes, launches[0].config.rows)
    if grid.programs == 0:
        return
    spoiled = torch.empty(grid.programs, dtype=torch.int32, device=out.device)
    for launch in launches:
        kernel.attention_outputs[(grid.programs,)](
            *launch.problem(problem, inputs.v).on(grid),
            row_max,
            row_sum,
            out[..., launch.part],
            *result_strides(out, inputs.packed),
            spoiled,
            DOT=dot,
            INTEGER_ROUNDING=INTERPRETED,
            **launch.options,
        )
