"""Where a call runs, and the forms that one value may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _arrays, attention
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call
from attn_spec.testing.asserts import assert_bytes
from jax_calls import bits, jax_arrays, make_call


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [("cpu", "cpu", "cpu"), ("gpu", "cuda 13000", "cuda"), ("gpu", "rocm 70100", "rocm"), ("tpu", "TPU v5", "tpu")],
)
def test_device_names(monkeypatch: pytest.MonkeyPatch, platform: str, version: str, name: str) -> None:
    device = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
    x = np.ones((1, 1, 2, 2), np.float32)
    with jax.default_device(None):
        assert _arrays.platform({"q": x}, None) == name
        assert _arrays.platform({"q": x}, "cpu") == "cpu"


def test_committed_arrays_decide_the_device() -> None:
    x = jax.device_put(np.ones((1, 1, 2, 2), np.float32), jax.local_devices(backend="cpu")[0])
    assert x.committed and _arrays.platform({"q": x}, "rocm") == "cpu"


def test_the_default_device_is_the_cpu_here() -> None:
    for default in (None, "cpu", jax.local_devices(backend="cpu")[0]):
        with jax.default_device(default):
            assert _arrays.platform({"q": np.ones(1, np.float32)}, None) == "cpu"


@pytest.mark.parametrize("form", [float, np.float32, np.float64, jnp.float32, np.array], ids=lambda form: form.__name__)
def test_every_form_of_scale_is_the_same(form: Any) -> None:
    arrays = jax_arrays(make_call(dtype="bfloat16"))
    assert_bytes(bits(attention(**arrays, scale=form(0.25))), bits(attention(**arrays, scale=0.25)), "scale")


def test_a_typed_key_is_its_words() -> None:
    arrays = jax_arrays(make_call())
    words = bits(attention(**arrays, dropout_p=0.5, dropout_seed=jax.random.PRNGKey(3)))
    typed = jax.jit(lambda key: attention(**arrays, dropout_p=0.5, dropout_seed=key))(jax.random.key(3))
    assert_bytes(bits(typed), words, "a typed key, traced")
    assert bits(attention(**arrays, dropout_p=0.5, dropout_seed=jax.random.key(4))).tobytes() != words.tobytes()
    with pytest.raises(TypeError, match=r"dropout_seed must be .*; got uint32 \[4\]"):
        attention(**arrays, dropout_p=0.5, dropout_seed=jax.random.key(3, impl="rbg"))


def test_numpy_arrays_are_taken() -> None:
    call = make_call("sinks", "bias", dtype="bfloat16")
    plain = {name: _arrays.from_numpy(array) for name, array in call.arrays.items()}
    assert_bytes(bits(attention(**plain)), bits(attention(**jax_arrays(call))), "numpy input")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numpy_data_goes_there_and_back(dtype: str) -> None:
    array = make_call(dtype=dtype).arrays["q"]
    assert_bytes(_arrays.to_numpy(jnp.asarray(_arrays.from_numpy(array))), array, dtype)


def test_evaluate_names_what_is_missing() -> None:
    call = make_call()
    with pytest.raises(TypeError, match="attention: missing v"):
        BACKEND.evaluate(Call("attention", {name: call.arrays[name] for name in ("q", "k")}))
    with pytest.raises(ValueError, match="gradients need a cotangent for one of out, lse"):
        BACKEND.evaluate(Call("attention", call.arrays, {}, None, ("q",)))


def test_an_empty_call_has_no_rows() -> None:
    out, lse = attention(*(jnp.zeros((0, 1, 2, 3)),) * 3, return_lse=True)
    assert out.shape == (0, 1, 2, 3) and lse.shape == (0, 1, 2)
