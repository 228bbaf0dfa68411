"""Contract sm90-v1 in the host and cuda engines: the bytes of attn_reference, what reaches attn-cuda, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import attn_jax_rocm_sink
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _cuda
from attn_jax_rocm_sink._engines import ENGINES
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call, Problem, UnsupportedProblem
from attn_spec._arrays import from_float32
from attn_spec._registry import get_backend
from attn_spec._sm90 import score_factor
from attn_spec.testing.asserts import assert_bytes
from engine_fakes import Fakes
from jax_calls import bits, jax_arrays

SM90 = "sm90-v1"
B, H, K, S, T, D = 2, 4, 2, 20, 140, 64
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full, float16": {"causal": False, "dtype": "float16"},
    "window and sinks": {"window": (30, None), "sinks": True, "scale": 0.3},
    "lengths and starts": {"kv_lengths": np.array([140, 33], np.int32), "k_start": np.array([100, 0], np.int32)},
}


def make(case: str) -> Call:
    """A call with gradients of everything, through out and LSE."""
    options = dict(CASES[case])
    rng = np.random.default_rng(7)
    dtype = options.pop("dtype", "bfloat16")

    def normal(*sizes: int, name: str = dtype) -> np.ndarray:
        return from_float32(rng.standard_normal(sizes).astype(np.float32), name)

    arrays = {"q": normal(B, H, S, D), "k": normal(B, K, T, D), "v": normal(B, K, T, D)}
    if options.pop("sinks", False):
        arrays["sinks"] = np.array([0.5, -np.inf, 2.0, -3.0], np.float32)
    arrays |= {name: options.pop(name) for name in ("kv_lengths", "k_start") if name in options}
    wrt = tuple(name for name in ("q", "k", "v", "sinks") if name in arrays)
    cotangents = {"out": normal(B, H, S, D), "lse": normal(B, H, S, name="float32")}
    return Call("attention", arrays, {**options, "return_lse": True}, cotangents, wrt, contract=SM90)


@pytest.mark.parametrize("case", CASES)
def test_the_host_engine_has_the_bytes_of_the_reference(case: str) -> None:
    call = make(case)
    wanted = get_backend("attn_reference").evaluate(call)
    found = BACKEND.evaluate(call, engine="host")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_bytes(found[name], value, f"{case}: {name}")


@pytest.mark.parametrize("case", CASES)
def test_the_cuda_engine_has_the_bytes_of_its_table(fake_sm90: Fakes, case: str) -> None:
    call = make(case)
    arrays = jax_arrays(call)
    wrt = {name: arrays[name] for name in call.wrt}

    def evaluate(engine: str) -> dict[str, np.ndarray]:
        def outputs(given: dict[str, jax.Array]) -> Any:
            return attn_jax_rocm_sink.attention(**{**arrays, **given}, **call.options, contract=SM90, engine=engine)

        def run(moving: dict[str, jax.Array]) -> dict[str, jax.Array]:
            (out, lse), pullback = jax.vjp(outputs, moving)
            (gradients,) = pullback((jnp.cos(out), jnp.sin(lse)))
            return {"out": out, "lse": lse} | {f"d{name}": value for name, value in gradients.items()}

        return {name: bits(value) for name, value in jax.jit(run)(wrt).items()}

    found, wanted = evaluate("cuda"), evaluate("host")
    forward, backward = fake_sm90.take_log()
    assert (forward["call"], backward["call"]) == ("sm90_forward", "sm90_backward")
    factor = score_factor(call.options.get("scale", D**-0.5))
    assert float(np.float32(forward["factor"])) == pytest.approx(factor, rel=1e-5) and forward["factor"] == backward["factor"]
    assert [backward[name] for name in ("dlse", "dq", "dk", "dv")] == ["1"] * 4
    for name, value in wanted.items():
        assert_bytes(found[name], value, f"{case}: {name}")


def test_it_is_not_the_default() -> None:
    arrays = jax_arrays(make("causal"))
    first, second = (attn_jax_rocm_sink.attention(**arrays, contract=contract, engine="host") for contract in (None, SM90))
    assert not np.array_equal(bits(first), bits(second))


@pytest.mark.parametrize(("code", "kind"), [(-2, "INVALID_ARGUMENT"), (700, "INTERNAL")])
def test_errors_of_the_table_become_errors_of_xla(fake_sm90: Fakes, code: int, kind: str) -> None:
    array = jnp.ones((1, 1, 2, D), jnp.bfloat16)
    run = jax.jit(lambda q: attn_jax_rocm_sink.attention(q, q, q, contract=SM90, engine="cuda")).lower(array).compile()
    fake_sm90.handle.fake_cuda_set(code, 0, ctypes.c_int64(0))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=rf"{kind}: attn_jax_rocm_sink: attn-cuda sm90_\w+: .* \(code {code}\)"
    ):
        jax.block_until_ready(run(array))


def test_the_table_is_checked_before_it_is_used(fakes: Fakes) -> None:
    assert "built without 90a" in _cuda.bind_sm90(fakes.handle, None)
    assert "version 2 of its C interface of sm90-v1; this build needs version 1" in _cuda.bind_sm90(
        fakes.handle, fakes.sm90_table(version=2)
    )
    assert "other structs" in _cuda.bind_sm90(fakes.handle, fakes.sm90_table(results_bytes=8))


def test_another_device_is_named(fake_sm90: Fakes) -> None:
    assert _cuda._question(fake_sm90.handle, "sm90_probe", ctypes.c_int64(1)) == ""
    fake_sm90.handle.fake_cuda_set(209, 0, ctypes.c_int64(0))
    reason = _cuda._question(fake_sm90.handle, "sm90_probe", ctypes.c_int64(1))
    assert reason.startswith("contract sm90-v1 needs compute capability 9.0; device 1: attn-cuda sm90_forward_workspace: a CUDA error")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": "float32"}, "dtype float32"),
    "head dim": ({"head_dim": 32, "value_dim": 32}, "head_dim=32"),
    "bias": ({"features": frozenset({"bias"})}, "bias"),
    "dropout": ({"features": frozenset({"dropout"})}, "dropout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_contract_lacks_is_refused(case: str) -> None:
    changes, reason = REFUSED[case]
    values: dict[str, Any] = {"dtype": "bfloat16", "head_dim": D, "value_dim": D, **changes}
    for engine, device in (("host", "cpu"), ("cuda", "cuda")):
        assert reason in "; ".join(BACKEND.reasons(Problem(op="attention", device=device, contract=SM90, **values), engine))


def test_head_dim_256_runs_on_the_host_alone() -> None:
    for engine, device, refused in (("host", "cpu", False), ("cuda", "cuda", True)):
        problem = Problem(op="attention", device=device, contract=SM90, dtype="bfloat16", head_dim=256, value_dim=256)
        assert any("head_dim=256" in reason for reason in ENGINES[engine].reasons(problem, SM90)) is refused


def test_a_float32_result_and_a_scale_of_zero_are_refused() -> None:
    array = jnp.ones((1, 1, 2, D), jnp.bfloat16)
    forward_fp32 = BACKEND.operators("host")["attention.forward_fp32"]
    with pytest.raises(UnsupportedProblem, match="out of float32"):
        forward_fp32(array, array, array, contract=SM90)
    with pytest.raises(ValueError, match="needs scale"):
        attn_jax_rocm_sink.attention(array, array, array, scale=0.0, contract=SM90, engine="host")
