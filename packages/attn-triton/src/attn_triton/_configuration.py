"""How a kernel is launched: its configuration as data, and the device that it runs on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attn_triton._interpreter import bfloat16_by_shift, ieee_mode, patched_once, without_overflow_checks
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["Config", "PairConfig", "TileConfig", "on_device", "padded"]

TILE = 1024
"""Slots of a tile of ordered-v2."""


@dataclass(frozen=True)
class Config:
    """How a kernel is launched. No field moves a bit; they are data, not the result of a search at run time.

    ``rows`` is the number of rows of one program, ``keys`` the number of keys that it holds at a time, ``chunk`` the number of columns that
    one step of a chain over columns reads; all are powers of two.
    ``registers`` of a thread are those that ptxas may use (NVIDIA alone): by itself it chooses fewer at times, for more programs at once,
    and spills. ``enable_fp_fusion`` stays False: the contract rounds every product.
    """

    rows: int
    num_warps: int
    keys: int = 64
    chunk: int = 32
    num_stages: int = 1
    registers: int | None = None
    enable_fp_fusion: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options."""
        found = {name: value for name, value in asdict(self).items() if name not in ("rows", "keys", "chunk", "registers")}
        return found | _at_most(self.registers)


def _at_most(registers: int | None) -> dict[str, int]:
    return {} if registers is None else {"maxnreg": registers}


@dataclass(frozen=True)
class TileConfig:
    """How a kernel of rows of 1024-slot tiles is launched. No field moves a bit.

    A program has ``rows`` rows, or one row of which it takes a group of tiles a step, each in a warp of ``lanes`` threads.
    ``groups`` are the sizes to choose from, 1 and larger powers of two. A row is kept in registers if a group can, no warp of which has
    more than ``kept`` slots. The smallest such group is taken, and where there are no more than ``few`` rows the largest that has work.
    """

    rows: int
    groups: tuple[int, ...]
    kept: int
    lanes: int = 32
    few: int = 0

    @functools.cache  # noqa: B019 - configurations live as long as the module
    def constants(self, few: bool, keys: int, vector: int, masked: bool) -> dict[str, Any]:
        """Compile-time arguments of a kernel for few rows, or many, of ``keys`` keys, of which ``vector`` are read at once."""
        useful = [group for group in self.groups if group == 1 or group // 2 * TILE < keys]
        kept = {} if masked else {group: _parts(keys, group, self.lanes * vector) for group in useful}
        fitting = [group for group, parts in kept.items() if sum(parts) <= self.kept]
        group = (fitting or useful)[-1 if few else 0]
        whole, tail = kept[group] if fitting else (0, 0)
        return {"ROWS": self.rows, "GROUP": group, "LANES": self.lanes, "VECTOR": vector, "FULL": whole // TILE, "TAIL": tail}

    def options(self, constants: dict[str, Any]) -> dict[str, Any]:
        """Compiler options; the contract rounds every product but those of its FMAs."""
        return {"num_warps": constants["GROUP"], "num_stages": 1, "enable_fp_fusion": False}


def _parts(keys: int, group: int, least: int) -> tuple[int, int]:
    """Slots of a warp in whole steps, and in one whose tiles have keys in their first slots alone."""
    steps, rest = divmod(keys, TILE * group)
    return steps * TILE, max(least, 1 << (min(rest, TILE) - 1).bit_length()) if rest else 0


@dataclass(frozen=True)
class PairConfig:
    """Block of pairs of one step and how the kernel is launched. No field moves a bit.

    ``owners`` rows or keys belong to a program, ``others`` stream by; a chain of scores reads ``chunk`` columns a step. Powers of two.
    ``registers`` are as in ``Config``.
    """

    owners: int
    others: int
    chunk: int
    num_warps: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options; the contract rounds every product."""
        return {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False} | _at_most(self.registers)


def padded(width: int) -> int:
    """Columns of an accumulator that holds ``width`` of them: a power of two that ``tl.dot`` takes."""
    return max(16, 1 << (width - 1).bit_length())


@contextmanager
def on_device(tensor: Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be the tensor's."""
    if not INTERPRETED and tensor.is_cuda and tensor.get_device() == torch.cuda.current_device():
        yield
        return
    with ExitStack() as stack:
        if tensor.is_cuda:
            stack.enter_context(torch.cuda.device(tensor.device))
        if INTERPRETED:
            stack.enter_context(ieee_mode())
            stack.enter_context(without_overflow_checks())
            stack.enter_context(patched_once())
            stack.enter_context(bfloat16_by_shift())
        yield
