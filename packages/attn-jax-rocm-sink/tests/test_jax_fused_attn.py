"""``fused_attn``: softmax types, biases, masks, windows and layouts against a few lines of jax.numpy, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, attention, fused_attn
from attn_jax_rocm_sink._bias import alibi_slopes
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_zero
from jax_calls import bits
from jax_plain_attention import plain_attention

B, S, T, H, K, D, V = 2, 6, 8, 4, 2, 5, 3
SCALE = 0.4
RNG = np.random.default_rng(0)
Q, KEY, VALUE = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((B, S, H, D), (B, T, K, D), (B, T, K, V)))
WEIGHT = jnp.asarray(RNG.standard_normal((B, S, H, V)), jnp.float32)
OFFSET = jnp.array([2.0, -8.0, 20.0, 0.5]).reshape(1, H, 1, 1)
LENGTHS = (np.array([4, 6]), np.array([7, 3]))
NONE, PRE, POST, ALIBI = AttnBiasType.NO_BIAS, AttnBiasType.PRE_SCALE_BIAS, AttnBiasType.POST_SCALE_BIAS, AttnBiasType.ALIBI
MASK = AttnMaskType
VANILLA, OFF_BY_ONE, LEARNABLE = AttnSoftmaxType.VANILLA_SOFTMAX, AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, AttnSoftmaxType.LEARNABLE_SOFTMAX
SEPARATE = QKVLayout.BSHD_BSHD_BSHD

CASES: list[tuple[AttnMaskType, AttnSoftmaxType, AttnBiasType, tuple[int, ...], tuple[int, int] | None]] = [
    (MASK.NO_MASK, VANILLA, NONE, (), (2, 1)),
    (MASK.NO_MASK, OFF_BY_ONE, POST, (1, H, S, T), None),
    (MASK.PADDING_MASK, LEARNABLE, POST, (B, H, S, T), (3, -1)),
    (MASK.CAUSAL_MASK, LEARNABLE, PRE, (B, 1, S, T), (2, 0)),
    (MASK.PADDING_CAUSAL_MASK, LEARNABLE, NONE, (), (1, 0)),
    (MASK.PADDING_CAUSAL_MASK, OFF_BY_ONE, ALIBI, (), None),
    (MASK.CAUSAL_BOTTOM_RIGHT_MASK, LEARNABLE, ALIBI, (), (3, 0)),
    (MASK.PADDING_CAUSAL_BOTTOM_RIGHT_MASK, LEARNABLE, PRE, (1, 1, S, T), (4, 2)),
    (MASK.PADDING_CAUSAL_BOTTOM_RIGHT_MASK, VANILLA, ALIBI, (), None),
]


def run(moving: dict[str, jax.Array], function: Any) -> dict[str, np.ndarray]:
    """Output and the gradients of ``moving`` under jit."""

    @jax.jit
    def both(moving: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, pullback = jax.vjp(lambda moving: function(**moving), moving)
        return out, pullback(WEIGHT)[0]

    out, gradients = both(moving)
    return {"out": bits(out)} | {f"d{name}": bits(value) for name, value in gradients.items()}


def fused(mask: AttnMaskType, softmax: AttnSoftmaxType, kind: AttnBiasType, window: tuple[int, int] | None, **more: Any) -> Any:
    descriptor = SequenceDescriptor.from_seqlens(LENGTHS) if mask.is_padding() else None

    def function(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, offset: jax.Array | None = None) -> jax.Array:
        options = {"window_size": window, "softmax_offset": offset, **more}
        return fused_attn((q, k, v), bias, descriptor, None, kind, mask, SEPARATE, softmax, SCALE, 0.0, True, **options)

    return function


def shifts(mask: AttnMaskType) -> np.ndarray:
    """Key beside query 0 for each batch item."""
    if not mask.is_bottom_right():
        return np.zeros(B, int)
    return LENGTHS[1] - LENGTHS[0] if mask.is_padding() else np.full(B, T - S)


def visible(mask: AttnMaskType, window: tuple[int, int] | None) -> np.ndarray:
    """bool [B, 1, S, T], from the definition of each mask."""
    i, j = np.arange(S)[:, None], np.arange(T)
    ahead = shifts(mask)[:, None, None] + i - j
    seen = np.ones((B, S, T), bool)
    if mask.is_padding():
        seen &= (i < LENGTHS[0][:, None, None]) & (j < LENGTHS[1][:, None, None])
    if mask.is_causal():
        seen &= ahead >= 0
    left, right = window or (-1, -1)
    seen &= (ahead <= left) | (left < 0)
    seen &= (-ahead <= right) | (right < 0)
    return seen[:, None]


def plain(mask: AttnMaskType, softmax: AttnSoftmaxType, kind: AttnBiasType, window: tuple[int, int] | None) -> Any:
    def function(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, offset: jax.Array | None = None) -> jax.Array:
        added: Any = 0.0 if bias is None else bias * (SCALE if kind is PRE else 1.0)
        if kind is ALIBI:
            distance = np.abs(shifts(mask)[:, None, None] + np.arange(S)[:, None] - np.arange(T))
            added = -jnp.asarray([2**-2, 2**-4, 2**-6, 2**-8], jnp.float32)[:, None, None] * distance[:, None]
        sinks = jnp.zeros(H) if softmax is OFF_BY_ONE else None if offset is None else offset.reshape(H)
        return plain_attention(q, k, v, visible(mask, window), SCALE, added, sinks)

    return function


def inputs(softmax: AttnSoftmaxType, bias_shape: tuple[int, ...]) -> dict[str, jax.Array]:
    moving = {"q": Q, "k": KEY, "v": VALUE}
    if bias_shape:
        moving["bias"] = jnp.asarray(np.random.default_rng(5).standard_normal(bias_shape), jnp.float32)
    return moving | ({"offset": OFFSET} if softmax is LEARNABLE else {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].value}-{case[1].value}-{case[2].value}")
def test_each_kind_is_close_to_its_definition(case: Any) -> None:
    mask, softmax, kind, shape, window = case
    moving = inputs(softmax, shape)
    ours, theirs = run(moving, fused(mask, softmax, kind, window)), run(moving, plain(mask, softmax, kind, window))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].shape == value.shape and np.abs(value).max() > 1e-3
        assert_close(ours[name], value, name, tolerance=5e-6)


def test_an_ignored_option_is_not_close() -> None:
    mask, softmax, kind, shape, window = CASES[7]
    moving = inputs(softmax, shape)
    expected = run(moving, plain(mask, softmax, kind, window))
    bare = {name: value for name, value in moving.items() if name not in ("bias", "offset")}
    wrong = {
        "window": (moving, fused(mask, softmax, kind, None)),
        "alignment": (moving, fused(MASK.PADDING_CAUSAL_MASK, softmax, kind, window)),
        "scale of the bias": (moving, fused(mask, softmax, POST, window)),
        "bias": (bare | {"offset": OFFSET}, fused(mask, softmax, NONE, window)),
        "offset": ({name: value for name, value in moving.items() if name != "offset"}, fused(mask, VANILLA, kind, window)),
        "padding": (moving, fused(MASK.CAUSAL_BOTTOM_RIGHT_MASK, softmax, kind, window)),
    }
    for what, (arrays, function) in wrong.items():
        out = jax.jit(lambda arrays, function=function: function(**arrays))(arrays)
        with pytest.raises(ContractViolation):
            assert_close(bits(out), expected["out"], what, tolerance=5e-6)


def test_a_sequence_has_the_bytes_of_the_sequence_alone() -> None:
    mask = MASK.PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    both = jax.jit(fused(mask, LEARNABLE, NONE, (2, 0)))(Q, KEY, VALUE, offset=OFFSET)
    q, k, v = (jnp.swapaxes(array[1:], 1, 2) for array in (Q, KEY[:, :3], VALUE[:, :3]))
    alone = jax.jit(lambda q, k, v: attention(q, k, v, scale=SCALE, window=(2, 0), sinks=OFFSET.reshape(H)))(q, k, v)
    assert_bytes(bits(jnp.swapaxes(both, 1, 2)[1:]), bits(alone), "the second sequence alone")


def test_padding_may_hold_anything_and_is_zero() -> None:
    moving = inputs(LEARNABLE, ())
    function = fused(MASK.PADDING_CAUSAL_MASK, LEARNABLE, NONE, None)
    dirty = dict(moving)
    for name, lengths in (("q", LENGTHS[0]), ("k", LENGTHS[1]), ("v", LENGTHS[1])):
        padded = jnp.arange(moving[name].shape[1]) >= lengths[:, None]
        dirty[name] = jnp.where(padded[..., None, None], jnp.nan, moving[name])
    clean, found = run(moving, function), run(dirty, function)
    assert_bytes(bits(jax.jit(lambda moving: function(**moving))(moving)), clean["out"], "forward alone")
    for name, value in clean.items():
        assert_bytes(found[name], value, name)
    for name in ("out", "dq"):
        assert_zero(found[name][0, 4:], name)
    for name in ("dk", "dv"):
        assert_zero(found[name][0, 7:], name)
        assert_zero(found[name][1, 3:], name)


@pytest.mark.parametrize(("sink", "left"), [(20.0, 2.0611537e-9), (2.0, 0.11920292), (100.0, 0.0), (-np.inf, 1.0)])
def test_offsets_of_any_size(sink: float, left: float) -> None:
    """One key at score 0 and value 1: the output is what the sink leaves."""
    one = jnp.zeros((1, 1, 1, 1))
    options = (NONE, MASK.NO_MASK, SEPARATE, LEARNABLE, 1.0, 0.0, True)

    def out(offset: jax.Array) -> jax.Array:
        return fused_attn((one, one, one + 1.0), None, None, None, *options, softmax_offset=offset).sum()

    value, gradient = jax.value_and_grad(out)(jnp.full((1, 1, 1, 1), sink, jnp.float32))
    assert float(value) == pytest.approx(left, rel=1e-5)
    assert float(gradient.sum()) == pytest.approx(-left * (1.0 - left), rel=1e-5)


def test_a_sequence_without_keys_gives_zero_and_leaves_the_others_alone() -> None:
    descriptor = SequenceDescriptor.from_seqlens((jnp.array([6, 6]), jnp.array([0, 8])))
    options = (NONE, MASK.PADDING_MASK, SEPARATE, LEARNABLE, SCALE, 0.0, True)

    def function(q: jax.Array, k: jax.Array, v: jax.Array, offset: jax.Array) -> jax.Array:
        return fused_attn((q, k, v), None, descriptor, None, *options, softmax_offset=offset)

    found = run(inputs(LEARNABLE, ()), function)
    for name in ("out", "dq", "dk", "dv"):
        assert_zero(found[name][0], name)
        assert np.isfinite(found[name]).all() and np.abs(found[name][1]).max() > 0
    assert np.isfinite(found["doffset"]).all() and np.abs(found["doffset"]).max() > 0


def test_packed_arrays_are_the_separate_ones() -> None:
    """[B, S, 3, H, D] and [B, T, 2, K, D] give the bytes of their parts, the gradients packed alike."""
    middle, tail = (NONE, MASK.CAUSAL_MASK), (VANILLA, SCALE, 0.0, True)
    kv, qkv = jnp.stack([KEY[:, :S], KEY[:, :S] + 1.0], 2), jnp.stack([Q, Q + 1.0, Q - 1.0], 2)

    @jax.jit
    def both(q: jax.Array, kv: jax.Array, qkv: jax.Array) -> list[Any]:
        def call(layout: QKVLayout, *arrays: jax.Array) -> Any:
            out, pullback = jax.vjp(lambda *arrays: fused_attn(arrays, None, None, None, *middle, layout, *tail), *arrays)
            return [out, *pullback(out)]

        halves, pair = call(QKVLayout.BSHD_BS2HD, q, kv), call(SEPARATE, q, kv[:, :, 0], kv[:, :, 1])
        whole, parts = call(QKVLayout.BS3HD, qkv), call(SEPARATE, *(qkv[:, :, part] for part in range(3)))
        return [halves, [*pair[:2], jnp.stack(pair[2:], 2)], whole, [parts[0], jnp.stack(parts[1:], 2)]]

    halves, pair, whole, parts = both(Q, kv, qkv)
    for ours, expected in zip([*halves, *whole], [*pair, *parts], strict=True):
        assert np.abs(np.asarray(expected)).max() > 0
        assert_bytes(bits(ours), bits(expected), "packed")


def test_dropout_keeps_its_mask_in_the_backward_pass() -> None:
    """Out is linear in v, so <dV, V> = <dO, O>; inference drops nothing; the seed may be two words."""
    seed = jnp.array([3, 5], jnp.uint32)

    def out(v: jax.Array, seed: Any = seed, training: bool = True) -> jax.Array:
        options = (NONE, MASK.CAUSAL_MASK, SEPARATE, OFF_BY_ONE, SCALE, 0.5, training)
        return fused_attn((Q, KEY, v), None, None, seed, *options)

    result, pullback = jax.vjp(out, VALUE)
    (dv,) = pullback(WEIGHT)
    assert float((dv * VALUE).sum()) == pytest.approx(float((WEIGHT * result).sum()), rel=1e-5)
    assert_bytes(bits(out(VALUE, seed=3 + (5 << 32))), bits(result), "a seed of 64 bits")
    without = fused_attn((Q, KEY, VALUE), None, None, None, NONE, MASK.CAUSAL_MASK, SEPARATE, OFF_BY_ONE, SCALE, 0.0, True)
    assert_bytes(bits(out(VALUE, training=False)), bits(without), "inference")
    with pytest.raises(ContractViolation):
        assert_bytes(bits(result), bits(without), "dropout")


@pytest.mark.parametrize("kind", [PRE, POST])
@pytest.mark.parametrize("layout", [SEPARATE, QKVLayout.THD_THD_THD])
def test_each_gradient_has_the_dtype_of_its_input(kind: AttnBiasType, layout: QKVLayout) -> None:
    moving = {name: value.astype(jnp.bfloat16) for name, value in inputs(LEARNABLE, (1, H, S, T)).items()} | {"offset": OFFSET}

    def gradients(moving: dict[str, jax.Array], descriptor: SequenceDescriptor) -> Any:
        def call(moving: dict[str, jax.Array]) -> jax.Array:
            qkv, options = tuple(moving[name] for name in ("q", "k", "v")), (kind, MASK.PADDING_MASK, layout, LEARNABLE, SCALE, 0.0, True)
            return fused_attn(qkv, moving["bias"], descriptor, None, *options, softmax_offset=moving["offset"])

        out, pullback = jax.vjp(call, moving)
        return out, pullback(out)[0]

    out, found = jax.eval_shape(gradients, moving, SequenceDescriptor.from_seqlens(LENGTHS))
    assert out.dtype == jnp.bfloat16 and out.shape == (B, S, H, V)
    assert {name: (leaf.dtype, leaf.shape) for name, leaf in found.items()} == {
        name: (leaf.dtype, leaf.shape) for name, leaf in moving.items()
    }


def test_slopes_of_any_head_count() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"softmax_offset": OFFSET}, ValueError, "VANILLA_SOFTMAX takes no softmax_offset"),
    ({"softmax_offset": OFFSET, "softmax_type": OFF_BY_ONE}, ValueError, "OFF_BY_ONE_SOFTMAX takes no softmax_offset"),
    ({"softmax_type": LEARNABLE}, ValueError, "LEARNABLE_SOFTMAX needs a softmax_offset"),
    ({"softmax_type": LEARNABLE, "softmax_offset": OFFSET[0]}, ValueError, r"softmax_offset must have shape \[1, 4, 1, 1\]"),
    ({"softmax_type": LEARNABLE, "softmax_offset": OFFSET.astype(jnp.bfloat16)}, TypeError, "softmax_offset must be float32"),
    ({"bias": jnp.zeros((1, H, S, T))}, ValueError, "NO_BIAS takes no bias"),
    ({"attn_bias_type": POST}, ValueError, "POST_SCALE_BIAS needs a bias"),
    ({"attn_bias_type": ALIBI, "bias": jnp.zeros((1, H, S, T))}, ValueError, "ALIBI takes no bias"),
    ({"attn_bias_type": POST, "bias": jnp.zeros((1, H, 1, T))}, ValueError, "bias must have shape 1HSS, B1SS, BHSS or 11SS"),
    ({"attn_bias_type": POST, "bias": jnp.zeros((1, H, S, T), int)}, TypeError, "bias has dtype int32"),
    ({"attn_mask_type": MASK.PADDING_MASK}, ValueError, "PADDING_MASK needs a sequence_descriptor"),
    ({"sequence_descriptor": SequenceDescriptor.from_seqlens(LENGTHS)}, ValueError, "a sequence_descriptor needs a padding mask"),
    ({"sequence_descriptor": jnp.zeros((B, 1, S, T), bool)}, TypeError, "must be a SequenceDescriptor or None"),
    ({"qkv_layout": QKVLayout.THD_THD_THD}, ValueError, "THD_THD_THD needs a padding mask; got NO_MASK"),
    ({"qkv_layout": QKVLayout.BS3HD}, ValueError, r"BS3HD needs \[B, S, 3, H, D\]"),
    ({"qkv_layout": QKVLayout.BSHD_BS2HD}, ValueError, r"BSHD_BS2HD needs \[B, S, H, D\] and \[B, T, 2, K, D\]"),
    ({"qkv": (Q, KEY[:1], VALUE[:1])}, ValueError, "must share the batch and the head dim"),
    ({"context_parallel_axis": "context"}, ValueError, "the sequence cannot be sharded"),
    ({"max_segments_per_seq": 0}, ValueError, "max_segments_per_seq must be at least 1; got 0"),
    ({"dropout_probability": 0.5}, ValueError, "dropout_p > 0 needs dropout_seed"),
    (
        {"scaling_factor": None, "attn_bias_type": PRE, "bias": jnp.zeros((1, H, S, T))},
        TypeError,
        "scaling_factor must be a number; got None",
    ),
    ({"qkv": (Q[:, :, :3], KEY, VALUE)}, ValueError, "multiple of kv heads"),
    ({"qkv": (Q, KEY, None)}, TypeError, r"qkv\[2\] must be an array or what jnp.asarray makes one of; got None"),
    ({"qkv": Q}, TypeError, "qkv must be a tuple of arrays"),
    ({"qkv": (Q[:, :, :0], KEY[:, :, :0], VALUE[:, :, :0]), "attn_bias_type": ALIBI}, ValueError, "at least one query head"),
    ({"bias": "none", "attn_bias_type": POST}, TypeError, "bias must be an array or .*; got 'none'"),
    ({"softmax_type": LEARNABLE, "softmax_offset": "none"}, TypeError, "softmax_offset must be an array or"),
    ({"window_size": 1}, TypeError, r"window_size must be \(left, right\), each an integer; got 1"),
    ({"window_size": (3,)}, TypeError, r"window_size must be \(left, right\), each an integer; got \(3,\)"),
    ({"window_size": (3, 0, 0)}, TypeError, r"window_size must be \(left, right\), each an integer; got \(3, 0, 0\)"),
    ({"window_size": (3, 0.5)}, TypeError, r"window_size must be \(left, right\), each an integer; got \(3, 0.5\)"),
    ({"scaling_factor": None}, TypeError, "scaling_factor must be a number; got None"),
    ({"scaling_factor": "half"}, TypeError, "scaling_factor must be a number; got 'half'"),
    ({"scaling_factor": jnp.asarray(1j)}, TypeError, "scaling_factor must be a real number"),
    ({"dropout_probability": None}, TypeError, "dropout_probability must be a number; got None"),
    ({"is_training": None}, TypeError, "is_training must be True or False; got None"),
    ({"max_segments_per_seq": 2.0}, TypeError, "max_segments_per_seq must be an integer; got 2.0"),
    ({"context_parallel_axis": None}, TypeError, "context_parallel_axis must be a string; got None"),
    ({"attn_bias_type": "causal"}, TypeError, "attn_bias_type must be an AttnBiasType; got 'causal'"),
    ({"attn_mask_type": "causal"}, TypeError, "attn_mask_type must be an AttnMaskType; got 'causal'"),
    ({"qkv_layout": "causal"}, TypeError, "qkv_layout must be a QKVLayout; got 'causal'"),
    ({"softmax_type": "causal"}, TypeError, "softmax_type must be an AttnSoftmaxType; got 'causal'"),
]
GOOD: dict[str, Any] = {
    "qkv": (Q, KEY, VALUE),
    "bias": None,
    "sequence_descriptor": None,
    "seed": None,
    "attn_bias_type": NONE,
    "attn_mask_type": MASK.NO_MASK,
    "qkv_layout": SEPARATE,
    "softmax_type": VANILLA,
    "scaling_factor": SCALE,
    "dropout_probability": 0.0,
    "is_training": True,
}


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fused_attn(**{**GOOD, **change})


def test_every_reason_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"PADDING_MASK needs .*; NO_BIAS takes no bias; VANILLA_SOFTMAX takes no"):
        fused_attn(**{**GOOD, "attn_mask_type": MASK.PADDING_MASK, "bias": Q, "softmax_offset": OFFSET})


def test_what_jnp_asarray_takes_is_taken() -> None:
    bias = np.random.default_rng(6).standard_normal((1, 1, S, T)).astype(np.float32)
    kinds = {"attn_bias_type": POST, "softmax_type": LEARNABLE, "scaling_factor": jnp.float32(SCALE), "window_size": [2, -1]}
    arrays = {"qkv": (Q, KEY, VALUE), "bias": jnp.asarray(bias), "softmax_offset": OFFSET}
    likes = {"qkv": [np.asarray(Q).tolist(), KEY, VALUE], "bias": bias.tolist(), "softmax_offset": np.asarray(OFFSET, np.float64)}
    assert_bytes(bits(fused_attn(**{**GOOD, **kinds, **likes})), bits(fused_attn(**{**GOOD, **kinds, **arrays})), "lists")


def test_a_traced_factor_is_told_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"fused_attn: scaling_factor must be known when traced: .*multiply q by it"):
        jax.jit(lambda factor: fused_attn(**{**GOOD, "scaling_factor": factor}))(SCALE)
