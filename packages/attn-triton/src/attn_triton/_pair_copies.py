"""Copies of the operands of chains, in the order in which the kernels on pairs read them; no arithmetic happens here.

``tl.dot`` keeps the order of memory in shared memory, where rows side by side are read without bank conflicts, and only operands of 32 bits
go there ahead of their step.
"""

from __future__ import annotations

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_triton._problem import Arrays, Sizes

__all__ = ["columns_together", "copy_strides", "keys_copy", "logical_keys", "rows_copy"]

_TILE = 256


def rows_copy(tensor: Tensor, inputs: AttentionInputs, sizes: Sizes, rows: int, chunk: int) -> Tensor:
    """Rows of q or dout, columns first, float32: [B, K, columns, ``rows``], packed [H, columns, total].

    Columns are a multiple of ``chunk``, dense rows the queries of a group's heads one head after the other; what is added is +0.
    """
    columns = tensor.shape[-1]
    if inputs.packed:
        total, heads, _ = tensor.shape
        copy = _zeros(tensor, (heads, _multiple(columns, chunk), total))
        copy[:, :columns] = tensor.permute(1, 2, 0)
        return copy
    batch, _, queries, _ = tensor.shape
    copy = _zeros(tensor, (batch, sizes.kv_heads, _multiple(columns, chunk), rows))
    used = copy[:, :, :columns, : sizes.group * queries].unflatten(-1, (sizes.group, queries))
    used.copy_(tensor.unflatten(1, (sizes.kv_heads, sizes.group)).permute(0, 1, 4, 2, 3))
    return copy


def keys_copy(tensor: Tensor, inputs: AttentionInputs, arrays: Arrays, chunk: int) -> Tensor:
    """Rows of k or v by logical key, columns first, float32: [B, K, columns, slots], packed [K, columns, slots].

    Columns are a multiple of ``chunk``. Before the first key lies a tile of +0, after the last one two or more.
    """
    columns = tensor.shape[-1]
    if inputs.packed:
        total, heads, _ = tensor.shape
        copy = _zeros(tensor, (heads, _multiple(columns, chunk), total + 3 * _TILE))
        copy[:, :columns, _TILE : _TILE + total] = tensor.permute(1, 2, 0)
        return copy
    batch, heads, keys, _ = tensor.shape
    copy = _zeros(tensor, (batch, heads, _multiple(columns, chunk), _multiple(keys, _TILE) + 3 * _TILE))
    copy[:, :, :columns, _TILE : _TILE + keys] = logical_keys(tensor, inputs, arrays).transpose(2, 3)
    return copy


def logical_keys(tensor: Tensor, inputs: AttentionInputs, arrays: Arrays) -> Tensor:
    """Rows of k or v by logical key, +0 where there is none or it is not used; without a padding mask the tensor itself."""
    if arrays.key_index is None or arrays.key_counts is None:
        return tensor
    used = torch.arange(tensor.shape[2], device=tensor.device) < arrays.key_counts[:, None]
    if inputs.kv_lengths is not None:
        used = used & (arrays.key_index < inputs.kv_lengths[:, None])
    gathered = tensor.gather(2, arrays.key_index.long()[:, None, :, None].expand(tensor.shape))
    return gathered.masked_fill(~used[:, None, :, None], 0.0)


def columns_together(tensor: Tensor, *, wide: bool = True) -> Tensor:
    """The tensor, or a copy, whose columns lie side by side; ``wide``: in float32."""
    tensor = tensor.float() if wide else tensor
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def copy_strides(copy: Tensor) -> tuple[int, int, int]:
    """Strides of batch (0 when packed), head and column of a copy."""
    strides = copy.stride()
    return (0, strides[0], strides[1]) if len(strides) == 3 else (strides[0], strides[1], strides[2])


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
