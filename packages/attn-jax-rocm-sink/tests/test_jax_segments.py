"""Packed sequences: each segment has the bytes of the segment alone, in output and gradients; padding is 0; nothing crosses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, fused_attn
from attn_spec import Call
from attn_spec._errors import ContractViolation
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_bytes, assert_zero
from jax_calls import bits
from jax_plain_attention import plain_attention

B, S, T, H, K, D = 2, 10, 12, 4, 2, 5
SCALE = 0.4
RNG = np.random.default_rng(0)
Q, KEY, VALUE, WEIGHT = (RNG.standard_normal((B, rows, heads, D)).astype(np.float32) for rows, heads in ((S, H), (T, K), (T, K), (S, H)))
SINKS = np.array([2.0, -8.0, 20.0, 0.5], np.float32)
# Row 0: a segment, one without keys, then padding; row 1: a segment without queries, padding, and another one.
LENGTHS_Q, STARTS_Q = np.array([[3, 4, -1], [0, 5, -1]]), np.array([[0, 3, -1], [0, 4, -1]])
LENGTHS_K, STARTS_K = np.array([[5, 0, -1], [2, 8, -1]]), np.array([[0, 7, -1], [0, 2, -1]])


def ids_of(lengths: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    ids = np.zeros((B, size), np.int32)
    for row, segment in np.ndindex(B, 2):
        start = starts[row, segment]
        ids[row, start : start + lengths[row, segment]] = segment + 1
    return ids


IDS = (ids_of(LENGTHS_Q, STARTS_Q, S), ids_of(LENGTHS_K, STARTS_K, T))
BY_LENGTHS = SequenceDescriptor.from_seqlens_and_offsets((LENGTHS_Q, LENGTHS_K), (STARTS_Q, STARTS_K))
BY_IDS = SequenceDescriptor.from_segment_ids_and_pos(IDS)
BOTTOM_RIGHT = AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK


def packed(
    arrays: dict[str, Any],
    descriptor: SequenceDescriptor,
    mask: AttnMaskType = BOTTOM_RIGHT,
    segments: int = 3,
    window: tuple[int, int] | None = None,
    bias: Any = None,
    kind: AttnBiasType = AttnBiasType.NO_BIAS,
    dropout: float = 0.0,
) -> jax.Array:
    options = (kind, mask, QKVLayout.THD_THD_THD, AttnSoftmaxType.LEARNABLE_SOFTMAX, SCALE, dropout, True, segments)
    offset = jnp.asarray(arrays["sinks"]).reshape(1, H, 1, 1)
    seed = 7 if dropout else None
    qkv = tuple(jnp.asarray(arrays[name]) for name in ("q", "k", "v"))
    return fused_attn(qkv, bias, descriptor, seed, *options, window_size=window, softmax_offset=offset)


def gradients(descriptor: SequenceDescriptor, arrays: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Output and every gradient under jit; the descriptor is traced."""

    @jax.jit
    def run(arrays: dict[str, Any], descriptor: SequenceDescriptor) -> Any:
        out, pullback = jax.vjp(lambda moving: packed(moving, descriptor, **options), arrays)
        return out, pullback(jnp.asarray(WEIGHT))[0]

    out, found = run(arrays, descriptor)
    return {"out": bits(out)} | {f"d{name}": bits(value) for name, value in found.items()}


def forward(arrays: dict[str, Any], descriptor: SequenceDescriptor, **options: Any) -> np.ndarray:
    """The output under jit; the descriptor is traced."""
    return bits(jax.jit(lambda arrays, descriptor: packed(arrays, descriptor, **options))(arrays, descriptor))


def arrays() -> dict[str, np.ndarray]:
    return {"q": Q, "k": KEY, "v": VALUE, "sinks": SINKS}


def varlen(**options: Any) -> dict[str, np.ndarray]:
    """The reference on the same rows, as one packed sequence of padded segments."""

    def offsets(starts: np.ndarray, size: int) -> np.ndarray:
        return np.array([*(starts[:, :2] + size * np.arange(B)[:, None]).ravel(), B * size], np.int32)

    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in {"q": Q, "k": KEY, "v": VALUE, "out": WEIGHT}.items()}
    call = Call(
        "attention_varlen",
        {name: flat[name] for name in ("q", "k", "v")}
        | {"cu_seqlens_q": offsets(STARTS_Q, S), "cu_seqlens_k": offsets(STARTS_K, T), "sinks": SINKS}
        | {"seqlens_q": LENGTHS_Q[:, :2].astype(np.int32).ravel(), "seqlens_k": LENGTHS_K[:, :2].astype(np.int32).ravel()},
        {"scale": SCALE, **options},
        {"out": flat["out"]},
        ("q", "k", "v", "sinks"),
    )
    found = get_backend("attn_reference").evaluate(call, engine="host")
    shapes = {"out": WEIGHT.shape, "dq": Q.shape, "dk": KEY.shape, "dv": VALUE.shape, "dsinks": SINKS.shape}
    return {name: found[name].reshape(shape) for name, shape in shapes.items()}


def assert_all(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        assert np.abs(value).max() > 0
        assert_bytes(found[name], value, name)


@pytest.mark.parametrize("descriptor", [BY_LENGTHS, BY_IDS], ids=["lengths", "ids"])
def test_each_segment_has_the_bytes_of_the_segment_alone(descriptor: SequenceDescriptor) -> None:
    assert_all(gradients(descriptor, arrays(), window=(6, 0)), varlen(causal=True, window=(6, 0)))


def test_vmap_and_checkpoint_move_no_bit() -> None:
    """Two batches at once, and a recomputed forward, give the output and gradients of one call each."""
    flipped = arrays() | {"q": Q[::-1].copy(), "sinks": SINKS[::-1].copy()}
    both = {name: jnp.stack([arrays()[name], flipped[name]]) for name in flipped}

    def loss(moving: dict[str, Any]) -> jax.Array:
        return (jax.checkpoint(lambda moving: packed(moving, BY_IDS))(moving) * WEIGHT).sum()

    mapped = jax.jit(jax.vmap(jax.grad(loss)))(both)
    for index, item in enumerate((arrays(), flipped)):
        expected = gradients(BY_IDS, item)
        for name in item:
            assert_bytes(bits(mapped[name][index]), expected[f"d{name}"], name)


def test_64_bit_mode_moves_no_bit() -> None:
    expected = gradients(BY_IDS, arrays(), window=(6, 0))
    with jax.enable_x64(True):
        wide = SequenceDescriptor.from_segment_ids_and_pos((IDS[0].astype(np.int64), IDS[1].astype(np.int64)))
        assert wide.segment_ids is not None and wide.segment_ids[0].dtype == np.int64
        assert_all(gradients(wide, arrays(), window=(6, 0)), expected)


def test_segments_without_a_causal_mask() -> None:
    found = gradients(BY_LENGTHS, arrays(), mask=AttnMaskType.PADDING_MASK)
    assert_all(found, varlen(causal=False))
    with pytest.raises(ContractViolation):
        assert_all(found, varlen(causal=True))
    for name, used in (("out", IDS[0]), ("dq", IDS[0]), ("dk", IDS[1]), ("dv", IDS[1])):
        assert_zero(found[name][used == 0], f"{name} of padding")


def test_dropout_counts_segments() -> None:
    """The mask of segment n is that of batch item n: two slots a row here, as the reference counts them."""
    pairs = SequenceDescriptor.from_seqlens_and_offsets((LENGTHS_Q[:, :2], LENGTHS_K[:, :2]), (STARTS_Q[:, :2], STARTS_K[:, :2]))
    assert_all(gradients(pairs, arrays(), segments=2, dropout=0.5), varlen(causal=True, dropout_p=0.5, dropout_seed=7))


def test_padding_and_other_segments_may_hold_anything() -> None:
    clean = gradients(BY_IDS, arrays())
    dirty = {name: array.copy() for name, array in arrays().items()}
    dirty["q"][IDS[0] == 0] = dirty["k"][IDS[1] == 0] = dirty["v"][IDS[1] == 0] = np.nan
    assert_all(gradients(BY_IDS, dirty), clean)
    # A NaN inside one segment spoils that segment's rows and nothing else.
    dirty["v"][0][IDS[1][0] == 1] = np.nan
    spoiled = gradients(BY_IDS, dirty)
    other = np.ones((B, S), bool)
    other[0] = IDS[0][0] != 1
    assert_bytes(spoiled["out"][other], clean["out"][other], "other segments")
    assert np.isnan(spoiled["out"][0][IDS[0][0] == 1][-1]).all()


def test_positions_place_the_rows_of_a_segment() -> None:
    """Rows in another order, with positions that say so, give the same rows in that order."""
    order = np.random.default_rng(3).permutation(S)
    positions = np.zeros((B, S), np.int32)
    for row, segment in np.ndindex(B, 2):
        own = np.flatnonzero(IDS[0][row] == segment + 1)
        positions[row, own] = np.arange(len(own))
    shuffled = arrays() | {"q": Q[:, order]}
    own_keys = np.where(IDS[1] > 0, np.arange(T) - np.where(IDS[1] == 1, STARTS_K[:, :1], STARTS_K[:, 1:2]), 0)
    descriptor = SequenceDescriptor.from_segment_ids_and_pos((IDS[0][:, order], IDS[1]), (positions[:, order], own_keys))
    assert_bytes(forward(shuffled, descriptor), forward(arrays(), BY_IDS)[:, order], "shuffled rows")


def test_biases_follow_their_rows() -> None:
    """A bias [1, H, S, T] of packed rows, and ALiBi of each segment's own positions, against a few lines of jax.numpy."""
    visible = ((IDS[0][:, :, None] == IDS[1][:, None]) & (IDS[0][:, :, None] > 0))[:, None]
    bias = jnp.asarray(np.random.default_rng(4).standard_normal((1, H, S, T)), jnp.float32)

    @jax.jit
    def ours(bias: jax.Array) -> Any:
        options = {"mask": AttnMaskType.PADDING_MASK, "kind": AttnBiasType.POST_SCALE_BIAS}
        out, pullback = jax.vjp(lambda bias: packed(arrays(), BY_LENGTHS, bias=bias, **options), bias)
        return out, pullback(jnp.asarray(WEIGHT))[0]

    def plain(bias: jax.Array) -> jax.Array:
        return plain_attention(jnp.asarray(Q), jnp.asarray(KEY), jnp.asarray(VALUE), visible, SCALE, bias, jnp.asarray(SINKS))

    expected, pullback = jax.vjp(plain, bias)
    out, dbias = ours(bias)
    np.testing.assert_allclose(np.asarray(out), np.asarray(expected), atol=2e-6)
    np.testing.assert_allclose(np.asarray(dbias), np.asarray(pullback(jnp.asarray(WEIGHT))[0]), atol=2e-6)
    assert_zero(bits(dbias)[0][:, ~visible[:, 0].any(0)], "pairs of no segment")

    place = [
        np.where(ids > 0, np.arange(ids.shape[1]) - np.where(ids == 1, starts[:, :1], starts[:, 1:2]), 0)
        for ids, starts in ((IDS[0], STARTS_Q), (IDS[1], STARTS_K))
    ]
    slopes = jnp.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    alibi = forward(arrays(), BY_LENGTHS, mask=AttnMaskType.PADDING_MASK, kind=AttnBiasType.ALIBI)
    distance = np.abs(place[0][:, :, None] - place[1][:, None])[:, None]
    np.testing.assert_allclose(np.asarray(alibi), np.asarray(plain(-slopes * distance)), atol=2e-6)
    assert np.abs(np.asarray(alibi) - np.asarray(plain(jnp.zeros(())))).max() > 1e-2


def test_packed_arrays_of_segments() -> None:
    ids = SequenceDescriptor.from_segment_ids_and_pos(IDS[0])
    qkv = jnp.stack([jnp.asarray(Q), jnp.asarray(Q) + 1.0, jnp.asarray(Q) - 1.0], 2)
    middle = (AttnBiasType.NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK)
    tail = (AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, SCALE, 0.0, True, 2)

    @jax.jit
    def layouts(qkv: jax.Array) -> list[jax.Array]:
        forms = {
            QKVLayout.THD_THD_THD: tuple(qkv[:, :, part] for part in range(3)),
            QKVLayout.THD_T2HD: (qkv[:, :, 0], qkv[:, :, 1:]),
            QKVLayout.T3HD: (qkv,),
        }
        return [fused_attn(form, None, ids, None, *middle, layout, *tail) for layout, form in forms.items()]

    separate, halves, whole = layouts(qkv)
    assert_bytes(bits(whole), bits(separate), "T3HD")
    assert_bytes(bits(halves), bits(separate), "THD_T2HD")


def test_too_many_segments_are_an_error_or_nan() -> None:
    with pytest.raises(ValueError, match="segments beyond max_segments_per_seq=1"):
        packed(arrays(), BY_IDS, segments=1)
    assert np.isnan(forward(arrays(), BY_LENGTHS, segments=1)).all()


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([4, 3], [0, 2]), ([3, 3], [0, 0]), ([3, 3], [0, -2]), ([3, 3], [0, 8]), ([2, -3], [0, 5])],
    ids=("overlap", "twice", "before the sequence", "past the sequence", "negative"),
)
def test_segments_that_do_not_fit_are_an_error_or_nan(lengths: list[int], starts: list[int]) -> None:
    def descriptor(lengths: Any, starts: Any) -> SequenceDescriptor:
        rows = jnp.stack([lengths, jnp.asarray([3, 2])]), jnp.stack([starts, jnp.asarray([0, 3])])
        return SequenceDescriptor.from_seqlens_and_offsets((rows[0], LENGTHS_K[:, :2]), (rows[1], STARTS_K[:, :2]))

    given = jnp.asarray(lengths), jnp.asarray(starts)
    with pytest.raises(ValueError, match=r"overlap or leave it|must lie in"):
        packed(arrays(), descriptor(*given))
    out = np.asarray(jax.jit(lambda *given: packed(arrays(), descriptor(*given)))(*given))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("engine", ["host", "xla"])
@pytest.mark.parametrize("mask", [AttnMaskType.PADDING_MASK, AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK])
@pytest.mark.parametrize("lengths", [(-1, 4), (S + 1, 4), (4, -1), (4, T + 1), (-(2**31), T), (2**31 - 1, -(2**31))])
def test_traced_lengths_that_do_not_fit_are_nan(lengths: tuple[int, int], mask: AttnMaskType, engine: str) -> None:
    def call(queries: jax.Array, keys: jax.Array) -> jax.Array:
        descriptor = SequenceDescriptor.from_seqlens((queries, keys))
        options = (AttnBiasType.NO_BIAS, mask, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, SCALE, 0.0, True)
        return fused_attn((Q, KEY, VALUE), None, descriptor, None, *options, engine=engine)

    given = tuple(jnp.asarray([length, 4]) for length in lengths)
    out = np.asarray(jax.jit(call)(*given))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()
    with pytest.raises(ValueError, match="seqlens must lie in"):
        call(*given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SequenceDescriptor.from_seqlens(np.ones(2)), TypeError, "seqlens must be integers; got float"),
        (lambda: SequenceDescriptor.from_seqlens(np.ones((2, 2), int)), ValueError, "seqlens must have 1 axes"),
        (lambda: SequenceDescriptor.from_seqlens((LENGTHS_Q[:, 0],) * 3), ValueError, "one array or a pair"),
        (lambda: SequenceDescriptor.from_seqlens_and_offsets(LENGTHS_Q, STARTS_Q[:, :1]), ValueError, "an entry for each of seqlens"),
        (lambda: SequenceDescriptor.from_segment_ids_and_pos(IDS, IDS[0]), ValueError, "segment_pos must have the shape"),
        (
            lambda: packed(arrays(), SequenceDescriptor.from_segment_ids_and_pos(IDS[0])),
            ValueError,
            "SequenceDescriptor: segment_ids must have shape",
        ),
        (
            lambda: packed(arrays(), SequenceDescriptor.from_seqlens(np.array([11, 2]))),
            ValueError,
            r"SequenceDescriptor: seqlens must lie in \[0, 10\]",
        ),
        (lambda: packed(arrays(), SequenceDescriptor.from_seqlens(np.array([1]))), ValueError, "seqlens must have shape"),
        (lambda: packed(arrays(), SequenceDescriptor()), ValueError, "the SequenceDescriptor is empty"),
        (
            lambda: packed(arrays(), SequenceDescriptor(seqlens=(LENGTHS_Q[:, 0], None))),
            TypeError,
            "SequenceDescriptor: seqlens must be an array or what jnp.asarray makes one of; got None",
        ),
        (lambda: packed(arrays(), SequenceDescriptor(seqlens=5)), ValueError, "seqlens must have 1 axes"),
        (lambda: packed(arrays(), replace(BY_IDS, seqlens=LENGTHS_Q)), ValueError, "from_ methods gives it; got seqlens, segment_ids"),
        (lambda: packed(arrays(), replace(BY_LENGTHS, seqlens=(LENGTHS_Q + 5, LENGTHS_K))), ValueError, "must lie in"),
        (
            lambda: packed(arrays(), SequenceDescriptor.from_segment_ids_and_pos(IDS, (IDS[0], IDS[1]))),
            ValueError,
            "positions that are not",
        ),
    ],
)
def test_bad_descriptors_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
