"""Exported calls: serialized, read back and run with the same bytes; lowered for GPUs on a machine without one."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from attn_jax_rocm_sink import _ffi, attention
from engine_fakes import Fakes
from jax_calls import bits, jax_arrays, make_call


def gradients(arrays: dict[str, jax.Array], **options: Any) -> Any:
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}
    rest = {name: array for name, array in arrays.items() if name not in moving}
    (out, lse), pullback = jax.vjp(lambda part: attention(**rest, **part, **options, return_lse=True), moving)
    return out, lse, pullback((jnp.ones_like(out), jnp.ones_like(lse)))[0]


def out_gradients(arrays: dict[str, jax.Array], engine: str) -> Any:
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}
    out, pullback = jax.vjp(lambda part: attention(**part, engine=engine), moving)
    return out, pullback(jnp.ones_like(out))[0]


def exported(function: Any, engine: str, arrays: Any, platforms: list[str] | None = None) -> jax.export.Exported:
    """JAX asks which custom calls are meant to outlive the process."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(_ffi.target(engine, direction)) for direction in ("forward", "backward")]
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(arrays)


def test_an_exported_call_has_the_same_bytes() -> None:
    arrays = jax_arrays(make_call("sinks", "kv_lengths", dtype="bfloat16"))
    read_back = jax.export.deserialize(exported(gradients, "host", arrays).serialize())
    found, expected = jax.tree.leaves(read_back.call(arrays)), jax.tree.leaves(jax.jit(gradients)(arrays))
    assert len(found) == len(expected) == 6
    for a, b in zip(found, expected, strict=True):
        assert bits(a).tobytes() == bits(b).tobytes() and a.dtype == b.dtype


def test_an_exported_call_still_checks_its_lengths() -> None:
    arrays = jax_arrays(make_call("kv_lengths"))
    program = jax.export.deserialize(exported(lambda given: attention(**given), "host", arrays).serialize())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: attn_jax_rocm_sink: .*kv_lengths"):
        jax.block_until_ready(program.call(arrays | {"kv_lengths": jnp.array([3, 10], arrays["kv_lengths"].dtype)}))


def lowered(engine: str, platform: str, dtype: str, *features: str) -> str:
    arrays = jax_arrays(make_call(*features, dtype=dtype))
    arrays |= {name: jnp.tile(arrays[name][..., :2], 4) for name in ("q", "k", "v")}  # head dims that every engine takes
    return str(exported(lambda given: out_gradients(given, engine), engine, arrays, [platform]).mlir_module())


@pytest.mark.parametrize("features", [(), ("sinks",)], ids=["no sinks", "sinks"])
def test_cuda_code_calls_the_cuda_engine_and_keeps_the_sink(fake_cuda: Fakes, features: tuple[str, ...]) -> None:
    check(lowered("cuda", "cuda", "bfloat16", *features), "cuda", bool(features))


@pytest.mark.parametrize("features", [(), ("sinks",)], ids=["no sinks", "sinks"])
def test_rocm_code_calls_the_ck_engine_and_keeps_the_sink(fake_ck: Fakes, features: tuple[str, ...]) -> None:
    check(lowered("ck", "rocm", "bfloat16", *features), "ck", bool(features))


def check(text: str, engine: str, sinks: bool) -> None:
    for direction in ("forward", "backward"):
        calls = [line for line in text.splitlines() if f"@{_ffi.target(engine, direction)}(" in line]
        assert len(calls) == 1, f"{len(calls)} calls of {engine} {direction}"
        names = calls[0].split('operands = "')[1].split('"')[0].split(" ")
        assert {"q", "k", "v"} <= set(names) and ("sinks" in names) == sinks
    assert ("dsinks" in text) == sinks
    assert "attn_jax_rocm_sink_host_" not in text
