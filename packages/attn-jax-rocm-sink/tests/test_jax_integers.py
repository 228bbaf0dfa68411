"""Integers that 32 bits do not hold: an error with the value and the limits wherever they are known, and nothing that wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    MaxTextAttention,
    QKVLayout,
    SequenceDescriptor,
    attention,
    dot_product_attention,
    fused_attn,
)
from attn_jax_rocm_sink._segments import packing_of_lengths

B, S, H, D = 2, 4, 2, 8
ROWS = jnp.ones((B, S, H, D))
HEADS = jnp.ones((B, H, S, D))
WRAPS = 2**32 + 3
"""The low 32 bits are a length, id or position that would pass."""


def _of_64_bits(values: Any) -> jax.Array:
    with jax.enable_x64(True):
        return jnp.array(values, jnp.int64)


FORMS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda values: np.array(values, np.int64),
    "unsigned numpy": lambda values: np.array(values, np.uint64),
    "Python": lambda values: values,
    "x64 array": _of_64_bits,
}
LISTS = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def _named(name: str) -> Any:
    return pytest.raises(ValueError, match=rf"{name} must lie in \[-?\d+, \d+\]; got .*\b{WRAPS}\b")


def fused(descriptor: SequenceDescriptor, layout: QKVLayout = QKVLayout.THD_THD_THD, segments: int = 2) -> jax.Array:
    kinds = (AttnBiasType.NO_BIAS, AttnMaskType.PADDING_MASK, layout, AttnSoftmaxType.VANILLA_SOFTMAX)
    return fused_attn((ROWS, ROWS, ROWS), None, descriptor, None, *kinds, 1.0, 0.0, True, segments)


@LISTS
def test_fields_of_a_descriptor(form: Callable[[Any], Any]) -> None:
    with _named("seqlens"):
        SequenceDescriptor.from_seqlens(form([1, WRAPS]))
    with _named("seqlens"):
        SequenceDescriptor.from_seqlens((np.ones(B, np.int32), form([1, WRAPS])))
    ones = np.ones((B, 1), np.int32)
    with _named("seqlens"):
        SequenceDescriptor.from_seqlens_and_offsets(form([[1], [WRAPS]]), ones)
    with _named("seq_offsets"):
        SequenceDescriptor.from_seqlens_and_offsets(ones, form([[0], [WRAPS]]))
    with _named("segment_ids"):
        SequenceDescriptor.from_segment_ids_and_pos(form([[1, WRAPS]]))
    with _named("segment_pos"):
        SequenceDescriptor.from_segment_ids_and_pos(np.ones((1, 2), np.int32), form([[0, WRAPS]]))


@pytest.mark.parametrize("limit", [-(2**31), 2**31 - 1])
@LISTS
def test_the_limits_themselves_are_kept(form: Callable[[Any], Any], limit: int) -> None:
    if limit < 0 and form is FORMS["unsigned numpy"]:
        limit = 0
    queries, keys = SequenceDescriptor.from_seqlens(form([1, limit])).seqlens or ((), ())
    assert np.asarray(queries).tolist() == np.asarray(keys).tolist() == [1, limit]


@LISTS
def test_a_descriptor_that_no_method_built(form: Callable[[Any], Any]) -> None:
    lengths = form([S, WRAPS])
    with _named("seqlens"):
        fused(SequenceDescriptor(seqlens=(lengths, lengths)), QKVLayout.BSHD_BSHD_BSHD)


@LISTS
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_of_dot_product_attention(name: str, form: Callable[[Any], Any]) -> None:
    for lengths in (form([1, WRAPS]), form(WRAPS)):
        with _named(name):
            dot_product_attention(ROWS, ROWS, ROWS, **{name: lengths})


@pytest.mark.parametrize("form", [int, np.int64, np.array, _of_64_bits, lambda value: np.array([1, value])])
@pytest.mark.parametrize("name", ["kv_lengths", "q_start", "k_start"])
def test_lengths_and_starts_of_attention(name: str, form: Callable[[int], Any]) -> None:
    with pytest.raises(ValueError, match=rf"{name} must .*32 bits.*{WRAPS}|{name} must lie in \[-?\d+, \d+\]; got .*\b{WRAPS}\b"):
        attention(HEADS, HEADS, HEADS, **{name: form(WRAPS)})


@LISTS
def test_ids_and_positions_of_maxtext(form: Callable[[Any], Any]) -> None:
    positions = form([[0, 1, 2, WRAPS], [0, 1, 2, 3]])  # 3 in its low bits: the next position
    with _named("inputs_positions"):
        MaxTextAttention()(ROWS, ROWS, ROWS, None, positions, "train")
    ids = np.ones((B, S), np.int32)
    for given in ((form([[1, 1, 1, WRAPS]] * B), None), (ids, form([[1, 1, 1, WRAPS]] * B))):
        with pytest.raises(ValueError, match=rf"segment_ids must lie in \[-2147483648, 2147483647\]; got {WRAPS}"):
            MaxTextAttention(max_segments_per_seq=3)(ROWS, ROWS, ROWS, given[0], None, "train", decoder_segment_ids_kv=given[1])


def test_windows_and_segments() -> None:
    with pytest.raises(ValueError, match=rf"window sides must be at most 2\*\*31 - 1 .*; got \({WRAPS}, {WRAPS}\)"):
        dot_product_attention(ROWS, ROWS, ROWS, local_window_size=WRAPS)
    with pytest.raises(ValueError, match="window sides must be at most"):
        MaxTextAttention(attention_type="local_sliding", sliding_window_size=WRAPS)(ROWS, ROWS, ROWS, None, None, "train")
    with pytest.raises(ValueError, match=f"max_segments_per_seq={2**30} sequences of 4 rows are too many; supported: {2**31 - 1} rows"):
        fused(SequenceDescriptor.from_segment_ids_and_pos(np.ones((B, S), np.int32)), segments=2**30)


def test_traced_ones_of_64_bits_lose_their_sequence() -> None:
    """No bit of them is cut off before they are compared; the sequence beside them is sound."""

    def lost(lengths: jax.Array, starts: jax.Array) -> jax.Array:
        return packing_of_lengths(lengths, starts, 2, S).lost

    with jax.enable_x64(True):
        zeros = jnp.zeros((2, 1), jnp.int64)
        assert jax.jit(lost)(jnp.array([[2**32], [2]]), zeros).tolist() == [True, False]
        assert jax.jit(lost)(jnp.array([[2**32 + 1], [2]]), zeros).tolist() == [True, False]
        assert jax.jit(lost)(jnp.array([[2], [2]]), jnp.array([[2**32], [0]])).tolist() == [True, False]
        out = jax.jit(lambda lengths: fused(SequenceDescriptor.from_seqlens(lengths), QKVLayout.BSHD_BSHD_BSHD))(jnp.array([2**32, 2]))
    assert jnp.isnan(out[0]).all() and jnp.isfinite(out[1]).all()
