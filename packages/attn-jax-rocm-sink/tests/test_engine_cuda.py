"""The cuda engine over a recording table of attn-cuda: what is passed, how much workspace, which errors; bytes through ``jit``."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import attn_jax_rocm_sink
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _cuda
from attn_spec import Call, UnsupportedProblem
from attn_spec.testing.asserts import assert_bytes
from engine_fakes import Fakes
from jax_calls import FEATURES, B, D, H, K, S, T, V, bits, jax_arrays, make_call

XLA_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""A call that runs at once raises one, a call that is waited for the other."""


def evaluate(call: Call, engine: str) -> dict[str, np.ndarray]:
    """out, lse and every gradient of a call."""
    arrays = jax_arrays(call)
    wrt = {name: arrays[name] for name in call.wrt}

    def outputs(moving: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return attn_jax_rocm_sink.attention(**{**arrays, **moving}, **call.options, engine=engine)

    def run(moving: dict[str, jax.Array]) -> dict[str, jax.Array]:
        (out, lse), pullback = jax.vjp(outputs, moving)
        dout = jnp.linspace(-1.0, 1.0, out.size).reshape(out.shape).astype(out.dtype)
        (gradients,) = pullback((dout, jnp.cos(jnp.arange(lse.size, dtype=jnp.float32)).reshape(lse.shape)))
        return {"out": out, "lse": lse} | {f"d{name}": value for name, value in gradients.items()}

    return {name: bits(value) for name, value in jax.jit(run)(wrt).items()}


@pytest.mark.parametrize("feature", [name for name in FEATURES if "dropout" not in name])
def test_the_bytes_are_those_of_the_host_engine(fake_cuda: Fakes, feature: str) -> None:
    call = make_call(feature, dtype="bfloat16")
    found, wanted = evaluate(call, "cuda"), evaluate(call, "host")
    assert [line["call"] for line in fake_cuda.take_log()] == ["forward", "backward"]
    for name, value in wanted.items():
        assert_bytes(found[name], value, f"{feature}: {name}")


def test_arguments_reach_the_table_as_they_are(fake_cuda: Fakes) -> None:
    evaluate(make_call("sinks", "bias", "kv_lengths", "q_start", "window_left", "scale"), "cuda")
    forward, backward = fake_cuda.take_log()
    sizes = {"batch": B, "heads": H, "kv_heads": K, "queries": S, "keys": T, "head_dim": D, "value_dim": V, "dtype": 0}
    sent = {"device": 1, "stream": 0x5EED, "q_row": D, "k_head": T * D, "v_batch": K * T * V, "v_column": 1, "mask": 0, "lengths": 1}
    sent |= {"q_start": 1, "k_start": 0, "sinks": 1, "bias": 1, "bias_strides": f"0,{S * T},{T},1", "packed": 0, "causal": 1}
    sent |= {"left": 1, "right": -1, "scale": -0.7}
    for line in (forward, backward):
        assert {name: line[name] for name in sizes | sent} == {name: str(value) for name, value in (sizes | sent).items()}
    assert forward["out_dtype"] == "0" and forward["workspace"] == "1"
    assert [backward[name] for name in ("dlse", "dq", "dk", "dv", "dsinks", "dbias")] == ["1"] * 6
    assert backward["dbias_shape"] == f"1,{H}"


def test_only_the_gradients_that_are_asked_for_have_a_pointer(fake_cuda: Fakes) -> None:
    arrays = jax_arrays(make_call("sinks"))
    jax.grad(lambda sinks: attn_jax_rocm_sink.attention(**{**arrays, "sinks": sinks}, engine="cuda").sum())(arrays["sinks"])
    _, backward = fake_cuda.take_log()
    assert [backward[name] for name in ("dlse", "dq", "dk", "dv", "dsinks", "dbias")] == ["0", "0", "0", "0", "1", "0"]


def test_the_workspace_is_the_largest_that_any_device_asks_for(fake_cuda: Fakes) -> None:
    arrays = jax_arrays(make_call())
    text = jax.jit(lambda given: attn_jax_rocm_sink.attention(**given, engine="cuda")).lower(arrays).as_text()
    wanted = 3 * B + 1000 + 1
    assert f"tensor<{(wanted + 255) // 256 * 256}xui8>" in text
    assert "attn_jax_rocm_sink_cuda_forward" in text


def test_a_workspace_that_grew_since_tracing_is_refused(fake_cuda: Fakes) -> None:
    arrays = jax_arrays(make_call())
    run = jax.jit(lambda given: attn_jax_rocm_sink.attention(**given, engine="cuda")).lower(arrays).compile()
    run(arrays)
    fake_cuda.handle.fake_cuda_set(0, 0, ctypes.c_int64(512))
    with pytest.raises(XLA_ERRORS, match=r"INVALID_ARGUMENT: attn_jax_rocm_sink: the workspace has 1024 bytes and .* 1536"):
        jax.block_until_ready(run(arrays))


@pytest.mark.parametrize(("code", "kind", "text"), [(-2, "INVALID_ARGUMENT", "refused by the fake"), (700, "INTERNAL", "a CUDA error")])
def test_errors_of_the_table_become_errors_of_xla(fake_cuda: Fakes, code: int, kind: str, text: str) -> None:
    arrays = jax_arrays(make_call())
    run = jax.jit(lambda given: attn_jax_rocm_sink.attention(**given, engine="cuda")).lower(arrays).compile()
    fake_cuda.handle.fake_cuda_set(code, 0, ctypes.c_int64(0))
    with pytest.raises(XLA_ERRORS, match=rf"{kind}: attn_jax_rocm_sink: attn-cuda \w+: {text}.* \(code {code}\)"):
        jax.block_until_ready(run(arrays))


def test_traced_integers_of_64_bits_pass_as_they_are(fake_cuda: Fakes) -> None:
    arrays = jax_arrays(make_call())
    wanted = attn_jax_rocm_sink.attention(**arrays, kv_lengths=jnp.array([3, 9]), q_start=jnp.array([-2, 4]), engine="host")
    run = jax.jit(lambda lengths, starts: attn_jax_rocm_sink.attention(**arrays, kv_lengths=lengths, q_start=starts, engine="cuda"))
    assert_bytes(bits(run(jnp.array([3, 9]), jnp.array([-2, 4]))), bits(wanted), "int32")
    with jax.enable_x64(True):
        assert_bytes(bits(run(jnp.array([3, 9]), jnp.array([-2, 4]))), bits(wanted), "int64")


def test_empty_axes_launch_nothing_that_has_no_result(fake_cuda: Fakes) -> None:
    q, k = jnp.ones((2, H, 0, D)), jnp.ones((2, K, 4, D))
    out, pullback = jax.vjp(lambda q, k: attn_jax_rocm_sink.attention(q, k, k, engine="cuda"), q, k)
    assert out.shape == q.shape and fake_cuda.take_log() == []
    dq, dk = pullback(out)
    assert dq.shape == q.shape and not np.asarray(dk).any()
    assert [line["call"] for line in fake_cuda.take_log()] == ["backward"]


def test_what_the_kernels_lack_is_refused_before_they_are_called(fake_cuda: Fakes) -> None:
    arrays = jax_arrays(make_call())
    with pytest.raises(UnsupportedProblem, match="dropout"):
        attn_jax_rocm_sink.attention(**arrays, dropout_p=0.5, dropout_seed=1, engine="cuda")
    wide = jnp.ones((1, 1, 2, 264))
    with pytest.raises(UnsupportedProblem, match=r"head_dim=264 \(supported: up to 256\)"):
        attn_jax_rocm_sink.attention(wide, wide, wide, engine="cuda")
    assert fake_cuda.take_log() == []


def test_another_version_of_the_table_is_refused(fakes: Fakes) -> None:
    assert "version 2 of its C interface; this build needs version 1" in str(
        _cuda.bind(fakes.handle, fakes.handle.fake_table_of_version(ctypes.c_int64(2))).reason
    )
    assert "other structs" in str(_cuda.bind(fakes.handle, fakes.handle.fake_table_of_size(ctypes.c_int64(8))).reason)
    assert "no table" in str(_cuda.bind(fakes.handle, 0).reason)
    assert _cuda.bind(fakes.handle, fakes.handle.attn_cuda_interface_v1()).fingerprint == "fake"


def test_a_build_that_is_not_ieee_is_named(fakes: Fakes) -> None:
    table = fakes.handle.attn_cuda_interface_v1()

    def probe(code: int, failed: int) -> str:
        fakes.handle.fake_cuda_set(code, failed, ctypes.c_int64(0))
        return _cuda._question(fakes.handle, "probe", table, ctypes.c_int64(0))

    assert probe(0, 0) == ""
    assert probe(0, 0b101) == "this build of attn-cuda does not compute IEEE arithmetic on device 0: subnormals, contraction"
    assert probe(209, 0) == "attn-cuda, built for 90a-real, does not run on device 0: a CUDA error of the fake"
    fakes.handle.fake_cuda_set(0, 0, ctypes.c_int64(0))


def test_without_a_device_the_reason_is_told() -> None:
    if any(device.platform == "gpu" for device in jax.local_devices()):
        pytest.skip("a GPU is present")
    reason = _cuda.unavailable()
    assert reason is not None
    arrays = jax_arrays(make_call())
    with pytest.raises(UnsupportedProblem) as error:
        attn_jax_rocm_sink.attention(**arrays, engine="cuda")
    assert reason in str(error.value)


def test_a_call_without_the_kernels_is_refused_by_the_engine() -> None:
    """In a process of its own, in which nothing has loaded attn-cuda, installed or not."""
    code = """
import jax, jax.numpy as jnp
from attn_jax_rocm_sink import _ffi
from attn_jax_rocm_sink._config import config_of
array = jax.ShapeDtypeStruct((1, 1, 2, 4), jnp.float32)
options = {"causal": True, "window_left": -1, "window_right": -1, "scale": 1.0, "dropout_p": 0.0}
config = config_of({"q": array, "k": array, "v": array}, {"out": array}, options)
print(_ffi.supports("cuda", "forward", config))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "the kernels of attn-cuda are not loaded in this process"
