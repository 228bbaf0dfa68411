"""Launches of the kernels on pairs in memory: configurations, workspace, copies and grids; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _pair_sums_kernel as sums
from attn_triton import _pairs_kernel as kernel
from attn_triton._configuration import Config
from attn_triton._pair_copies import columns_together, copy_strides, keys_copy, logical_keys, rows_copy
from attn_triton._pairs_configuration import CONFIGS, FEW_CONFIGS, PairConfigs
from attn_triton._problem import Arrays, Grid, Problem, Sizes, key_grid, result_strides, row_grid
from attn_triton._remembered_launch import Launches
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["CONFIGS", "FEW_CONFIGS", "SELECTIONS", "WORKSPACE", "PairConfigs", "Pairs", "Workspace", "configs_of", "pairs_of"]

_TILE = 256
_GRID = 65535
"""Programs along the second axis of a grid."""
WORKSPACE = 512 << 20
"""Bytes of pairs in memory at a time, of one block of rows if that takes more."""
SELECTIONS = (False, True)
"""Launches of a sum: over every pair, then, for the blocks in which that left a NaN, without the terms of masked pairs."""
FEW_ROWS = 64
"""Rows of a kv head up to which they are few."""


@dataclass(frozen=True)
class Workspace:
    """Lines of the rows in work: ``first`` and ``count`` of their programs."""

    first: int
    count: int


@dataclass(frozen=True)
class Pairs:
    """The pairs of one call, a workspace of its rows at a time. ``tiles`` are those of a line; ``dot``: NVIDIA's products of blocks.
    ``launch`` starts the kernels."""

    inputs: AttentionInputs
    problem: Problem
    configs: PairConfigs
    grid: Grid
    tiles: int
    few: bool
    dot: bool
    launch: Launches

    @property
    def block(self) -> int:
        return self.configs.products.rows

    @property
    def merging(self) -> dict[str, Any]:
        """Options of the kernels that go over the tiles of a block of rows."""
        return Config(rows=self.block, num_warps=-(-self.block // 32)).options

    def workspaces(self, arrays: int) -> Iterator[Workspace]:
        """The rows, as many at a time as ``arrays`` numbers of each pair may wait in memory for."""
        blocks = max(1, WORKSPACE // (4 * arrays * self.tiles * _TILE * self.block))
        for first in range(0, self.grid.programs, blocks):
            yield Workspace(first, min(blocks, self.grid.programs - first))

    def lines(self, arrays: int) -> int:
        """Lines of the largest workspace."""
        return self.block * max((space.count for space in self.workspaces(arrays)), default=0)

    def numbers(self, arrays: int) -> tuple[Tensor, ...]:
        """``arrays`` times a float32 number for each pair of a workspace."""
        size = self.lines(arrays) * self.tiles * _TILE
        return tuple(self.launch.workspace(size, torch.float32, self.inputs.q.device) for _ in range(arrays))

    def sums(self, arrays: int, count: int) -> tuple[Tensor, ...]:
        """``count`` times a float32 number for each tile of a workspace with ``arrays`` numbers of each pair."""
        size = self.lines(arrays) * self.tiles
        return tuple(self.launch.workspace(size, torch.float32, self.inputs.q.device) for _ in range(count))

    def ranges(self, arrays: int) -> Tensor:
        return self.launch.workspace(2 * self.lines(arrays) // self.block, torch.int32, self.inputs.q.device)

    def rows_copy(self, tensor: Tensor) -> Tensor:
        """A copy of q or dout for ``products``."""
        rows = self.grid.per_item * self.block
        return rows_copy(tensor, self.inputs, self.problem.sizes, rows, self.configs.products.chunk)

    def keys_copy(self, tensor: Tensor) -> Tensor:
        """A copy of k or v for ``products``."""
        return keys_copy(tensor, self.inputs, self.problem.arrays, self.configs.products.chunk)

    def values(self, tensor: Tensor) -> Tensor:
        """k or v for ``row_sums``; of few rows as it is, since there its memory is what takes time."""
        return columns_together(logical_keys(tensor, self.inputs, self.problem.arrays), wide=not self.few)

    def place(self, space: Workspace) -> tuple[Arrays, Sizes, Tensor | None, int]:
        """The leading arguments of kernels that know the rows."""
        return self.problem.arrays, self.problem.sizes.encoded, self.grid.plan, space.first

    def products(self, space: Workspace, by_row: Tensor, by_key: Tensor, found: Tensor, ranges: Tensor, *, final: bool) -> None:
        """Scores (``final``), or the bare products of rows and keys, from their copies."""
        config = self.configs.products
        # The address of a bias for each pair takes registers.
        keys = config.keys if self.problem.arrays.bias is None or not final else config.keys // 2
        self.launch(
            kernel.pair_products,
            (space.count, self.tiles * _TILE // keys),
            *self.place(space),
            by_row,
            *copy_strides(by_row),
            by_key,
            *copy_strides(by_key),
            by_row.shape[-2],
            found,
            ranges,
            self.tiles,
            BLOCK=config.rows,
            KEYS=keys,
            CHUNK=config.chunk,
            FINAL=final,
            DOT=self.dot,
            **config.options,
        )

    def scores_of_few(self, space: Workspace, found: Tensor, ranges: Tensor) -> None:
        config = self.configs.products
        arrays, encoded, _, first = self.place(space)
        self.launch(
            kernel.decode_products,
            (space.count, self.tiles),
            arrays,
            encoded,
            first,
            found,
            ranges,
            self.tiles,
            BLOCK=config.rows,
            CHUNK=config.chunk,
            DOT=self.dot,
            **config.options,
        )

    def parts(self, space: Workspace) -> tuple[int, int]:
        """Grid of the kernels that go over the lines."""
        programs = space.count * (self.block // self.configs.elements.rows)
        return programs, max(1, min(self.tiles, self.configs.programs // programs))

    def states(
        self, space: Workspace, scores: Tensor, ranges: Tensor, of_tiles: tuple[Tensor, ...], results: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """LSE, row maximum and row sum of the rows in work."""
        config = self.configs.elements
        self.launch(
            kernel.tile_states,
            self.parts(space),
            scores,
            ranges,
            *of_tiles,
            self.tiles,
            BLOCK=self.block,
            ROWS=config.rows,
            **config.options,
        )
        self.launch(
            kernel.merge_states, space.count, *self.place(space), ranges, *of_tiles, *results, self.tiles, BLOCK=self.block, **self.merging
        )

    def probabilities(self, space: Workspace, pairs: Tensor, ranges: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        config = self.configs.elements
        self.launch(
            kernel.to_probabilities,
            self.parts(space),
            *self.place(space),
            ranges,
            pairs,
            row_max,
            row_sum,
            self.tiles,
            BLOCK=self.block,
            ROWS=config.rows,
            **config.options,
        )

    def deltas(
        self,
        space: Workspace,
        probs: Tensor,
        upstream: Tensor,
        ranges: Tensor,
        of_tiles: Tensor,
        rows: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    ) -> None:
        """delta and dsink of the rows in work; ``rows`` are row maximum, row sum, dLSE, delta and dsink."""
        config = self.configs.elements
        self.launch(
            kernel.tile_deltas,
            self.parts(space),
            probs,
            upstream,
            ranges,
            of_tiles,
            self.tiles,
            BLOCK=self.block,
            ROWS=config.rows,
            **config.options,
        )
        self.launch(
            kernel.merge_deltas, space.count, *self.place(space), ranges, of_tiles, *rows, self.tiles, BLOCK=self.block, **self.merging
        )

    def gradients(self, space: Workspace, probs: Tensor, pairs: Tensor, ranges: Tensor, delta: Tensor) -> None:
        """dP to dS."""
        config = self.configs.elements
        self.launch(
            kernel.to_gradients,
            self.parts(space),
            *self.place(space),
            ranges,
            probs,
            pairs,
            delta,
            self.tiles,
            BLOCK=self.block,
            ROWS=config.rows,
            **config.options,
        )

    def row_sums(self, space: Workspace, weights: Tensor, ranges: Tensor, values: Tensor, factor: float, out: Tensor) -> None:
        """Chains over keys with rows of ``values`` (v or k by logical key)."""
        width = values.shape[-1]
        if width == 0:
            return
        columns = _columns(width, self.configs.columns)
        blocks = -(-width // columns)
        spoiled = self.launch.workspace(space.count * blocks, torch.int32, out.device)
        batch, head, row = result_strides(values, self.inputs.packed)
        for select in SELECTIONS:
            config = self.configs.row_select if select else self.configs.row_sums
            self.launch(
                sums.row_sums,
                (space.count, blocks),
                *self.place(space),
                ranges,
                weights,
                self.tiles,
                values,
                batch,
                head,
                row,
                width,
                out,
                *result_strides(out, self.inputs.packed),
                factor,
                spoiled,
                BLOCK=self.block,
                KEYS=config.keys,
                COLUMNS=columns,
                COMPACT=self.problem.arrays.key_index is not None,
                SELECT=select,
                DOT=self.dot,
                INTEGER_ROUNDING=INTERPRETED,
                **config.options,
            )

    def key_grid(self) -> Grid:
        """Blocks of slots of each kv head."""
        more = _TILE - 1 if self.inputs.k_start is not None else 0
        return key_grid(self.inputs, self.problem.sizes, self.configs.key_sums.keys, more)

    def carry(self, width: int) -> Tensor:
        """Chains over rows that wait for the next workspace."""
        columns = _columns(width, self.configs.columns)
        size = self.key_grid().programs * self.configs.key_sums.keys * -(-width // columns) * columns
        return torch.empty(size, dtype=torch.float32, device=self.inputs.q.device)

    def key_sums(
        self,
        space: Workspace,
        key_blocks: Grid,
        weights: Tensor,
        ranges: Tensor,
        values: Tensor,
        factor: float,
        carry: Tensor | None,
        gradient: Tensor,
    ) -> None:
        """Chains over rows with rows of ``values`` (q or dout)."""
        width = values.shape[-1]
        if gradient.numel() == 0:
            return
        columns = _columns(width, self.configs.columns)
        blocks = -(-width // columns)
        spoiled = torch.zeros(key_blocks.programs * blocks, dtype=torch.int32, device=values.device)
        arrays, encoded, plan, first = self.place(space)
        for select in SELECTIONS:
            config = self.configs.key_select if select else self.configs.key_sums
            self.launch(
                sums.key_sums,
                (key_blocks.programs, blocks),
                arrays,
                encoded,
                plan,
                key_blocks.plan,
                first,
                space.count,
                ranges,
                weights,
                self.tiles,
                values,
                *result_strides(values, self.inputs.packed),
                width,
                carry,
                gradient,
                *result_strides(gradient, self.inputs.packed),
                factor,
                spoiled,
                BLOCK=self.block,
                ROWS=config.rows,
                KEYS=config.keys,
                COLUMNS=columns,
                STARTS=first == 0,
                ENDS=first + space.count == self.grid.programs,
                SELECT=select,
                DOT=self.dot,
                INTEGER_ROUNDING=INTERPRETED,
                **config.options,
            )


def configs_of(inputs: AttentionInputs, *, backward: bool = False) -> tuple[PairConfigs, bool]:
    """Of a call on its device, and whether its rows are few."""
    device, (heads, kv_heads) = platform(inputs.q.device), (inputs.q.shape[1], inputs.k.shape[1])
    rows = heads // kv_heads * inputs.q.shape[2]
    if device in FEW_CONFIGS and not inputs.packed and not backward and rows <= FEW_ROWS:
        return FEW_CONFIGS[device][4 if rows <= 4 else 16], True
    return CONFIGS[device], False


def pairs_of(inputs: AttentionInputs, problem: Problem, launch: Launches | None = None, *, backward: bool = False) -> Pairs:
    """The pairs of a call on its device. Raises ValueError for more keys than the second axis of a grid has blocks for."""
    device, sizes = platform(inputs.q.device), problem.sizes
    configs, few = configs_of(inputs, backward=backward)
    most = _GRID * (_TILE if few else configs.products.keys // 2)
    if sizes.keys > most:
        raise ValueError(f"attention: at most {most} keys are supported on {device}; got {sizes.keys}")
    block = configs.products.rows
    tiles = -(-(sizes.keys + (_TILE - 1 if inputs.k_start is not None else 0)) // _TILE)
    if not inputs.packed and sizes.queries % block == 0:  # a block has one head's queries: what it sees is as wide as its window
        tiles = min(tiles, (block + sizes.left + sizes.right + 2 * _TILE - 2) // _TILE)
    grid = row_grid(inputs, sizes, block)
    return Pairs(inputs, problem, configs, grid, max(tiles, 1), few, device == "cuda", launch or Launches())


def _columns(width: int, most: int) -> int:
    """Columns of a program of the sums: a power of two that ``tl.dot`` takes."""
    return min(most, max(16, triton.next_power_of_2(width)))
