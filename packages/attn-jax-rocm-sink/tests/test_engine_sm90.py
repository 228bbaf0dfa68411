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
from attn_spec import Problem, UnsupportedProblem
from attn_spec._registry import get_backend
from attn_spec._sm90 import score_factor
from attn_spec.testing.asserts import assert_bytes
from engine_fakes import Fakes
from jax_calls import SM90, SM90_CASES, bits, jax_arrays, sm90_call


@pytest.mark.parametrize("case", SM90_CASES)
def test_the_host_engine_has_the_bytes_of_the_reference(case: str) -> None:
    call = sm90_call(case)
    wanted = get_backend("attn_reference").evaluate(call)
    found = BACKEND.evaluate(call, engine="host")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_bytes(found[name], value, f"{case}: {name}")


@pytest.mark.parametrize("case", SM90_CASES)
def test_the_cuda_engine_has_the_bytes_of_its_table(fake_sm90: Fakes, case: str) -> None:
    call = sm90_call(case)
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
    factor = score_factor(call.options.get("scale", call.arrays["q"].shape[-1] ** -0.5))
    assert float(np.float32(forward["factor"])) == pytest.approx(factor, rel=1e-5) and forward["factor"] == backward["factor"]
    assert [backward[name] for name in ("dlse", "dq", "dk", "dv")] == ["1"] * 4
    for name, value in wanted.items():
        assert_bytes(found[name], value, f"{case}: {name}")


def test_it_is_not_the_default() -> None:
    arrays = jax_arrays(sm90_call("causal"))
    first, second = (attn_jax_rocm_sink.attention(**arrays, contract=contract, engine="host") for contract in (None, SM90))
    assert not np.array_equal(bits(first), bits(second))


@pytest.mark.parametrize(("code", "kind"), [(-2, "INVALID_ARGUMENT"), (700, "INTERNAL")])
def test_errors_of_the_table_become_errors_of_xla(fake_sm90: Fakes, code: int, kind: str) -> None:
    array = jnp.ones((1, 1, 2, 64), jnp.bfloat16)
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
    values: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 64, "value_dim": 64, **changes}
    for engine, device in (("host", "cpu"), ("cuda", "cuda")):
        assert reason in "; ".join(BACKEND.reasons(Problem(op="attention", device=device, contract=SM90, **values), engine))


def test_head_dim_256_runs_on_the_host_alone() -> None:
    for engine, device, refused in (("host", "cpu", False), ("cuda", "cuda", True)):
        problem = Problem(op="attention", device=device, contract=SM90, dtype="bfloat16", head_dim=256, value_dim=256)
        assert any("head_dim=256" in reason for reason in ENGINES[engine].reasons(problem, SM90)) is refused


def test_a_float32_result_and_a_scale_of_zero_are_refused() -> None:
    array = jnp.ones((1, 1, 2, 64), jnp.bfloat16)
    forward_fp32 = BACKEND.operators("host")["attention.forward_fp32"]
    with pytest.raises(UnsupportedProblem, match="out of float32"):
        forward_fp32(array, array, array, contract=SM90)
    with pytest.raises(ValueError, match="needs scale"):
        attn_jax_rocm_sink.attention(array, array, array, scale=0.0, contract=SM90, engine="host")
