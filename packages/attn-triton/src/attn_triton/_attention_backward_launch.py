"""Launches of the attention backward kernels: gradients, workspace, grids and configuration; no arithmetic happens here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_backward_sums_kernel as kernel
from attn_triton._attention_launch import check_supported
from attn_triton._configuration import PairConfig, on_device
from attn_triton._pair_copies import columns_together
from attn_triton._pairs_launch import Pairs, pairs_of
from attn_triton._problem import Problem, attention_problem, block_sides

__all__ = ["CONFIGS", "Columns", "attention_backward", "fresh_gradient", "sink_sums", "turned"]


CONFIGS = {"cuda": PairConfig(64, 64, 16, 8), "rocm": PairConfig(32, 32, 16, 4), "cpu": PairConfig(128, 128, 128, 1)}
"""Of the kernel of dbias, by device."""


class Columns(NamedTuple):
    """Copies of q, k, v and dout (``d``) with columns first: the element of a row in column c is ``c * X_column`` after its first."""

    q: Tensor
    q_batch: int
    q_head: int
    q_column: int
    k: Tensor
    k_batch: int
    k_head: int
    k_column: int
    v: Tensor
    v_batch: int
    v_head: int
    v_column: int
    d: Tensor
    d_batch: int
    d_head: int
    d_column: int


def sink_sums(problem: Problem, dsink: Tensor, dsinks: Tensor, *, dot: bool) -> None:
    """dsinks [H] from the rows' ``dsink``, float32 in the shape of LSE. ``dot`` is that of the kernels' chains."""
    sizes, heads = problem.sizes, dsinks.shape[0]
    if heads == 0:
        return
    options = {"DOT": dot, "num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
    blocks = triton.cdiv(heads, kernel.SINK_HEADS)
    items = torch.empty((sizes.batch, heads), dtype=torch.float32, device=dsinks.device)
    if sizes.batch:
        kernel.attention_sink_rows[(sizes.batch * blocks,)](problem.arrays, sizes.encoded, dsink, items, **options)
    kernel.attention_sink_items[(blocks,)](items, dsinks, sizes.batch, heads, **options)


def _bias_sums(
    inputs: AttentionInputs, problem: Problem, dout: Tensor, states: tuple[Tensor, Tensor], delta: Tensor, dbias: Tensor, device: str
) -> None:
    if dbias.numel() == 0:
        return
    config = CONFIGS[device]
    rows, columns = block_sides(problem.sizes, config.owners, config.others)
    batch, heads, queries, keys = dbias.shape
    query_blocks, key_blocks = triton.cdiv(queries, rows), triton.cdiv(keys, columns)
    mask = inputs.key_mask
    kernel.attention_bias_sums[(batch * heads * query_blocks * key_blocks,)](
        problem.arrays,
        problem.sizes.encoded,
        _columns(inputs, dout),
        *states,
        delta,
        None if mask is None else mask.to(torch.uint8).contiguous(),
        dbias,
        batch,
        heads,
        query_blocks,
        key_blocks,
        ROWS=rows,
        KEYS=columns,
        CHUNK=config.chunk,
        OVER_QUERIES=queries == 1,
        OVER_KEYS=keys == 1,
        DOT=device == "cuda",
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
    found: dict[str, Tensor] = {name: fresh_gradient(inputs, name) for name in ("q", "k", "v", "sinks", "bias") if name in needs}
    if not any(gradient.numel() for gradient in found.values()):
        return found
    problem = attention_problem(inputs)
    state = (row_max.to(torch.float32).contiguous(), row_sum.to(torch.float32).contiguous())
    with on_device(inputs.q):
        delta = torch.empty_like(state[0]) if found.keys() - {"v"} else None
        dsink = torch.empty_like(state[0]) if "sinks" in found else None
        rows = (*state, None if dlse is None else dlse.to(torch.float32).contiguous(), delta, dsink)
        _pair_sums(pairs_of(inputs, problem, backward=True), dout, rows, found)
        device = platform(inputs.q.device)
        if dsink is not None:
            sink_sums(problem, dsink, found["sinks"], dot=device == "cuda")
        if delta is not None and "bias" in found:
            _bias_sums(inputs, problem, dout, state, delta, found["bias"], device)
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


def fresh_gradient(inputs: AttentionInputs, name: str) -> Tensor:
    """Memory of a gradient: zeros where some rows belong to no program (packed rows outside the segments, dropped keys, no queries)."""
    tensor: Tensor = getattr(inputs, name)
    partly = name in ("q", "k", "v") and (inputs.packed or (name != "q" and (inputs.key_mask is not None or inputs.q.shape[2] == 0)))
    return (torch.zeros if partly else torch.empty)(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _columns(inputs: AttentionInputs, dout: Tensor) -> Columns:
    tensors = (inputs.q, inputs.k, inputs.v, dout)
    parts: list[Any] = [part for tensor in tensors for part in turned(tensor, inputs.packed)]
    return Columns(*parts)


def turned(tensor: Tensor, packed: bool) -> tuple[Tensor, int, int, int]:
    """Copy [B, H, D, S], packed [H, D, total], and its strides of batch (0 when packed), head and column."""
    copy = (tensor.permute(1, 2, 0) if packed else tensor.transpose(2, 3)).contiguous()
    batch, head, column = (0, *copy.stride()[:2]) if packed else copy.stride()[:3]
    return copy, batch, head, column
