"""Outputs and gradients have the bytes of the reference, under ``jit`` and ``grad``; each comparison can fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call
from attn_spec._errors import ContractViolation
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_same
from attn_spec.testing.strategies import attention_calls
from hypothesis import HealthCheck, given, settings
from jax_calls import FEATURES, make_call

ENGINES = ("pytorch", "host")
DTYPES = ("float32", "bfloat16", "float16")


def reference(call: Call, engine: str) -> dict[str, np.ndarray]:
    return get_backend("attn_reference").evaluate(call, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone(feature: str, dtype: str, engine: str) -> None:
    call = make_call(feature, dtype=dtype)
    assert_same(BACKEND.evaluate(call), reference(call, engine), f"{feature} {dtype}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "features",
    [
        ("key_padding_mask", "sinks", "window", "bias", "dropout"),
        ("kv_lengths", "q_start", "sinks_low", "bias_keys"),
        ("k_start", "key_padding_mask", "sinks", "dropout"),
    ],
)
def test_features_together(features: tuple[str, ...], engine: str) -> None:
    call = make_call(*features, dtype="bfloat16", seed=3)
    assert_same(BACKEND.evaluate(call), reference(call, engine), " ".join(features))


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(attention_calls())
def test_any_call(call: Call) -> None:
    assert_same(BACKEND.evaluate(call), reference(call, "host"), str(call.problem()))


@pytest.mark.parametrize("dropped", ["sinks", "key_padding_mask", "bias"])
def test_an_ignored_argument_is_found(dropped: str) -> None:
    call = make_call("sinks", "key_padding_mask", "bias")
    arrays = {name: array for name, array in call.arrays.items() if name != dropped}
    ignoring = BACKEND.evaluate(replace(call, arrays=arrays, wrt=("q", "k", "v")))
    with pytest.raises(ContractViolation):
        assert_same(ignoring, reference(call, "host"), f"without {dropped}", ("out", "lse", "dq", "dk", "dv"))


def test_one_bit_is_found() -> None:
    call = make_call("sinks")
    results, expected = BACKEND.evaluate(call), reference(call, "host")
    changed = results["dsinks"].copy()
    changed.view(np.uint32)[2] ^= 1
    with pytest.raises(ContractViolation, match="dsinks"):
        assert_same(results | {"dsinks": changed}, expected, "one bit")


def test_float32_results_of_half_inputs() -> None:
    import jax
    from attn_spec.torch import from_numpy as to_torch
    from attn_spec.torch import to_numpy as from_torch
    from jax_calls import bits, jax_arrays

    call = make_call("sinks", dtype="bfloat16", gradient=False)
    names = {"sinks": call.arrays["sinks"]}
    ours = jax.jit(BACKEND.operators()["attention.forward_fp32"])(**jax_arrays(call))
    qkv = [to_torch(call.arrays[name]) for name in ("q", "k", "v")]
    functions = get_backend("attn_reference").operators("pytorch")
    theirs = functions["attention.forward_fp32"](*qkv, sinks=to_torch(names["sinks"]))
    assert ours.dtype == np.float32
    assert_same({"out": bits(ours)}, {"out": from_torch(theirs)}, "forward_fp32")
