"""How the kernels of contract nvfp4-ordered-v1 are launched, as data. No field moves a bit.

The kernels read q, k and v as float32, whatever the dtype of the call, so a configuration depends on the kind of device and on the number
of columns that an accumulator holds, and on nothing else. Any block gives the same bits: each number of a result is one chain over
ascending rows or keys, whose accumulator goes from block to block; a tile of the softmax has 256 slots and its halves tree, however many
keys a block holds; P is quantized in blocks of 16 slots, and every block of keys is a multiple of 16 and begins at one; and where a block
is summed again for a NaN, the terms left out are zero products, which change no stored number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton._configuration import Config, PairConfig, padded
from attn_triton._problem import Problem
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["BACKWARD", "FORWARD", "BackwardConfigs", "ForwardConfigs", "OutputLaunch", "backward_configs", "forward_configs"]

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


FORWARD = {
    "cuda": ForwardConfigs(
        states=Config(rows=32, num_warps=8, keys=256, chunk=16),
        indexed=Config(rows=32, num_warps=8, chunk=16),
        outputs={128: Config(rows=32, num_warps=4, chunk=16), 256: Config(rows=32, num_warps=8, chunk=16)},
        select=Config(rows=32, num_warps=8, keys=16, chunk=16),
    ),
    "cuda, not 9.x": ForwardConfigs(
        states=Config(rows=32, num_warps=8, chunk=16, registers=255),
        indexed=Config(rows=32, num_warps=8, chunk=16, registers=255),
        outputs={
            128: Config(rows=32, num_warps=4, keys=32, chunk=16, registers=255),
            256: Config(rows=32, num_warps=8, keys=32, chunk=16, registers=255),
        },
        select=Config(rows=32, num_warps=8, keys=16, chunk=16, registers=255),
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
"""By device. On NVIDIA these are the largest blocks that Triton 3.6 and 3.9 keep in registers, and 16 columns a step keep a loop inside the
instruction cache. An interpreted operation costs much, however small its block, so there the blocks are large."""


def forward_configs(device: torch.device) -> ForwardConfigs:
    """Configurations for the device; for a GPU of NVIDIA those of the target that Triton compiles for."""
    name = platform(device)
    if name == "cuda" and not INTERPRETED and triton.runtime.driver.active.get_current_target().arch // 10 != 9:
        name = "cuda, not 9.x"
    return FORWARD[name]


@dataclass(frozen=True)
class BackwardConfigs:
    """Of the kernel of dq, and of those of dk and dv, by the columns of their accumulator; of the kernel of delta (its owners)."""

    rows: Mapping[int, PairConfig]
    keys: Mapping[int, PairConfig]
    delta: PairConfig

    def of_sums(self, width: int, *, of_rows: bool) -> PairConfig:
        """For an accumulator of ``width`` columns that belongs to rows or, else, to keys."""
        found = self.rows if of_rows else self.keys
        return found[min(limit for limit in found if limit >= width)]


def _alike(sums: Mapping[int, PairConfig], delta: PairConfig) -> BackwardConfigs:
    return BackwardConfigs(sums, sums, delta)


BACKWARD = {
    "cuda": _alike({128: PairConfig(32, 16, 16, 4, 255), 256: PairConfig(32, 16, 16, 8, 255)}, PairConfig(64, 64, 16, 8)),
    "cuda, Triton 3.6": BackwardConfigs(
        rows={128: PairConfig(64, 32, 16, 8, 255), 256: PairConfig(32, 32, 16, 8, 255)},
        keys={128: PairConfig(32, 64, 16, 4, 255), 256: PairConfig(32, 64, 16, 8, 255)},
        delta=PairConfig(64, 64, 16, 8),
    ),
    "rocm": _alike({128: PairConfig(32, 32, 16, 4), 256: PairConfig(32, 32, 16, 8)}, PairConfig(32, 32, 16, 4)),
    "cpu": _alike({256: PairConfig(256, 256, 128, 1)}, PairConfig(128, 128, 128, 1)),
}
"""By device; on NVIDIA and AMD blocks whose code spills no register at D = 128. Triton 3.9 holds more of a product's operands at once
than 3.6: with the blocks of 3.6 up to 2.2 KB of a thread's would go to memory. Smaller blocks read shared memory more often."""


def backward_configs(device: torch.device) -> BackwardConfigs:
    """Configurations for the device; for a GPU of NVIDIA those of the compiler."""
    name = platform(device)
    if name == "cuda" and not INTERPRETED and triton.__version__.startswith("3.6."):
        name = "cuda, Triton 3.6"
    return BACKWARD[name]
