"""``MaxTextAttention``: a callable with the signature of MaxText's attention operator, lowered onto ``fused_attn``."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax_rocm_sink._arrays import as_array, integer_array, is_integer, is_real
from attn_jax_rocm_sink._attention_types import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from attn_jax_rocm_sink._fused_attn import fused_attn
from attn_jax_rocm_sink._sequence_descriptor import SequenceDescriptor

__all__ = ["MaxTextAttention"]

_NAME = "MaxTextAttention"
_KINDS = ("global", "local_sliding", "full")


@dataclass(frozen=True, kw_only=True)
class MaxTextAttention:
    """One layer's attention; put it where MaxText's layers hold their ``AttentionOp``.

    ``attention_type`` is "global" (causal), "local_sliding" (causal, the last ``sliding_window_size`` keys, the query's own among them) or
    "full", as a string or MaxText's enumeration. ``scale`` is 1, since MaxText's layers scale the query. A packed row may hold
    ``max_segments_per_seq`` segments (MaxText's setting of that name).

    Source: ``AttentionOp`` in MaxText's ``layers/attention_op.py``.
    """

    attention_type: Any = "global"
    sliding_window_size: int | None = None
    max_segments_per_seq: int = 1
    scale: float = 1.0
    contract: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        if self._kind not in _KINDS:
            raise ValueError(f"MaxTextAttention: attention_type {self._kind!r} is not supported; supported: {', '.join(_KINDS)}")
        if (self._kind == "local_sliding") != (self.sliding_window_size is not None):
            raise ValueError(
                f"MaxTextAttention: sliding_window_size goes with local_sliding; got {self.sliding_window_size} for {self._kind}"
            )
        size = self.sliding_window_size
        if size is not None and not (is_integer(size) and size >= 1):
            raise ValueError(f"MaxTextAttention: sliding_window_size must be an integer of at least 1; got {size}")
        if not (is_integer(self.max_segments_per_seq) and self.max_segments_per_seq >= 1):
            raise ValueError(f"MaxTextAttention: max_segments_per_seq must be an integer of at least 1; got {self.max_segments_per_seq!r}")
        if not is_real(self.scale):
            raise TypeError(f"MaxTextAttention: scale must be a number; got {self.scale!r}")

    @property
    def _kind(self) -> str:
        return str(getattr(self.attention_type, "value", self.attention_type))

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: jax.Array | None,
        inputs_positions: jax.Array | None,
        model_mode: str,
        cached_values: Any = None,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        sinks: jax.Array | None = None,
        indexer_mask: Any = None,
        compressed_mask: Any = None,
        compressed_kv: Any = None,
        slot: int | None = None,
        record_max_logits: bool = False,
        decoder_segment_ids_kv: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of one layer, gradients included.

        Args:
            query: [B, S, H, D]; key and value: [B, S, K, D].
            decoder_segment_ids: int [B, S], 0 for padding, or None. A query sees keys of its own segment; rows of padding are 0.
            inputs_positions: int [B, S] or None. As in MaxText's own dot-product attention the order of the rows decides what is earlier,
                so positions must grow by 1 from row to row of a segment (without segment ids: of the whole sequence). Known ones that do
                not are an error; a sequence of traced ones that do not is NaN.
            model_mode: "train", or "prefill", where key, value and segment ids come from ``cached_values``.
            cached_values: in prefill ``((key, value, decoder_segment_ids), None)``.
            sinks: [H] logits in float32, bfloat16 or float16.
            decoder_segment_ids_kv: segment ids of the keys where they differ.

        Raises:
            ValueError: a mode, cache or mask that this operator does not have; nothing is ignored. Segment ids or positions beyond int32.
            TypeError: segment ids or positions that are no integers; sinks of another dtype (ValueError: of another shape).
        """
        if model_mode == "prefill" and cached_values is not None:
            (key, value, decoder_segment_ids), cached_values = _cache(cached_values)
        elif model_mode != "train":
            raise ValueError(f"MaxTextAttention: model_mode must be train, or prefill with its cached_values; got {model_mode!r}")
        refused = {
            "cached_values": cached_values,
            "previous_chunk": previous_chunk,
            "bidirectional_mask": bidirectional_mask,
            "indexer_mask": indexer_mask,
            "compressed_mask": compressed_mask,
            "compressed_kv": compressed_kv,
            "slot": slot,
            "record_max_logits": record_max_logits or None,
        }
        given = [name for name, argument in refused.items() if argument is not None]
        if given:
            raise ValueError(f"MaxTextAttention: {', '.join(given)} cannot be honoured in {model_mode}")
        query, key, value = (as_array(_NAME, name, array) for name, array in (("query", query), ("key", key), ("value", value)))
        if query.ndim != 4:
            raise ValueError(f"MaxTextAttention: query must have 4 axes [B, S, H, D]; got shape {list(query.shape)}")
        if decoder_segment_ids is not None:
            decoder_segment_ids = integer_array(_NAME, "decoder_segment_ids", decoder_segment_ids)
        ids_of_keys = decoder_segment_ids if decoder_segment_ids_kv is None else decoder_segment_ids_kv
        descriptor: SequenceDescriptor | None = None
        if decoder_segment_ids is not None and ids_of_keys is not None:
            descriptor = SequenceDescriptor.from_segment_ids_and_pos((decoder_segment_ids, ids_of_keys))
        elif ids_of_keys is not None:
            raise ValueError("MaxTextAttention: decoder_segment_ids_kv needs decoder_segment_ids")
        in_order = None if inputs_positions is None else _in_row_order(inputs_positions, decoder_segment_ids, query.shape[:2])
        out = fused_attn(
            (query, key, value),
            None,
            descriptor,
            None,
            AttnBiasType.NO_BIAS,
            _MASKS[self._kind != "full", descriptor is not None],
            QKVLayout.BSHD_BSHD_BSHD if descriptor is None else QKVLayout.THD_THD_THD,
            AttnSoftmaxType.VANILLA_SOFTMAX if sinks is None else AttnSoftmaxType.LEARNABLE_SOFTMAX,
            self.scale,
            0.0,
            True,
            self.max_segments_per_seq,
            None if self.sliding_window_size is None else (self.sliding_window_size - 1, 0),
            softmax_offset=None if sinks is None else _offset(sinks, query.shape[2]),
            contract=self.contract,
            engine=self.engine,
        )
        return out if in_order is None else jnp.where(in_order[:, None, None, None], out, jnp.nan)


def _offset(sinks: jax.Array, heads: int) -> jax.Array:
    """``fused_attn``'s softmax_offset [1, H, 1, 1] of ``sinks`` [H]. TypeError for another dtype, ValueError for another shape."""
    given = getattr(sinks, "dtype", None)  # jnp.asarray would narrow 64 bits
    sinks = as_array(_NAME, "sinks", sinks)
    dtype = sinks.dtype if given is None else given
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"MaxTextAttention: sinks must be float32, bfloat16 or float16; got {dtype.name}")
    if sinks.shape != (heads,):
        raise ValueError(f"MaxTextAttention: sinks must have shape [H] = [{heads}]; got {list(sinks.shape)}")
    return sinks.astype(jnp.float32).reshape(1, heads, 1, 1)


def _cache(cached: Any) -> tuple[tuple[Any, Any, Any], Any]:
    """``((key, value, decoder_segment_ids), rest)`` of prefill's ``cached_values``."""
    if not (isinstance(cached, tuple | list) and len(cached) == 2 and isinstance(cached[0], tuple | list) and len(cached[0]) == 3):
        raise ValueError(
            f"MaxTextAttention: cached_values of prefill must be ((key, value, decoder_segment_ids), None); got {reprlib.repr(cached)}"
        )
    key, value, ids = cached[0]
    return (key, value, ids), cached[1]


def _in_row_order(positions: jax.Array, ids: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """bool [B]: whether positions grow by 1 between neighbouring rows of one segment; None where all are known to.

    Raises ValueError for known ones that do not or that int32 does not hold, and for another shape; TypeError for another dtype.
    """
    positions = integer_array(_NAME, "inputs_positions", positions)
    if positions.shape != tuple(shape):
        raise ValueError(f"MaxTextAttention: inputs_positions must have shape [B, S] = {list(shape)}; got {list(positions.shape)}")
    grows = positions[:, 1:] - positions[:, :-1] == 1
    if ids is not None:
        grows |= (ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] == 0)
    ordered = grows.all(1)
    if isinstance(ordered, jax.core.Tracer):
        return ordered
    if not ordered.all():
        raise ValueError(
            "MaxTextAttention: inputs_positions must grow by 1 from row to row of a segment: the order of the rows decides what is "
            "earlier; packed sequences need decoder_segment_ids"
        )
    return None


_MASKS = {
    (False, False): AttnMaskType.NO_MASK,
    (False, True): AttnMaskType.PADDING_MASK,
    (True, False): AttnMaskType.CAUSAL_MASK,
    (True, True): AttnMaskType.PADDING_CAUSAL_MASK,
}
"""By whether attention is causal, and whether there are segments."""
