"""The layouts of ``fused_attn`` as cells of the matrix call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from attn_jax_rocm_sink import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, fused_attn
from matrix_cells import Cell

__all__ = ["call_fused"]

_SOFTMAX = {
    "vanilla": AttnSoftmaxType.VANILLA_SOFTMAX,
    "off_by_one": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX,
    "learnable": AttnSoftmaxType.LEARNABLE_SOFTMAX,
}
_MASKS = {
    "none": AttnMaskType.NO_MASK,
    "padding": AttnMaskType.PADDING_MASK,
    "causal": AttnMaskType.CAUSAL_MASK,
    "padding_causal": AttnMaskType.PADDING_CAUSAL_MASK,
    "bottom_right": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
    "padding_bottom_right": AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}
_LAYOUTS = {
    "bshd": QKVLayout.BSHD_BSHD_BSHD,
    "qkv_packed": QKVLayout.BS3HD,
    "kv_packed": QKVLayout.BSHD_BS2HD,
    "thd_padded": QKVLayout.THD_THD_THD,
    "thd_packed": QKVLayout.THD_THD_THD,
}

Segments = Sequence[Sequence[tuple[int, int]]]


def call_fused(
    cell: Cell,
    arrays: Mapping[str, jax.Array],
    rows: tuple[Segments, Segments],
    scale: float,
    window: tuple[int, int],
    dropout: float,
    seed: int,
) -> jax.Array:
    """out [B, H, S, V] of ``fused_attn`` for arrays [B, H, S, D]; ``rows`` are the used rows of queries and keys of each sequence."""
    q, k, v = (jnp.swapaxes(arrays[name], 1, 2) for name in ("q", "k", "v"))
    packed = {
        "qkv_packed": (jnp.stack([q, k, v], 2),) if cell.layout == "qkv_packed" else (),
        "kv_packed": (q, jnp.stack([k, v], 2)) if cell.layout == "kv_packed" else (),
    }
    bias = arrays.get("bias") if cell.bias != "none" else None
    kind = {"none": AttnBiasType.NO_BIAS, "alibi": AttnBiasType.ALIBI, "pre_scale": AttnBiasType.PRE_SCALE_BIAS}
    out = fused_attn(
        packed.get(cell.layout, (q, k, v)),
        bias,
        _descriptor(cell, rows),
        seed,
        kind.get(cell.bias, AttnBiasType.POST_SCALE_BIAS),
        _MASKS[cell.mask],
        _LAYOUTS[cell.layout],
        _SOFTMAX[cell.softmax],
        scale,
        dropout if cell.dropout == "dropout" else 0.0,
        True,
        max_segments_per_seq=max(map(len, rows[0])),
        window_size=window if cell.window == "window" else None,
        softmax_offset=arrays["sinks"].reshape(1, -1, 1, 1) if cell.softmax == "learnable" else None,
        engine=cell.engine,
    )
    return jnp.swapaxes(out, 1, 2)


def _descriptor(cell: Cell, rows: tuple[Segments, Segments]) -> SequenceDescriptor | None:
    if "padding" not in cell.mask:
        return None
    if not cell.layout.startswith("thd"):
        queries, keys = (jnp.asarray([sequence[0][1] for sequence in side]) for side in rows)
        return SequenceDescriptor.from_seqlens((queries, keys))
    width = max(map(len, rows[0]))
    lengths, offsets = (
        tuple(jnp.asarray([[*(row[part] for row in sequence), *[-1] * (width - len(sequence))] for sequence in side]) for side in rows)
        for part in (1, 0)
    )
    return SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)
