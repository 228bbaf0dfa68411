"""Grids of the kernels of contract sm90-v1: blocks of rows or of keys, and what only the device knows of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_triton import _sm90_grid_kernel as kernel
from attn_triton._problem import Grid, Sizes, key_grid, row_grid
from attn_triton._remembered_launch import Launches
from attn_triton._sm90_forward_kernel import SEGMENT_KEYS

__all__ = ["fill_gap", "key_blocks", "new_gap", "new_plans", "row_blocks"]

_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
_SEGMENTS = 256
"""Packed segments that the program of a plan counts at a time."""
_KEYS = 1024
"""Keys that a program of ``key_gap`` reads at a time."""


def new_plans(inputs: AttentionInputs, count: int) -> tuple[Tensor, ...]:
    """Workspace for ``count`` plans, int64 [segments + 1] each; none for dense inputs."""
    offsets = inputs.cu_seqlens_q
    return () if offsets is None else offsets.new_empty((count, offsets.numel()), dtype=torch.int64).unbind()


def new_gap(inputs: AttentionInputs) -> Tensor | None:
    """Workspace for ``fill_gap``, int64 [B, 2], where ``key_mask`` is given."""
    return None if inputs.key_mask is None else inputs.q.new_empty((inputs.q.shape[0], 2), dtype=torch.int64)


def fill_gap(launch: Launches, inputs: AttentionInputs, gap: Tensor | None) -> None:
    """The first masked key and the one after the last of each item (``JointLayout.key_mask``)."""
    if inputs.key_mask is not None and gap is not None and gap.numel():
        mask = inputs.key_mask.view(torch.uint8)
        launch(kernel.key_gap, mask.shape[0], mask, *mask.stride(), mask.shape[1], gap, BLOCK=_KEYS, **_OPTIONS)


def row_blocks(
    launch: Launches, inputs: AttentionInputs, sizes: Sizes, plan: Tensor | None, size: int, segments: int | None = None
) -> Grid:
    """Blocks of ``size`` rows of each kv head's group; with ``segments``, for each segment of the keys, of which there are at most so many.

    ``plan`` is the workspace for packed inputs. Every packed segment may end with a partial block; how many do is known on the device
    alone, and programs without a block leave at once.
    """
    if plan is None or sizes.batch == 0:
        grid = row_grid(inputs, sizes, size)
        return grid if segments is None else replace(grid, programs=grid.programs * segments)
    _plan(launch, inputs, sizes, plan, size, by_segment=segments is not None)
    blocks = sizes.queries * sizes.group // size + sizes.batch
    if segments is not None:  # as many programs as blocks and segments when no packed segment has many of both
        blocks += sizes.keys // SEGMENT_KEYS
    return Grid(plan, 0, blocks * sizes.kv_heads)


def key_blocks(launch: Launches, inputs: AttentionInputs, sizes: Sizes, plan: Tensor | None, size: int) -> Grid:
    """Blocks of ``size`` keys of each kv head."""
    if plan is None or sizes.batch == 0:
        return key_grid(inputs, sizes, size)
    _plan(launch, inputs, sizes, plan, size, of_keys=True)
    return Grid(plan, 0, (sizes.keys // size + sizes.batch) * sizes.kv_heads)


def _plan(
    launch: Launches, inputs: AttentionInputs, sizes: Sizes, plan: Tensor, size: int, *, by_segment: bool = False, of_keys: bool = False
) -> None:
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    queries = inputs.cu_seqlens_q.contiguous(), _contiguous(inputs.seqlens_q), sizes.queries
    keys = inputs.cu_seqlens_k.contiguous(), _contiguous(inputs.seqlens_k), sizes.keys
    first, repeats = (keys, 1) if of_keys else (queries, sizes.group)
    launch(
        kernel.attention_plan,
        1,
        *first,
        *keys,
        plan,
        sizes.batch,
        repeats,
        size,
        SEGMENT_KEYS,
        KEYS=by_segment,
        BLOCK=_SEGMENTS,
        **_OPTIONS,
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
