"""The hip engine from end to end without an AMD GPU: jit, XLA FFI, the production library's launches, and its code objects executed by the
interpreter. Results have the bytes of attn_reference's host kernels ("interpreter bytes": docs/rocm.md says what that cannot show).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hip_library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _ffi
from attn_jax_rocm_sink._arrays import to_numpy
from attn_jax_rocm_sink._config import GRADIENTS, Config, Strides
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call
from attn_spec._arrays import from_float32
from attn_spec._errors import ContractViolation
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_same, assert_zero
from attn_spec.testing.strategies import attention_calls
from engine_on_cpu import engine_on_cpu
from hypothesis import HealthCheck, given, settings
from interpreter import Device, build
from jax_calls import FEATURES, make_call

TARGETS = ("gfx90a", "gfx942", "gfx950")
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=TARGETS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A GPU of each kind that plays the ROCm device behind ``engine="hip"``."""
    found = Device(build(), request.param)
    found.allow_host_memory(True)  # the bounds of XLA's buffers are not known
    with engine_on_cpu("hip", hip_library.build()):
        yield found


def reference(call: Call) -> Arrays:
    return get_backend("attn_reference").evaluate(call, engine="host")


def large_call(
    batch: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    widths: tuple[int, int],
    dtype: str,
    *,
    seed: int = 0,
    bias: tuple[int, int, int, int] | None = None,
    arrays: Arrays | None = None,
    **options: object,
) -> Call:
    """A call with sinks, every gradient and a cotangent for out and lse. ``heads`` (H, K), ``sizes`` (S, T), ``widths`` (D, V)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, name: str = dtype) -> np.ndarray:
        return from_float32(rng.standard_normal(shape).astype(np.float32), name)

    (h, kv), (s, t), (d, v) = heads, sizes, widths
    found = {"q": normal(batch, h, s, d), "k": normal(batch, kv, t, d), "v": normal(batch, kv, t, v), "sinks": normal(h, name="float32")}
    if bias is not None:
        found["bias"] = normal(*bias)
    found |= arrays or {}
    cotangents = {"out": normal(batch, h, s, v), "lse": normal(batch, h, s, name="float32")}
    wrt = tuple(name for name in ("q", "k", "v", "sinks", "bias") if name in found)
    return Call("attention", found, {"return_lse": True, **options}, cotangents, wrt)


def mask(batch: int, keys: int) -> np.ndarray:
    return np.random.default_rng(7).random((batch, keys)) < 0.6


LARGE = {
    "three tiles, window, GQA": lambda: large_call(1, (4, 2), (21, 600), (24, 40), "bfloat16", window=(300, None)),
    "the widest columns": lambda: large_call(2, (2, 1), (9, 33), (256, 256), "float16", arrays={"kv_lengths": np.array([33, 5], np.int32)}),
    "decoding": lambda: large_call(2, (8, 1), (1, 530), (64, 64), "bfloat16", arrays={"kv_lengths": np.array([530, 17], np.int32)}),
    "compacted keys over tiles": lambda: large_call(
        2, (2, 2), (10, 700), (5, 7), "float32", causal=False, arrays={"key_padding_mask": mask(2, 700)}
    ),
    "a rolling cache": lambda: large_call(
        2, (2, 1), (12, 290), (8, 8), "float32", window=(200, 3), arrays={"k_start": np.array([100, 255]), "q_start": np.array([290, 400])}
    ),
    "more rows than a tile": lambda: large_call(1, (6, 2), (100, 40), (8, 4), "float32", dropout_p=0.3, dropout_seed=11),
    "a bias of every pair": lambda: large_call(2, (2, 1), (11, 270), (6, 6), "bfloat16", bias=(2, 2, 11, 270)),
    "a bias of heads": lambda: large_call(2, (2, 1), (9, 260), (4, 4), "float32", bias=(1, 2, 1, 1)),
    "a bias of queries": lambda: large_call(2, (2, 2), (9, 260), (4, 4), "float32", bias=(2, 1, 9, 1)),
    "a bias of keys": lambda: large_call(2, (2, 2), (9, 260), (4, 4), "float16", bias=(1, 1, 1, 260), causal=False),
    "no keys": lambda: large_call(2, (2, 2), (3, 0), (4, 4), "float32"),
    "no queries": lambda: large_call(2, (2, 2), (0, 3), (4, 4), "float32"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(device: Device, feature: str) -> None:
    call = make_call(feature, dtype=("float32", "bfloat16", "float16")[len(feature) % 3])
    assert_same(BACKEND.evaluate(call, engine="hip"), reference(call), f"{device.target} {feature}")


@pytest.mark.parametrize("name", LARGE)
def test_larger_calls(device: Device, name: str) -> None:
    call = LARGE[name]()
    assert_same(BACKEND.evaluate(call, engine="hip"), reference(call), f"{device.target} {name}")


@settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(call=attention_calls())
def test_any_call(device: Device, call: Call) -> None:
    assert_same(BACKEND.evaluate(call, engine="hip"), reference(call), device.target)


def test_neither_order_nor_reciprocals_move_a_bit(device: Device) -> None:
    call = LARGE["more rows than a tile"]()
    expected = reference(call)
    try:
        for seed in (1, 2):
            device.set_order(seed)
            device.set_reciprocal_error(seed)
            assert_same(BACKEND.evaluate(call, engine="hip"), expected, f"{device.target} order {seed}")
    finally:
        device.set_order(0)
        device.set_reciprocal_error(0)


def test_another_problem_has_other_bytes(device: Device) -> None:
    call = make_call("sinks", "key_padding_mask", "window", "dropout")
    expected = reference(call)
    others = {
        "a dropped sink": replace(call, arrays=call.arrays | {"sinks": np.full_like(call.arrays["sinks"], -np.inf)}),
        "an ignored mask": replace(call, arrays=call.arrays | {"key_padding_mask": np.ones_like(call.arrays["key_padding_mask"])}),
        "an ignored window": replace(call, options=call.options | {"window": None, "causal": True}),
        "another seed": replace(call, options=call.options | {"dropout_seed": 1}),
    }
    for what, other in others.items():
        with pytest.raises(ContractViolation):
            assert_same(BACKEND.evaluate(other, engine="hip"), expected, what)


def test_rows_without_a_key_and_with_a_sink(device: Device) -> None:
    call = make_call("no_visible_key", "sinks")
    found = BACKEND.evaluate(call, engine="hip")
    for name in ("out", "dq", "dk", "dv"):
        assert_zero(found[name][:1], f"{device.target} {name}")
    assert np.array_equal(found["lse"][0], np.broadcast_to(call.arrays["sinks"][:, None], found["lse"][0].shape))


def packed(direction: str, engine: str, operands: dict[str, jax.Array], results: dict[str, jax.ShapeDtypeStruct]) -> Arrays:
    """A call of packed segments, under jit, through the engine's handler."""
    attributes = {"engine": engine, "causal": True, "window_left": 20, "window_right": -1, "scale": 0.3, "dropout_p": 0.0}
    found = jax.jit(lambda arrays: _ffi.call(direction, arrays, results, attributes))(operands)
    return {name: to_numpy(array) for name, array in found.items()}


def test_packed_segments_with_gaps(device: Device) -> None:
    rng = np.random.default_rng(5)
    total_q, total_k, heads, kv_heads, width = 37, 61, 4, 2, 8

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    operands = {"q": normal(total_q, heads, width), "k": normal(total_k, kv_heads, width), "v": normal(total_k, kv_heads, width)}
    for name, offsets in {"cu_seqlens_q": [1, 11, 11, 34], "cu_seqlens_k": [0, 20, 33, 60]}.items():
        operands[name] = jnp.asarray(offsets, jnp.int32)
    for name, lengths in {"seqlens_q": [8, 0, 23], "seqlens_k": [20, 4, 25]}.items():
        operands[name] = jnp.asarray(lengths, jnp.int32)
    operands["sinks"] = normal(heads)
    rows = jax.ShapeDtypeStruct((heads, total_q), jnp.float32)
    results = {"out": jax.ShapeDtypeStruct(operands["q"].shape, jnp.float32), "lse": rows, "row_max": rows, "row_sum": rows}
    expected = packed("forward", "host", operands, results)
    assert_same(packed("forward", "hip", operands, results), expected, f"{device.target} packed forward")
    operands |= {name: jnp.asarray(expected[name]) for name in ("row_max", "row_sum")}
    operands |= {"dout": normal(total_q, heads, width), "dlse": normal(heads, total_q)}
    gradients = {f"d{name}": jax.ShapeDtypeStruct(operands[name].shape, jnp.float32) for name in ("q", "k", "v", "sinks")}
    expected = packed("backward", "host", operands, gradients)
    assert_same(packed("backward", "hip", operands, gradients), expected, f"{device.target} packed backward")


def config(**changes: object) -> Config:
    """A plain configuration, dense [2, 4, 5, 8] over [2, 2, 9, 8]."""
    found = Config(batch=2, heads=4, kv_heads=2, queries=5, keys=9, head_dim=8, value_dim=8, window_left=-1, window_right=-1, scale=1.0)
    found.q = found.out = Strides(160, 40, 8, 1)
    found.k = found.v = Strides(144, 72, 8, 1)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"head_dim": 257}, "head_dim=257 (supported: 0 to 256)"),
        ({"value_dim": 300}, "value_dim=300 (supported: 0 to 256)"),
        ({"keys": 2**31}, "keys=2147483648 (supported: 0 to 2147482623)"),
        ({"k": Strides(144, 72, 1, 9)}, "columns that are not contiguous"),
        ({"alignment": 1}, "top-left alignment without q_start (supported: q_start)"),
        ({"bias": 1, "bias_dtype": 1}, "a bias in bfloat16 (supported: float32)"),
        ({"packed": 1, "bias": 1, "key_padding_mask": 1}, "a bias of packed input; a key padding mask of packed input"),
    ],
)
def test_refusals_name_every_reason(device: Device, changes: dict[str, object], reason: str) -> None:
    assert _ffi.supports("hip", _ffi.BACKWARD, config(**changes)) == reason


def test_the_workspace_has_what_the_configuration_needs(device: Device) -> None:
    assert _ffi.plan("hip", _ffi.FORWARD, config()) == (0, ())
    total, parts = _ffi.plan("hip", _ffi.BACKWARD, config(key_padding_mask=1, softmax=2, gradients=GRADIENTS["dsinks"]))
    rows = 2 * 4 * 5 * 4
    assert {part.name: part.bytes for part in parts} == {
        "key_positions": 2 * 9 * 4,
        "key_counts": 2 * 4,
        "delta": rows,
        "dsink": rows,
        "sink_items": 2 * 4 * 4,
    }
    assert total == sum(-(-part.bytes // 256) * 256 for part in parts)


def test_a_failed_launch_is_an_error_of_the_call(device: Device) -> None:
    device.set_step_limit(100)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="attn_jax_rocm_sink: HIP"):
            BACKEND.evaluate(make_call("plain", gradient=False), engine="hip")
    finally:
        device.set_step_limit(4_000_000_000)
