"""``MaxTextAttention`` at GPT-OSS's sizes: 64 query and 8 kv heads of 64, sinks, layers with a window of 128 between global ones."""

from __future__ import annotations

from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import MaxTextAttention, attention
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_zero
from jax_calls import bits
from jax_plain_attention import plain_attention

H, K, D, WINDOW = 64, 8, 64, 128
S = 136
RNG = np.random.default_rng(0)
# MaxText's layers scale the query by 1/sqrt(head_dim) themselves.
Q, KEY, VALUE = (
    jnp.asarray(RNG.standard_normal((1, S, heads, D)) * factor, jnp.float32) for heads, factor in ((H, D**-0.5), (K, 1.0), (K, 1.0))
)
SINKS = jnp.asarray(RNG.standard_normal(H), jnp.float32)
# The second segment is longer than the window.
IDS = np.array([[1] * 2 + [2] * (S - 5) + [0] * 3], np.int32)


class AttentionType(Enum):
    """As MaxText names them."""

    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"


LAYERS = {
    "local": MaxTextAttention(attention_type=AttentionType.LOCAL_SLIDING, sliding_window_size=WINDOW, max_segments_per_seq=2),
    "global": MaxTextAttention(attention_type=AttentionType.GLOBAL, max_segments_per_seq=2),
}


def visible(window: int | None) -> np.ndarray:
    """MaxText's mask: earlier or equal, of the same segment, among the last ``window``; padding sees nothing here."""
    row, column, ids = np.arange(S)[:, None], np.arange(S), IDS[0]
    seen = (column <= row) & (ids[:, None] == ids) & (ids[:, None] > 0)
    return (seen if window is None else seen & (column > row - window))[None, None]


@pytest.mark.parametrize("name", LAYERS)
def test_a_gpt_oss_layer_is_close_to_its_definition(name: str) -> None:
    layer, window = LAYERS[name], WINDOW if name == "local" else None
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(Q.shape), jnp.float32)
    moving = (Q, KEY, VALUE, SINKS)

    def gradients(function: Any) -> list[np.ndarray]:
        @jax.jit
        def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
            out, pullback = jax.vjp(function, q, k, v, sinks)
            return out, *pullback(weight)

        return [bits(value) for value in run(*moving)]

    ours = gradients(lambda q, k, v, sinks: layer(q, k, v, IDS, None, "train", sinks=sinks))
    theirs = gradients(lambda q, k, v, sinks: plain_attention(q, k, v, visible(window), 1.0, sinks=sinks))
    for what, got, expected in zip(("out", "dq", "dk", "dv", "dsinks"), ours, theirs, strict=True):
        assert_close(got, expected, what, tolerance=1e-5)
    assert_zero(ours[0][0, S - 3 :], "padding")
    wrong = {
        "window": plain_attention(*moving[:3], visible(WINDOW - 1 if window else WINDOW), 1.0, sinks=SINKS),
        "sinks": plain_attention(*moving[:3], visible(window), 1.0),
    }
    for what, out in wrong.items():
        with pytest.raises(ContractViolation):
            assert_close(ours[0], np.asarray(out), what, tolerance=1e-5)


def test_without_segments_it_has_the_bytes_of_attention() -> None:
    out = LAYERS["local"](Q, KEY, VALUE, None, None, "train", sinks=SINKS.astype(jnp.bfloat16))
    q, k, v = (jnp.swapaxes(array, 1, 2) for array in (Q, KEY, VALUE))
    expected = attention(q, k, v, scale=1.0, window=(WINDOW - 1, 0), sinks=SINKS.astype(jnp.bfloat16))
    assert_bytes(bits(jnp.swapaxes(out, 1, 2)), bits(expected), "out")


def test_prefill_reads_its_cache() -> None:
    q, k, v, ids = Q[:, :8, :8], KEY[:, :8, :1], VALUE[:, :8, :1], IDS[:, :8]
    layer = LAYERS["global"]
    cached = layer(q, k, v, None, None, "prefill", ((k + 1.0, v - 1.0, ids), None))
    assert_bytes(bits(cached), bits(layer(q, k + 1.0, v - 1.0, ids, None, "train")), "prefill")


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        ("autoregressive", {}, "model_mode must be train, or prefill with its cached_values; got 'autoregressive'"),
        ("prefill", {}, "model_mode must be train, or prefill with its cached_values"),
        ("prefill", {"cached_values": (None, None)}, r"must be \(\(key, value, decoder_segment_ids\), None\); got \(None, None\)"),
        ("prefill", {"cached_values": 5}, r"cached_values of prefill must be .*; got 5"),
        ("prefill", {"cached_values": ((KEY, VALUE), None)}, "cached_values of prefill must be"),
        ("prefill", {"cached_values": ((KEY, VALUE, IDS), (KEY, VALUE, IDS, IDS))}, "cached_values cannot be honoured in prefill"),
        ("train", {"previous_chunk": KEY}, "previous_chunk cannot be honoured in train"),
        ("train", {"bidirectional_mask": IDS, "indexer_mask": IDS}, "bidirectional_mask, indexer_mask cannot be honoured"),
        ("train", {"compressed_mask": IDS, "compressed_kv": KEY}, "compressed_mask, compressed_kv cannot be honoured"),
        ("train", {"slot": 1, "record_max_logits": True}, "slot, record_max_logits cannot be honoured"),
        ("train", {"decoder_segment_ids_kv": IDS}, "decoder_segment_ids_kv needs decoder_segment_ids"),
    ],
)
def test_what_it_lacks_is_refused(mode: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LAYERS["global"](Q, KEY, VALUE, None, None, mode, **change)


def test_arrays_may_be_lists_and_nothing_else() -> None:
    q, k, v, ids = Q[:, :4, :8], KEY[:, :4, :1], VALUE[:, :4, :1], IDS[:, :4]
    layer = LAYERS["global"]
    out = layer(np.asarray(q).tolist(), k, v, ids.tolist(), None, "train", sinks=[0.0] * 8)
    assert_bytes(bits(out), bits(layer(q, k, v, ids, None, "train", sinks=jnp.zeros(8))), "out")
    given: dict[str, Any] = {"query": q, "key": k, "value": v, "decoder_segment_ids": ids, "inputs_positions": None}
    for name in (*given, "sinks"):
        with pytest.raises(TypeError, match=rf"{name} must be an array or what jnp.asarray makes one of; got 'none'"):
            layer(**{**given, name: "none"}, model_mode="train")
    with pytest.raises(ValueError, match=r"query must have 4 axes \[B, S, H, D\]"):
        layer(q[0], k, v, ids, None, "train")


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (jnp.ones((2, 4)), ValueError, r"sinks must have shape \[H\] = \[8\]; got \[2, 4\]"),
        (jnp.ones((1, 8, 1, 1)), ValueError, r"sinks must have shape \[H\] = \[8\]; got \[1, 8, 1, 1\]"),
        (jnp.ones(7), ValueError, r"sinks must have shape \[H\] = \[8\]; got \[7\]"),
        (0.5, ValueError, r"sinks must have shape \[H\] = \[8\]; got \[\]"),
        (jnp.ones(8, bool), TypeError, "sinks must be float32, bfloat16 or float16; got bool"),
        (jnp.ones(8, jnp.int32), TypeError, "sinks must be float32, bfloat16 or float16; got int32"),
        ([1] * 8, TypeError, "sinks must be float32, bfloat16 or float16; got int32"),
        (np.ones(8), TypeError, "sinks must be float32, bfloat16 or float16; got float64"),
        (jnp.ones(8) * 1j, TypeError, "sinks must be float32, bfloat16 or float16; got complex64"),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_other_sinks_are_refused_by_name(sinks: Any, error: type[Exception], message: str, traced: bool) -> None:
    q, k, v = Q[:, :4, :8], KEY[:, :4, :1], VALUE[:, :4, :1]

    def call(sinks: Any) -> jax.Array:
        return LAYERS["global"](q, k, v, None, None, "train", sinks=sinks)

    with pytest.raises(error, match=f"MaxTextAttention: {message}"):
        jax.eval_shape(call, sinks) if traced and isinstance(sinks, jax.Array) else call(sinks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sinks_of_each_dtype_are_read_as_they_are(dtype: str) -> None:
    q, k, v = Q[:, :4, :8], KEY[:, :4, :1], VALUE[:, :4, :1]
    sinks = SINKS[:8].astype(dtype)
    out = LAYERS["global"](q, k, v, None, None, "train", sinks=sinks)
    assert_bytes(bits(out), bits(LAYERS["global"](q, k, v, None, None, "train", sinks=sinks.astype(jnp.float32))), "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_type": AttentionType.CHUNK}, "attention_type 'chunk' is not supported; supported: global, local_sliding, full"),
        ({"attention_type": "local_sliding"}, "sliding_window_size goes with local_sliding; got None"),
        ({"sliding_window_size": 4}, "sliding_window_size goes with local_sliding; got 4 for global"),
        ({"attention_type": "local_sliding", "sliding_window_size": 0}, "sliding_window_size must be an integer of at least 1; got 0"),
        ({"max_segments_per_seq": "two"}, "max_segments_per_seq must be an integer of at least 1; got 'two'"),
        ({"scale": "half"}, "scale must be a number; got 'half'"),
        ({"attention_type": "local_sliding", "sliding_window_size": 2.5}, "sliding_window_size must be an integer of at least 1; got 2.5"),
    ],
)
def test_bad_layers_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        MaxTextAttention(**options)


ROWS = np.arange(S, dtype=np.int32)[None]
RESTARTED = np.where(ROWS < 2, ROWS, ROWS - 2)


@pytest.mark.parametrize(("ids", "positions"), [(None, ROWS), (None, ROWS + 5), (IDS, RESTARTED), (IDS, ROWS)])
@pytest.mark.parametrize("traced", [False, True])
def test_positions_in_row_order_move_no_bit(ids: Any, positions: np.ndarray, traced: bool) -> None:
    layer, cut = LAYERS["global"], (slice(None), slice(0, 8), slice(0, 1))
    q, k, v = Q[cut], KEY[cut], VALUE[cut]
    ids, positions = (None if ids is None else ids[:, :8]), positions[:, :8]

    def call(positions: Any) -> jax.Array:
        return layer(q, k, v, ids, positions, "train")

    out = jax.jit(call)(positions) if traced else call(positions)
    assert_bytes(bits(out), bits(call(None)), "out")


@pytest.mark.parametrize(("ids", "positions"), [(None, RESTARTED), (IDS, ROWS[:, ::-1]), (None, np.zeros_like(ROWS))])
def test_positions_that_the_rows_do_not_follow_are_noticed(ids: Any, positions: np.ndarray) -> None:
    layer, cut = LAYERS["global"], (slice(None), slice(0, 8), slice(0, 1))
    q, k, v = Q[cut], KEY[cut], VALUE[cut]
    ids, positions = (None if ids is None else ids[:, :8]), positions[:, :8]
    with pytest.raises(ValueError, match="inputs_positions must grow by 1 from row to row of a segment"):
        layer(q, k, v, ids, positions, "train")
    assert np.isnan(jax.jit(lambda positions: layer(q, k, v, ids, positions, "train"))(positions)).all()


@pytest.mark.parametrize("positions", [ROWS[0], ROWS[:, :-1]])
def test_positions_of_another_shape_are_refused(positions: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"inputs_positions must have shape \[B, S\] = \[1, 136\]"):
        LAYERS["global"](Q, KEY, VALUE, None, positions, "train")


def test_positions_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="inputs_positions must be integers; got float32"):
        LAYERS["global"](Q, KEY, VALUE, None, ROWS.astype(np.float32), "train")
