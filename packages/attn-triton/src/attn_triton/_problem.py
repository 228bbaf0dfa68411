"""An attention call as the kernels take it: pointers with strides, and sizes. Two tuples, since Triton specialises on values of the first.

Every kernel has the parameters ``arrays`` (``Arrays``: alignment and unit strides are compiled in) and ``sizes`` (``Sizes.encoded``: plain
numbers that no compilation depends on).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_triton._key_index import key_index
from attn_triton._softmax_kernel import INTERPRETED

__all__ = [
    "MAX_HEAD_DIM",
    "MAX_KEYS",
    "Arrays",
    "Grid",
    "Problem",
    "Sizes",
    "attention_problem",
    "block_sides",
    "fresh_results",
    "key_grid",
    "result_strides",
    "row_grid",
]

MAX_HEAD_DIM = 256
"""Largest head dim of q, k and v that the kernels hold."""

MAX_KEYS = 2**31 - 1025
"""Slots, and the tile after the last one, are counted in 32 bits."""

MAX_BLOCK_KEYS = 4096
"""Keys of a block in the interpreter: with ``MAX_HEAD_DIM`` columns they are as many elements as Triton's language allows."""

_UNBOUNDED = 2**40
_VECTORS = ("kv_lengths", "q_start", "k_start", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "sinks")


class Arrays(NamedTuple):
    """Tensors and their strides in elements: batch (0 when packed), head, row, column. ``None`` is an array that the call does not have.

    ``query_mask`` [B, S] uint8; ``key_index`` [B, T] and ``key_counts`` [B], int32: the stored position of each logical key and their
    number; ``kv_lengths``, ``q_start``, ``k_start`` [B] and the packed offsets and lengths: int64; ``sinks`` [H], ``bias``: float32, with
    stride 0 on the axes that it broadcasts.
    """

    q: Tensor
    q_batch: int
    q_head: int
    q_row: int
    q_column: int
    k: Tensor
    k_batch: int
    k_head: int
    k_row: int
    k_column: int
    v: Tensor
    v_batch: int
    v_head: int
    v_row: int
    v_column: int
    head_dim: int
    value_dim: int
    query_mask: Tensor | None
    key_index: Tensor | None
    key_counts: Tensor | None
    kv_lengths: Tensor | None
    q_start: Tensor | None
    k_start: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqlens_q: Tensor | None
    seqlens_k: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    bias_batch: int
    bias_head: int
    bias_query: int
    bias_key: int


class Sizes(NamedTuple):
    """Numbers of one call. ``batch`` counts batch items or packed segments; packed ``queries`` and ``keys`` are totals.

    A pair is in the window iff ``-left <= k_start + j - (q_start + i) <= right``; causality is ``right = 0``, no bound a large number.
    """

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    left: int
    right: int
    scale: float

    @property
    def encoded(self) -> Sizes:
        """For kernels, n as 2 n + 3: Triton compiles anew for members of a tuple that are 1 or multiples of 16; none of these is."""
        numbers: dict[str, Any] = {name: 2 * int(number) + 3 for name, number in self._asdict().items() if name != "scale"}
        return Sizes(**numbers, scale=self.scale)


@dataclass(frozen=True)
class Grid:
    """Where blocks of rows, or of keys, lie in a one-dimensional grid: ``plan`` [segments + 1] when packed, else ``per_item`` blocks."""

    plan: Tensor | None
    per_item: int
    programs: int


@dataclass(frozen=True)
class Problem:
    """The two tuples of one call."""

    arrays: Arrays
    sizes: Sizes

    def on(self, grid: Grid) -> tuple[Any, ...]:
        """The first arguments of a kernel over ``grid``: ``arrays``, ``sizes``, ``plan`` and ``per_item``."""
        return self.arrays, self.sizes.encoded, grid.plan, grid.per_item


def fresh_results(inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory of out, LSE, row maximum and row sum. Packed, it holds the values of rows outside the segments, which belong to no program."""
    device, fills = inputs.q.device, (-torch.inf, -torch.inf, 0.0)
    if not inputs.packed:
        lse, row_max, row_sum = (torch.empty(inputs.row_shape, dtype=torch.float32, device=device) for _ in fills)
        return torch.empty(inputs.out_shape, dtype=out_dtype, device=device), lse, row_max, row_sum
    lse, row_max, row_sum = (torch.full(inputs.row_shape, fill, dtype=torch.float32, device=device) for fill in fills)
    return torch.zeros(inputs.out_shape, dtype=out_dtype, device=device), lse, row_max, row_sum


def attention_problem(inputs: AttentionInputs, *, columns_first: bool = False) -> Problem:
    """Normalised arguments of one call. q, k, v and bias keep their strides, and nothing of them is copied unless ``columns_first``.

    With ``columns_first`` q and k are copies in which rows lie side by side. ``tl.dot`` keeps the order of memory in shared memory, where
    only this one reads without bank conflicts.
    """
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    if columns_first:
        q, k = (_columns_first(tensor, inputs.packed) for tensor in (q, k))
    if inputs.packed:
        assert inputs.cu_seqlens_q is not None
        (queries, heads, head_dim), (keys, kv_heads) = q.shape, k.shape[:2]
        batch = inputs.cu_seqlens_q.numel() - 1
    else:
        (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    if keys > MAX_KEYS:
        raise ValueError(f"attention: at most {MAX_KEYS} keys are supported; got {keys}")
    _check_positions("q_start", inputs.q_start, queries, -(2**31))
    _check_positions("k_start", inputs.k_start, keys, 0)
    logical = None if inputs.key_mask is None or inputs.key_mask.shape[1] == 0 else key_index(inputs.key_mask)
    right = _UNBOUNDED if inputs.window_right < 0 else inputs.window_right
    members: dict[str, Any] = {
        **_operand("q", q, inputs.packed),
        **_operand("k", k, inputs.packed),
        **_operand("v", v, inputs.packed),
        "query_mask": None if inputs.query_mask is None else inputs.query_mask.to(torch.uint8).contiguous(),
        "key_index": None if logical is None else logical.index,
        "key_counts": None if logical is None else logical.counts,
        **{name: _contiguous(getattr(inputs, name)) for name in _VECTORS},
        **dict(zip(("bias_batch", "bias_head", "bias_query", "bias_key"), _broadcast_strides(bias), strict=True)),
    }
    arrays = Arrays(**members, head_dim=head_dim, value_dim=v.shape[-1], bias=bias)
    sizes = Sizes(
        batch,
        kv_heads,
        heads // kv_heads,
        queries,
        keys,
        _UNBOUNDED if inputs.window_left < 0 else inputs.window_left,
        min(right, 0) if inputs.causal else right,
        inputs.scale,
    )
    return Problem(arrays, sizes)


def _check_positions(name: str, start: Tensor | None, count: int, least: int) -> None:
    """ValueError for positions that ordered-v1 (section 3) forbids, where they can be read without waiting for a device."""
    if start is None or start.device.type != "cpu" or start.numel() == 0:
        return
    first, last = int(start.min()), int(start.max()) + max(0, count - 1)
    if first < least or last >= 2**31:
        limit = "0 or more" if least == 0 else "-2**31 or more"
        raise ValueError(f"attention: positions from {name} must be {limit} and below 2**31; got {first} to {last}")


def _columns_first(tensor: Tensor, packed: bool) -> Tensor:
    """The same values and shape in memory of the order batch, head, column, row."""
    axes = (1, 2, 0) if packed else (0, 1, 3, 2)
    stored = tensor.permute(axes).contiguous()
    return stored.permute((2, 0, 1) if packed else axes)


def _operand(name: str, tensor: Tensor, packed: bool) -> dict[str, Any]:
    parts = ("", "_batch", "_head", "_row", "_column")
    return dict(zip((name + part for part in parts), (tensor, *_strides(tensor, packed)), strict=True))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(tensor: Tensor, packed: bool) -> tuple[int, int, int, int]:
    """Strides of the axes batch, head, row and column: packed [total, H, D], dense [B, H, S, D]."""
    if packed:
        row, head, column = tensor.stride()
        return 0, head, row, column
    batch, head, row, column = tensor.stride()
    return batch, head, row, column


def _broadcast_strides(bias: Tensor | None) -> tuple[int, ...]:
    if bias is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


def result_strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of batch, head and row of a fresh contiguous result that is laid out like q or k."""
    batch, head, row, _ = _strides(tensor, packed)
    return batch, head, row


def block_sides(sizes: Sizes, rows: int, keys: int) -> tuple[int, int]:
    """Rows and keys of a block of pairs: those given, and in the interpreter no more rows than there are, and more keys in their place.

    There an operation costs much, however small its block; no side moves a bit.
    """
    if not INTERPRETED:
        return rows, keys
    area, present = rows * keys, max(1, sizes.queries * sizes.group)
    rows = min(rows, max(16, _power_of_two(present)))
    return rows, min(area // rows, max(16, _power_of_two(sizes.keys)), MAX_BLOCK_KEYS)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def row_grid(inputs: AttentionInputs, sizes: Sizes, size: int) -> Grid:
    """Blocks of ``size`` rows of each kv head's group."""
    return _grid(inputs.cu_seqlens_q, inputs.seqlens_q, sizes.queries, sizes.group, sizes, size)


def key_grid(inputs: AttentionInputs, sizes: Sizes, size: int, more: int = 0) -> Grid:
    """Blocks of ``size`` keys of each kv head, each of whose items has room for ``more`` keys."""
    return _grid(inputs.cu_seqlens_k, inputs.seqlens_k, sizes.keys, 1, sizes, size, more)


def _grid(offsets: Tensor | None, used: Tensor | None, total: int, repeats: int, sizes: Sizes, size: int, more: int = 0) -> Grid:
    if offsets is None:
        per_item = -(-(total * repeats + more) // size)
        return Grid(None, per_item, per_item * sizes.batch * sizes.kv_heads)
    if sizes.batch == 0:
        return Grid(None, 0, 0)
    # Every segment may end with a partial block; how many do is known on the device alone, and programs without a block leave at once.
    most = (total * repeats // size + sizes.batch * (1 + -(-more // size))) * sizes.kv_heads
    return Grid(_block_plan(offsets, used, total, repeats, size, more), 0, most)


def _block_plan(offsets: Tensor, used: Tensor | None, total: int, repeats: int, size: int, more: int = 0) -> Tensor:
    """int64 [segments + 1]: how many blocks lie before each packed segment, whose rows are repeated ``repeats`` times and ``more``.

    Built on the device without a synchronisation; offsets and lengths are clamped into the array, as the kernels do.
    """
    bounds = offsets.clamp(0, total)
    lengths = (bounds[1:] - bounds[:-1]).clamp(min=0)
    if used is not None:
        lengths = torch.minimum(used.clamp(min=0), lengths)
    blocks = (lengths * repeats + (more + size - 1)).div(size, rounding_mode="floor")
    return torch.cat((blocks.new_zeros(1), torch.cumsum(blocks, dim=0)))
