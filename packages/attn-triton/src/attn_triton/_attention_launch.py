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
from attn_triton._pairs_launch import Pairs, pairs_of
from attn_triton._problem import MAX_HEAD_DIM, Problem, attention_problem, block_sides, row_grid
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
    q = inputs.q
    out = torch.empty((*q.shape[:-1], inputs.v.shape[-1]), dtype=out_dtype, device=q.device)
    lse, row_max, row_sum = (torch.empty(inputs.row_shape, dtype=torch.float32, device=q.device) for _ in range(3))
    if inputs.packed:  # rows outside the segments belong to no program
        out.zero_()
        lse.fill_(-torch.inf)
        row_max.fill_(-torch.inf)
        row_sum.zero_()
    if lse.numel():
        with on_device(q):
            _forward(pairs_of(inputs, attention_problem(inputs)), out, (lse, row_max, row_sum))
    return out, lse, row_max, row_sum


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
