"""``fused_attn``: Transformer Engine's call, lowered onto ``attention``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax_rocm_sink._arrays import as_array, check_known, is_integer, is_real, number
from attn_jax_rocm_sink._attention import attention
from attn_jax_rocm_sink._attention_types import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from attn_jax_rocm_sink._bias import alibi, broadcast
from attn_jax_rocm_sink._segments import Packing, fitted, keep_rows, spoil
from attn_jax_rocm_sink._sequence_descriptor import SequenceDescriptor

__all__ = ["fused_attn"]


def fused_attn(
    qkv: tuple[jax.Array, ...],
    bias: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | None,
    seed: int | jax.Array | None,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_axis: str = "",
    softmax_offset: jax.Array | None = None,
    *,
    contract: str | None = None,
    engine: str | None = None,
) -> jax.Array:
    """Attention as Transformer Engine calls it; every option is honoured or refused.

    Arrays may be whatever ``jnp.asarray`` takes.

    Args:
        qkv: one, two or three arrays, as ``qkv_layout`` says; H query heads, K kv heads (H where all are packed in one).
        bias: [B|1, H|1, S, T] in float32, bfloat16 or float16, for PRE_SCALE_BIAS and POST_SCALE_BIAS alone. ALIBI takes none: its slopes
            are the standard ones, its distance is ``|i + shift - j|`` with the alignment of the mask.
        sequence_descriptor: with the padding masks, and only with them. Rows that it leaves out are 0 in output and gradients, whatever
            they hold. Its arrays may be traced; a sequence whose traced lengths or segments do not fit is NaN.
        seed: as ``dropout_seed`` of ``attention``; dropout needs it.
        attn_mask_type: causal masks of a padded sequence or segment align to its own lengths.
        softmax_type: LEARNABLE_SOFTMAX needs ``softmax_offset`` float32 [1, H, 1, 1] and gives its gradient; the others take none.
        scaling_factor: a number known when traced.
        dropout_probability: applies when ``is_training``.
        max_segments_per_seq: segments that a sequence of a T layout may hold. Each becomes a batch item: memory grows with their number.
        window_size: ``(left, right)``, keys besides the diagonal one, negative for no bound, both honoured under every mask. **The
            diagonal is that of the causal mask: bottom-right for the bottom-right masks, and top-left (key i beside query i) for all
            others, causal or not.** With segments it is each segment's own.
        context_parallel_axis: sharding of the sequence is refused; "" is none.
        contract, engine: as in ``attention``.

    Returns:
        [B, S, H, V] in the dtype of v. The bits of a sequence or segment are those of the same rows alone, except that dropout counts
        batch items and segments.

    Raises:
        ValueError, TypeError: with every reason found. UnsupportedProblem: as ``attention``.

    Source: Transformer Engine's ``transformer_engine.jax.attention.fused_attn``.
    """
    check_known(
        "fused_attn",
        scaling_factor=scaling_factor,
        dropout_probability=dropout_probability,
        is_training=is_training,
        max_segments_per_seq=max_segments_per_seq,
        window_size=window_size,
    )
    scaling_factor = number("fused_attn", "scaling_factor", scaling_factor)
    for name, value, fits, kind in (
        ("attn_bias_type", attn_bias_type, isinstance(attn_bias_type, AttnBiasType), "an AttnBiasType"),
        ("attn_mask_type", attn_mask_type, isinstance(attn_mask_type, AttnMaskType), "an AttnMaskType"),
        ("qkv_layout", qkv_layout, isinstance(qkv_layout, QKVLayout), "a QKVLayout"),
        ("softmax_type", softmax_type, isinstance(softmax_type, AttnSoftmaxType), "an AttnSoftmaxType"),
        ("qkv", qkv, isinstance(qkv, tuple | list), "a tuple of arrays"),
        ("scaling_factor", scaling_factor, is_real(scaling_factor), "a number"),
        ("dropout_probability", dropout_probability, is_real(dropout_probability), "a number"),
        ("is_training", is_training, isinstance(is_training, bool), "True or False"),
        ("max_segments_per_seq", max_segments_per_seq, is_integer(max_segments_per_seq), "an integer"),
        ("window_size", window_size, window_size is None or _is_window(window_size), "(left, right), each an integer"),
        ("context_parallel_axis", context_parallel_axis, isinstance(context_parallel_axis, str), "a string"),
    ):
        if not fits:
            raise TypeError(f"fused_attn: {name} must be {kind}; got {value!r}")
    qkv = tuple(as_array("fused_attn", f"qkv[{place}]", array) for place, array in enumerate(qkv))
    bias = None if bias is None else as_array("fused_attn", "bias", bias)
    softmax_offset = None if softmax_offset is None else as_array("fused_attn", "softmax_offset", softmax_offset)
    q, k, v = _unpacked(qkv, qkv_layout)
    heads = q.shape[2]
    full = (q.shape[0], heads, q.shape[1], k.shape[1])
    reasons = [
        *_layout_reasons(q, k, qkv_layout),
        *_mask_reasons(sequence_descriptor, attn_mask_type, qkv_layout),
        *_bias_reasons(bias, attn_bias_type, full),
        *_offset_reasons(softmax_offset, softmax_type, heads),
    ]
    if max_segments_per_seq < 1:
        reasons.append(f"max_segments_per_seq must be at least 1; got {max_segments_per_seq}")
    if context_parallel_axis:
        reasons.append(f"context_parallel_axis={context_parallel_axis!r}: the sequence cannot be sharded")
    if reasons:
        raise ValueError(f"fused_attn: {'; '.join(reasons)}")
    if softmax_offset is not None and softmax_offset.dtype != jnp.float32:
        raise TypeError(f"fused_attn: softmax_offset must be float32; got {softmax_offset.dtype.name}")
    rows = _rows(sequence_descriptor, q, k, max_segments_per_seq)
    additive = _additive(bias, attn_bias_type, attn_mask_type, scaling_factor, rows, full)
    left, right = (None if side is None or side < 0 else side for side in window_size or (None, None))
    dropout = dropout_probability if is_training else 0.0
    out = attention(
        *(jnp.swapaxes(array, 1, 2) for array in rows.split(q, k, v)),
        causal=attn_mask_type.is_causal(),
        scale=scaling_factor,
        kv_lengths=rows.key_lengths,
        q_start=rows.q_start(attn_mask_type) if attn_mask_type.is_causal() or (left, right) != (None, None) else None,
        window=None if (left, right) == (None, None) else (left, right),
        sinks=_sinks(softmax_offset, softmax_type, heads),
        bias=additive,
        dropout_p=dropout,
        dropout_seed=None if dropout == 0.0 else seed,
        contract=contract,
        engine=engine,
    )
    assert isinstance(out, jax.Array)
    return rows.join(jnp.swapaxes(out, 1, 2))


@dataclass(frozen=True)
class _Rows:
    """The rows of one call: whole sequences, sequences of given lengths, or segments. Lengths are int32, one a batch item.

    ``lost`` bool [B], with lengths: they do not fit the arrays. The queries of such a sequence are NaN, as its output is: no gradient of
    the sums that it enters looks sound.
    """

    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    packings: tuple[Packing, Packing] | None = None
    lost: jax.Array | None = None

    def split(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.packings is not None:
            queries, keys = self.packings
            return queries.split(q), keys.split(k), keys.split(v)
        return self._kept(q), k, v

    def join(self, out: jax.Array) -> jax.Array:
        if self.packings is not None:
            lost = self.packings[0].lost | self.packings[1].lost
            return spoil(self.packings[0].join(out), lost)
        return self._kept(out)

    def _kept(self, rows: jax.Array) -> jax.Array:
        if self.query_lengths is None or self.lost is None:
            return rows
        return spoil(keep_rows(rows, self.query_lengths), self.lost)

    def q_start(self, mask: AttnMaskType) -> int | jax.Array | None:
        """Position of query 0 among the keys; None is ``attention``'s own bottom-right."""
        if not mask.is_bottom_right():
            return 0
        return None if self.query_lengths is None or self.key_lengths is None else self.key_lengths - self.query_lengths

    def bias(self, bias: jax.Array, batch: int, heads: int) -> jax.Array:
        """[B|1, H|1, S, T] for the batch items of this call.

        Where sequences share it, so do heads no longer: dbias is one sum over both, not one over sequences of sums over heads.
        """
        if self.packings is None:
            return bias
        queries, keys = self.packings
        if bias.shape[0] != batch:
            bias = broadcast(bias, (batch, heads, *bias.shape[2:]))
        rows = queries.split(jnp.swapaxes(bias, 1, 2))  # [items, S, H|1, T]
        return jnp.transpose(keys.pick(jnp.moveaxis(rows, 3, 1)), (0, 3, 2, 1))


def _rows(descriptor: SequenceDescriptor | None, q: jax.Array, k: jax.Array, segments: int) -> _Rows:
    if descriptor is None:
        return _Rows()
    sizes = (q.shape[1], k.shape[1])
    descriptor = descriptor.checked()
    lengths = descriptor.lengths(q.shape[0], sizes)
    if lengths is not None:
        (queries, no_queries), (keys, no_keys) = (fitted(*pair) for pair in zip(lengths, sizes, strict=True))
        return _Rows(queries, keys, lost=no_queries | no_keys)
    packings = descriptor.packing(q.shape[0], sizes, segments)
    return _Rows(packings[0].lengths.reshape(-1), packings[1].lengths.reshape(-1), packings)


def _unpacked(qkv: tuple[jax.Array, ...], layout: QKVLayout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, S, H, D], k [B, T, K, D] and v [B, T, K, V]."""
    packed = (3,) if layout.is_qkvpacked() else (None, 2) if layout.is_kvpacked() else (None, None, None)
    shapes = [list(array.shape) for array in qkv]
    fits = len(qkv) == len(packed) and all(
        array.ndim == (4 if size is None else 5) and (size is None or array.shape[2] == size)
        for array, size in zip(qkv, packed, strict=True)
    )
    if not fits:
        expected = {1: "[B, S, 3, H, D]", 2: "[B, S, H, D] and [B, T, 2, K, D]", 3: "[B, S, H, D], [B, T, K, D] and [B, T, K, V]"}
        raise ValueError(f"fused_attn: {layout.name} needs {expected[len(packed)]}; got shapes {shapes}")
    if layout.is_qkvpacked():
        return qkv[0][:, :, 0], qkv[0][:, :, 1], qkv[0][:, :, 2]
    if layout.is_kvpacked():
        return qkv[0], qkv[1][:, :, 0], qkv[1][:, :, 1]
    return qkv[0], qkv[1], qkv[2]


def _is_window(window: Any) -> bool:
    return isinstance(window, tuple | list) and len(window) == 2 and all(side is None or is_integer(side) for side in window)


def _layout_reasons(q: jax.Array, k: jax.Array, layout: QKVLayout) -> list[str]:
    if q.shape[2] < 1:
        return [f"there must be at least one query head; got q of shape {list(q.shape)}"]
    if layout.is_qkvpacked() or (q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        return []
    return [f"q {list(q.shape)} and k {list(k.shape)} must share the batch and the head dim"]


def _mask_reasons(descriptor: SequenceDescriptor | None, mask: AttnMaskType, layout: QKVLayout) -> list[str]:
    if descriptor is not None and not isinstance(descriptor, SequenceDescriptor):
        raise TypeError(f"fused_attn: sequence_descriptor must be a SequenceDescriptor or None; got {type(descriptor).__name__}")
    reasons = []
    if mask.is_padding() and descriptor is None:
        reasons.append(f"{mask.name} needs a sequence_descriptor")
    if descriptor is not None and not mask.is_padding():
        reasons.append(f"a sequence_descriptor needs a padding mask; got {mask.name}")
    if layout.is_thd() and not mask.is_padding():
        reasons.append(f"{layout.name} needs a padding mask; got {mask.name}")
    return reasons


def _bias_reasons(bias: jax.Array | None, kind: AttnBiasType, full: tuple[int, int, int, int]) -> list[str]:
    if kind in (AttnBiasType.NO_BIAS, AttnBiasType.ALIBI):
        return [] if bias is None else [f"{kind.name} takes no bias"]
    if bias is None:
        return [f"{kind.name} needs a bias"]
    batch, heads, queries, keys = full
    shapes = [(1, heads, queries, keys), (batch, 1, queries, keys), full, (1, 1, queries, keys)]
    if bias.shape in shapes:
        return []
    return [f"bias must have shape 1HSS, B1SS, BHSS or 11SS of {list(full)}; got {list(bias.shape)}"]


def _offset_reasons(offset: jax.Array | None, kind: AttnSoftmaxType, heads: int) -> list[str]:
    if kind is not AttnSoftmaxType.LEARNABLE_SOFTMAX:
        return [] if offset is None else [f"{kind.name} takes no softmax_offset"]
    if offset is None:
        return [f"{kind.name} needs a softmax_offset [1, H, 1, 1]"]
    return [] if offset.shape == (1, heads, 1, 1) else [f"softmax_offset must have shape {[1, heads, 1, 1]}; got {list(offset.shape)}"]


def _additive(
    bias: jax.Array | None, kind: AttnBiasType, mask: AttnMaskType, scale: float, rows: _Rows, full: tuple[int, int, int, int]
) -> jax.Array | None:
    """The bias that ``attention`` adds to scaled scores."""
    batch, heads, queries, keys = full
    if kind is AttnBiasType.ALIBI:
        shift = rows.q_start(mask)
        return alibi(heads, queries, keys, jnp.reshape(jnp.asarray(keys - queries if shift is None else shift, jnp.int32), (-1,)))
    if bias is None:
        return None
    if kind is AttnBiasType.PRE_SCALE_BIAS:
        bias = bias.astype(jnp.float32) * jnp.float32(scale)
    return rows.bias(bias.astype(jnp.float32) if rows.packings is not None else bias, batch, heads)


def _sinks(offset: jax.Array | None, kind: AttnSoftmaxType, heads: int) -> jax.Array | None:
    """Logits [H] of the sink: none, 0 (which adds 1 to the denominator), or the learnable ones."""
    if kind is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX:
        return jnp.zeros(heads, jnp.float32)
    return None if offset is None else offset.reshape(heads)
