"""``engine="xla"``: the semantics of ``attention`` in plain jax.numpy, close to the kernels, outside every contract, only on request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _philox, attention
from attn_jax_rocm_sink._arrays import from_numpy, seed_words
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call, UnsupportedProblem
from attn_spec._arrays import to_float32
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_zero
from jax_calls import FEATURES, B, D, H, K, S, T, V, bits, jax_arrays, make_call

# Of the largest magnitude: float32 sums in another order, and one rounding of bfloat16 apart.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7}


def evaluate(call: Call, engine: str) -> dict[str, np.ndarray]:
    """Outputs and gradients of ``call`` under ``jit``."""
    arrays, cotangents = jax_arrays(call), {name: jnp.asarray(from_numpy(value)) for name, value in (call.cotangents or {}).items()}

    @jax.jit
    def run(arrays: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any]:
        moving = {name: arrays[name] for name in call.wrt}
        (out, lse), pullback = jax.vjp(lambda part: attention(**{**arrays, **part}, **call.options, engine=engine), moving)
        (gradients,) = pullback((cotangents["out"], cotangents["lse"]))
        return {"out": out, "lse": lse} | {f"d{name}": value for name, value in gradients.items()}

    return {name: bits(value) for name, value in run(arrays, cotangents).items()}


def assert_all_close(candidate: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str, dtype: str) -> None:
    assert set(candidate) == set(expected)
    for name, value in expected.items():
        assert candidate[name].dtype == value.dtype
        assert_close(candidate[name], to_float32(value), f"{what}: {name}", tolerance=TOLERANCE[dtype])


GROUPS = [
    ("plain",),
    ("full", "scale"),
    ("scale_zero", "bias_keys"),
    ("key_padding_mask", "sinks", "window", "bias", "dropout"),
    ("kv_lengths", "q_start", "sinks"),
    ("k_start", "window_left"),
    ("no_visible_key",),
    ("dropout_all", "sinks_low"),
]


@pytest.mark.parametrize("features", GROUPS, ids="-".join)
def test_it_is_close_to_the_kernels(features: tuple[str, ...]) -> None:
    call = make_call(*features)
    assert_all_close(evaluate(call, "xla"), BACKEND.evaluate(call), str(features), "float32")


def test_half_precision_is_close_to_the_kernels() -> None:
    call = make_call("sinks_low", "bias", "kv_lengths", dtype="bfloat16")
    assert_all_close(evaluate(call, "xla"), BACKEND.evaluate(call), "bfloat16", "bfloat16")


def test_every_feature_is_in_a_group() -> None:
    assert {feature for group in GROUPS for feature in group} == set(FEATURES)


def test_an_ignored_argument_is_not_close() -> None:
    call = replace(make_call("sinks", "key_padding_mask", "bias"), wrt=("q", "k", "v"))
    expected = BACKEND.evaluate(call)
    for dropped in ("sinks", "key_padding_mask", "bias"):
        arrays = {name: array for name, array in call.arrays.items() if name != dropped}
        with pytest.raises(ContractViolation):
            assert_all_close(evaluate(replace(call, arrays=arrays), "xla"), expected, f"without {dropped}", "float32")


def test_a_contract_by_name_is_refused() -> None:
    arrays = jax_arrays(make_call())
    with pytest.raises(UnsupportedProblem, match=r"contract ordered-v1 \(engine xla keeps none"):
        attention(**arrays, engine="xla", contract="ordered-v1")


def test_it_runs_where_no_kernel_does_and_only_when_named() -> None:
    arrays = jax_arrays(make_call())

    def lowered(engine: str | None) -> str:
        return jax.jit(partial(attention, engine=engine)).trace(**arrays).lower(lowering_platforms=("tpu",)).as_text()

    with pytest.raises(UnsupportedProblem, match="lowering for platform tpu"):
        lowered(None)
    assert "custom_call" not in lowered("xla")
    assert attention(**arrays, engine="xla").shape == (B, H, S, V)
    assert "xla" not in BACKEND.engines


def test_dropout_draws_the_mask_of_the_contract() -> None:
    """With v = I the output holds the kept pairs; the kernels draw the same ones."""
    q, k = jnp.ones((2, 4, 7, 3)), jnp.ones((2, 2, 9, 3))
    v = jnp.broadcast_to(jnp.eye(9), (2, 2, 9, 9))
    for seed in (1, 2**63 + 12345):
        host, ours = (attention(q, k, v, causal=False, dropout_p=0.4, dropout_seed=seed, engine=name) for name in ("host", "xla"))
        np.testing.assert_array_equal(np.asarray(host) > 0, np.asarray(ours) > 0)
        assert 0.4 < (np.asarray(ours) > 0).mean() < 0.8
    known = np.asarray(_philox.kept_pairs(0.5, seed_words(3), (1, 2, 3, 4)))
    with jax.enable_x64(True):
        assert_bytes(np.asarray(_philox.kept_pairs(0.5, seed_words(3), (1, 2, 3, 4))), known, "64-bit mode")


def test_masked_keys_cannot_matter() -> None:
    """Keys past the lengths, dropped by the mask, and ahead of the first queries hold anything."""
    call = make_call("sinks")
    options = {"kv_lengths": np.array([7, 9]), "key_padding_mask": np.arange(T)[None].repeat(B, 0) != 1, "q_start": 0}

    def run(value: float) -> dict[str, np.ndarray]:
        arrays = {name: array.copy() for name, array in call.arrays.items()} | options
        for name in ("k", "v"):
            arrays[name][0, :, 7:] = arrays[name][:, :, 1] = arrays[name][:, :, S:] = value
        return evaluate(
            replace(call, arrays={n: a for n, a in arrays.items() if n != "q_start"}, options=call.options | {"q_start": 0}), "xla"
        )

    clean = run(0.0)
    for filler in (np.nan, -np.inf):
        for name, value in run(filler).items():
            assert_bytes(value, clean[name], name)
    assert_zero(clean["dk"][:, :, 1], "dk of a dropped key")


def test_a_visible_nan_spoils_its_rows_alone() -> None:
    call = make_call("sinks")
    for name in ("k", "v"):
        arrays = {key: array.copy() for key, array in call.arrays.items()}
        arrays[name][0, 0, 6] = np.nan
        found = evaluate(replace(call, arrays=arrays), "xla")
        # Bottom-right: query i sees key 6 from i = 2 on; heads 0 and 1 read kv head 0.
        spoiled = np.zeros((B, H, S), bool)
        spoiled[0, :2, 2:] = True
        np.testing.assert_array_equal(np.isnan(found["out"]).all(-1), spoiled)
        np.testing.assert_array_equal(np.isnan(found["out"]).any(-1), spoiled)
        np.testing.assert_array_equal(np.isnan(found["dq"]).any(-1), spoiled)


def test_a_nan_in_a_cotangent_reaches_what_it_touches() -> None:
    call = make_call("sinks")
    cotangents = {name: array.copy() for name, array in (call.cotangents or {}).items()}
    cotangents["out"][1, 3, 0] = np.nan
    found = evaluate(replace(call, cotangents=cotangents), "xla")
    for name in ("dk", "dv"):
        touched = np.zeros((B, K, T), bool)
        touched[1, 1, :5] = True
        np.testing.assert_array_equal(np.isnan(found[name]).any(-1), touched)


@pytest.mark.parametrize("sink", [None, 0.5, 100.0, -np.inf])
def test_rows_without_a_key(sink: float | None) -> None:
    """Output +0, LSE the sink (none: -inf), gradients +0 whatever is stored; only the sink sees the cotangent of the LSE."""
    nan = jnp.full((1, 2, 3, 4), jnp.nan)
    sinks = None if sink is None else jnp.full(2, sink, jnp.float32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return attention(q, k, v, sinks=sinks, kv_lengths=0, return_lse=True, engine="xla")

    (out, lse), pullback = jax.vjp(run, nan, nan, nan, sinks)
    assert_zero(np.asarray(out), "out")
    assert (np.asarray(lse) == (-np.inf if sink is None else sink)).all()
    *gradients, dsinks = pullback((jnp.full(out.shape, 7.0), jnp.full(lse.shape, 3.0)))
    for gradient in gradients:
        assert_zero(np.asarray(gradient), "gradient")
    if sink is not None:
        assert np.asarray(dsinks).tolist() == ([0.0, 0.0] if sink == -np.inf else [9.0, 9.0])


@pytest.mark.parametrize(("q_start", "k_start"), [(2**31 - 9, 2**31 - 12), (-(2**31) + 9, 2**31 - 12), (2**31 - 9, 0), (-5, 3)])
def test_far_positions_do_not_wrap(q_start: int, k_start: int) -> None:
    arrays = jax_arrays(make_call())
    options = {"q_start": q_start, "k_start": k_start, "window": (6, None), "return_lse": True}
    for ours, theirs in zip(attention(**arrays, **options, engine="xla"), attention(**arrays, **options), strict=True):
        assert_close(bits(ours), np.asarray(theirs), "positions", tolerance=TOLERANCE["float32"])


def test_vmap_and_traced_lengths_equal_a_loop() -> None:
    arrays = jax_arrays(make_call("sinks"))
    lengths = jnp.array([[9, 4], [0, 1], [3, 20]])

    def run(lengths: jax.Array) -> jax.Array:
        return attention(**arrays, kv_lengths=lengths, engine="xla")

    mapped = jax.jit(jax.vmap(run))(lengths)
    for index, item in enumerate([[9, 4], [0, 1], [3, 9]]):
        assert_close(bits(mapped[index]), np.asarray(run(jnp.array(item))), "vmap", tolerance=TOLERANCE["float32"])


def test_second_derivatives_are_those_of_plain_softmax() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 1, 3, 2)), jnp.float32) for _ in range(3))

    def plain(q: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / np.sqrt(2.0)
        logits = jnp.concatenate([scores, jnp.zeros((1, 1, 3, 1))], -1)
        return (jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(logits)[..., :3], v) ** 2).sum()

    def ours(q: jax.Array) -> jax.Array:
        return (attention(q, k, v, causal=False, sinks=jnp.zeros(1), engine="xla") ** 2).sum()

    expected = np.asarray(jax.jit(jax.jacrev(jax.grad(plain)))(q))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(np.asarray(jax.jit(jax.jacrev(jax.grad(ours)))(q)), expected, atol=1e-5)
    along = jax.jit(lambda q: jax.jvp(jax.grad(ours), (q,), (q,))[1])(q)  # forward over reverse
    np.testing.assert_allclose(np.asarray(along), np.tensordot(expected, np.asarray(q), q.ndim), atol=1e-5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(ours, (q,), (q,))


@pytest.mark.parametrize("shape", [(0, 4, 2, 3, 4), (2, 4, 2, 0, 4), (2, 4, 2, 3, 0)])
def test_empty_axes_run(shape: tuple[int, int, int, int, int]) -> None:
    batch, heads, kv_heads, queries, keys = shape
    q, k = jnp.ones((batch, heads, queries, D)), jnp.ones((batch, kv_heads, keys, D))
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, engine="xla"), q, k, k)
    assert out.shape == q.shape and [g.shape for g in pullback(out)] == [q.shape, k.shape, k.shape]
    assert_zero(np.asarray(out), "out")
