"""Launches of the attention forward kernels: results, grid and configuration; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_forward_kernel as kernel
from attn_triton._configuration import Config, on_device
from attn_triton._problem import MAX_HEAD_DIM, Problem, attention_problem, block_sides, result_strides, row_grid
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["CONFIGS", "attention_forward", "check_supported"]


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

    def outputs_of(self, columns: int) -> Config:
        """Configuration of the kernel of out for ``columns`` columns."""
        return self.outputs[min(limit for limit in self.outputs if limit >= columns)]


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

_SELECT_COLUMNS = 128


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
    out = torch.empty((*q.shape[:-1], inputs.v.shape[-1]), dtype=out_dtype, device=q.device)
    lse, row_max, row_sum = (torch.empty(inputs.row_shape, dtype=torch.float32, device=q.device) for _ in range(3))
    if inputs.packed:  # rows outside the segments belong to no program
        out.zero_()
        lse.fill_(-torch.inf)
        row_max.fill_(-torch.inf)
        row_sum.zero_()
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
    rows, _ = block_sides(problem.sizes, config.rows, config.keys)
    grid = row_grid(inputs, problem.sizes, rows)
    if grid.programs == 0:
        return
    kernel.attention_row_states[(grid.programs,)](
        problem.arrays,
        problem.sizes.encoded,
        grid.plan,
        grid.per_item,
        *results,
        ROWS=rows,
        KEYS=config.keys,
        CHUNK=config.chunk,
        DOT=dot,
        **config.options,
    )


def _outputs(
    inputs: AttentionInputs, problem: Problem, configs: ForwardConfigs, dot: bool, row_max: Tensor, row_sum: Tensor, out: Tensor
) -> None:
    """out, then again the blocks that a masked pair's infinity or NaN spoiled, a few columns at a time: there two accumulators are live."""
    columns = _columns(out.shape[-1])
    config = configs.outputs_of(columns)
    rows, _ = block_sides(problem.sizes, config.rows, config.keys)
    grid = row_grid(inputs, problem.sizes, rows)
    if grid.programs == 0:
        return
    spoiled = torch.empty(grid.programs, dtype=torch.int32, device=out.device)
    launches = [(config, columns, 0, False)]
    launches += [(configs.select, min(columns, _SELECT_COLUMNS), first, True) for first in range(0, out.shape[-1], _SELECT_COLUMNS)]
    for config, width, first, select in launches:
        part = slice(first, first + width)
        values = inputs.v[..., part]
        kernel.attention_outputs[(grid.programs,)](
            problem.arrays._replace(v=values, value_dim=values.shape[-1]),
            problem.sizes.encoded,
            grid.plan,
            grid.per_item,
            row_max,
            row_sum,
            out[..., part],
            *result_strides(out, inputs.packed),
            spoiled,
            ROWS=rows,
            KEYS=block_sides(problem.sizes, config.rows, config.keys)[1],
            COLUMNS=width,
            CHUNK=config.chunk,
            SELECT=select,
            DOT=dot,
            INTEGER_ROUNDING=INTERPRETED,
            **config.options,
        )


def _columns(value_dim: int) -> int:
    """Columns of an accumulator that holds ``value_dim`` of them: a power of two that ``tl.dot`` takes."""
    return max(16, 1 << (value_dim - 1).bit_length())
