"""Exported calls: serialized, read back and run with the same bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from attn_jax_rocm_sink import _ffi, attention
from jax_calls import bits, jax_arrays, make_call


def gradients(arrays: dict[str, jax.Array], **options: Any) -> Any:
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}
    rest = {name: array for name, array in arrays.items() if name not in moving}
    (out, lse), pullback = jax.vjp(lambda part: attention(**rest, **part, **options, return_lse=True), moving)
    return out, lse, pullback((jnp.ones_like(out), jnp.ones_like(lse)))[0]


def exported(function: Any, arrays: Any, platforms: list[str] | None = None) -> jax.export.Exported:
    """JAX asks which custom calls are meant to outlive the process."""
    targets = [_ffi.target(handlers, direction) for handlers in _ffi.HANDLERS for direction in ("forward", "backward")]
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(arrays)


def test_an_exported_call_has_the_same_bytes() -> None:
    arrays = jax_arrays(make_call("sinks", "kv_lengths", dtype="bfloat16"))
    read_back = jax.export.deserialize(exported(gradients, arrays).serialize())
    found, expected = jax.tree.leaves(read_back.call(arrays)), jax.tree.leaves(jax.jit(gradients)(arrays))
    assert len(found) == len(expected) == 6
    for a, b in zip(found, expected, strict=True):
        assert bits(a).tobytes() == bits(b).tobytes() and a.dtype == b.dtype


def test_an_exported_call_still_checks_its_lengths() -> None:
    arrays = jax_arrays(make_call("kv_lengths"))
    program = jax.export.deserialize(exported(lambda given: attention(**given), arrays).serialize())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: attn_jax_rocm_sink: .*kv_lengths"):
        jax.block_until_ready(program.call(arrays | {"kv_lengths": jnp.array([3, 10], arrays["kv_lengths"].dtype)}))
