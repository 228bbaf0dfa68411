"""JAX transformations move no bit: jit, vmap, scan, checkpoint, 64-bit mode; integer operands have no gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes
from jax_calls import FEATURES, bits, jax_arrays, make_call


def same(candidate: Any, expected: Any, what: str) -> None:
    left, right = jax.tree.leaves(candidate), jax.tree.leaves(expected)
    assert len(left) == len(right) > 0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert_bytes(bits(a), bits(b), f"{what} [{index}]")


def loss(arrays: dict[str, Any], moving: dict[str, Any], **options: Any) -> jax.Array:
    out, lse = attention(**{**arrays, **moving}, **{**options, "return_lse": True})
    weight = jnp.arange(1, out.size + 1, dtype=jnp.float32).reshape(out.shape)
    return (out.astype(jnp.float32) * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()


def gradients(arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks", "bias") if name in arrays}
    return jax.grad(lambda part: loss(arrays, part, **options))(moving)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature", FEATURES)
def test_eager_equals_jit(feature: str, dtype: str) -> None:
    call = make_call(feature, dtype=dtype)
    arrays = jax_arrays(call)
    eager = attention(**arrays, **call.options)
    same(eager, jax.jit(lambda given: attention(**given, **call.options))(arrays), feature)


def test_differentiating_moves_no_output_bit() -> None:
    call = make_call("sinks", "bias", dtype="bfloat16")
    forward = BACKEND.evaluate(make_call("sinks", "bias", dtype="bfloat16", gradient=False))
    both = BACKEND.evaluate(call)
    for name in ("out", "lse"):
        assert_bytes(both[name], forward[name], name)


def test_each_gradient_has_the_dtype_of_its_input() -> None:
    arrays = jax_arrays(make_call("sinks_low", "bias_keys", dtype="float16"))
    found = gradients(arrays, {})
    assert {name: value.dtype for name, value in found.items()} == {name: arrays[name].dtype for name in found}
    assert set(found) == {"q", "k", "v", "sinks", "bias"}
    assert found["bias"].dtype == np.float32 and found["sinks"].dtype == np.float16


def test_a_gradient_alone_has_the_bits_of_all_together() -> None:
    arrays = jax_arrays(make_call("sinks", "bias", dtype="bfloat16"))
    together = gradients(arrays, {})
    for name, expected in together.items():
        alone = jax.jit(jax.grad(lambda part, name=name: loss(arrays, {name: part})))(arrays[name])
        same(alone, expected, name)


def stacked(arrays: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: jnp.stack([arrays[name], arrays[name][::-1], -arrays[name]]) for name in names}


@pytest.mark.parametrize("names", [("q", "k", "v"), ("q",), ("k", "v"), ("v",), ("sinks",), ("bias",), ("q", "sinks")])
def test_vmap_equals_a_loop(names: tuple[str, ...]) -> None:
    arrays = jax_arrays(make_call("sinks", "bias", dtype="bfloat16"))
    many = stacked(arrays, names)
    loop = [attention(**{**arrays, **{name: many[name][i] for name in names}}, return_lse=True) for i in range(3)]
    mapped = jax.jit(jax.vmap(lambda part: attention(**{**arrays, **part}, return_lse=True)))(many)
    same(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop), f"vmap {names}")
    with pytest.raises(ContractViolation):
        same(jax.tree.map(lambda leaf: leaf[::-1], mapped), mapped, "items in another order")


def test_vmap_of_grad_equals_a_loop() -> None:
    arrays = jax_arrays(make_call("sinks", "key_padding_mask"))
    many = stacked(arrays, ("q", "v"))
    each = jax.jit(jax.grad(lambda moving: loss(arrays, moving)))
    loop = [each({name: many[name][i] for name in many}) for i in range(3)]
    mapped = jax.vmap(each)(many)
    same(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop), "vmap of grad")


def test_nested_vmap_and_traced_lengths() -> None:
    arrays = jax_arrays(make_call())
    lengths = jnp.array([[[9, 4], [0, 1]], [[3, 3], [8, 9]]])
    mapped = jax.vmap(jax.vmap(lambda item: attention(**arrays, kv_lengths=item)))(lengths)
    for index in np.ndindex(2, 2):
        same(mapped[index], attention(**arrays, kv_lengths=lengths[index]), f"lengths {lengths[index]}")


def test_a_traced_scalar_serves_every_batch_item() -> None:
    arrays = jax_arrays(make_call())
    for name, value in (("kv_lengths", 4), ("q_start", 2), ("k_start", 3)):
        known = attention(**arrays, **{name: value})
        same(jax.jit(lambda traced, name=name: attention(**arrays, **{name: traced}))(value), known, name)


def test_jacobian_has_the_rows_of_single_gradients() -> None:
    arrays = jax_arrays(make_call())
    rest = {name: arrays[name] for name in ("k", "v")}
    jacobian = jax.jacrev(lambda q: attention(q, **rest))(arrays["q"])
    row = jax.grad(lambda q: attention(q, **rest)[1, 2, 3, 0])(arrays["q"])
    same(jacobian[1, 2, 3, 0], row, "jacrev")


def test_checkpoint_moves_no_bit() -> None:
    call = make_call("sinks", "kv_lengths", "key_padding_mask", "dropout", dtype="bfloat16")
    arrays = jax_arrays(call)
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks")}
    rest = {name: arrays[name] for name in arrays if name not in moving}
    options = {name: call.options[name] for name in ("dropout_p", "dropout_seed")}
    plain = jax.jit(jax.grad(lambda part, rest: loss(rest, part, **options)))
    remat = jax.jit(jax.grad(jax.checkpoint(lambda part, rest: loss(rest, part, **options))))
    same(remat(moving, rest), plain(moving, rest), "checkpoint")


def kernel_calls(jaxpr: Any) -> list[str]:
    """Directions of the kernels that a program calls, in order; its compiled form may have fewer, as equal calls become one."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "attn_jax_rocm_sink":
            found.append(equation.params["signature"].direction)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found += kernel_calls(inner) if hasattr(inner, "eqns") else []
    return found


def test_a_policy_that_saves_the_results_spares_the_second_forward() -> None:
    from attn_jax_rocm_sink._vjp import RESIDUALS

    arrays = jax_arrays(make_call("sinks", dtype="bfloat16"))
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks")}

    def graded(policy: Any) -> Any:
        return jax.value_and_grad(jax.checkpoint(lambda part: loss({}, part), policy=policy))

    again, saved = graded(jax.checkpoint_policies.nothing_saveable), graded(jax.checkpoint_policies.save_only_these_names(RESIDUALS))
    names = ["forward", "backward"]
    assert kernel_calls(jax.make_jaxpr(again)(moving)) == [names[0], *names]
    assert kernel_calls(jax.make_jaxpr(saved)(moving)) == names
    same(jax.jit(saved)(moving), jax.jit(again)(moving), "saved results")


def test_shapes_are_known_without_running() -> None:
    arrays = jax_arrays(make_call("sinks", dtype="float16"))
    out, lse = jax.eval_shape(lambda given: attention(**given, return_lse=True), arrays)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 5, 3), jnp.float16, (2, 4, 5), jnp.float32)
    shapes = jax.eval_shape(lambda given: gradients(given, {}), arrays)
    assert {name: (array.shape, array.dtype) for name, array in shapes.items()} == {
        name: (arrays[name].shape, arrays[name].dtype) for name in shapes
    }


def test_donated_inputs_move_no_bit() -> None:
    arrays = jax_arrays(make_call("sinks"))
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks")}
    expected = jax.jit(lambda part: gradients(part, {}))(moving)
    donated = jax.jit(lambda part: gradients(part, {}), donate_argnums=0)({name: jnp.copy(array) for name, array in moving.items()})
    same(donated, expected, "donated")


def test_scan_equals_a_loop_with_integer_operands_under_grad() -> None:
    arrays = jax_arrays(make_call())
    k, v = arrays["k"], jnp.concatenate([arrays["v"]] * 2, axis=-1)
    lengths = jnp.array([[9, 4], [5, 9]], jnp.int32)
    mask = jnp.arange(9)[None].repeat(2, 0) != 3

    def layer(x: jax.Array, used: jax.Array) -> tuple[jax.Array, None]:
        return attention(x, k, v, kv_lengths=used, key_padding_mask=mask, q_start=used - 5), None

    def scanned(x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(layer), x, lengths)[0].sum()

    def looped(x: jax.Array) -> jax.Array:
        for used in lengths:
            x, _ = layer(x, used)
        return x.sum()

    same(jax.jit(jax.value_and_grad(scanned))(arrays["q"]), jax.jit(jax.value_and_grad(looped))(arrays["q"]), "scan")


def test_integer_operands_have_float0_gradients() -> None:
    arrays = jax_arrays(make_call("kv_lengths", "q_start", "key_padding_mask"))
    found = jax.jit(jax.grad(lambda part: loss({}, part), allow_int=True))(arrays)
    for name in ("kv_lengths", "q_start", "key_padding_mask"):
        assert found[name].dtype == jax.dtypes.float0 and found[name].shape == arrays[name].shape
    assert np.abs(np.asarray(found["q"])).max() > 0


def test_seeds_traced_and_known_draw_the_same() -> None:
    arrays = jax_arrays(make_call())
    known = attention(**arrays, dropout_p=0.5, dropout_seed=41)
    traced = jax.jit(lambda seed: attention(**arrays, dropout_p=0.5, dropout_seed=seed))
    same(traced(jnp.int32(41)), known, "int32")
    same(traced(jnp.uint32(41)), known, "uint32")
    negative = attention(**arrays, dropout_p=0.5, dropout_seed=2**64 - 3)
    same(traced(jnp.int32(-3)), negative, "sign extension")
    same(attention(**arrays, dropout_p=0.5, dropout_seed=np.array(-3)), negative, "int64")
    with pytest.raises(ContractViolation):
        same(negative, known, "another seed")


@pytest.mark.parametrize("feature", ["plain", "kv_lengths", "k_start", "sinks", "dropout"])
def test_64_bit_mode_moves_no_bit(feature: str) -> None:
    call = make_call(feature, dtype="bfloat16")
    expected = BACKEND.evaluate(call)
    with jax.enable_x64(True):
        assert jnp.asarray(np.array([1])).dtype == np.int64
        arrays = jax_arrays(call)
        out, lse = jax.jit(lambda given: attention(**given, **call.options))(arrays)
        wide = {name: array.astype(jnp.int64) for name, array in arrays.items() if array.dtype == np.int32}
        again = jax.jit(lambda given: attention(**given, **call.options))(arrays | wide)
        found = BACKEND.evaluate(call)
    same((out, lse), again, "int64 operands")
    assert out.dtype.name == "bfloat16" and lse.dtype == np.float32
    for name, value in expected.items():
        assert_bytes(found[name], value, name)
    assert_bytes(bits(out), expected["out"], "out")


def test_64_bit_mode_takes_a_traced_seed_of_64_bits() -> None:
    arrays = jax_arrays(make_call())
    seed = 2**62 + 5
    known = attention(**arrays, dropout_p=0.5, dropout_seed=seed)
    with jax.enable_x64(True):
        traced = jax.jit(lambda value: attention(**arrays, dropout_p=0.5, dropout_seed=value))
        same(traced(jnp.int64(seed)), known, "int64")
        same(traced(jnp.uint64(seed)), known, "uint64")
        negative = traced(jnp.int64(-7))
    same(negative, attention(**arrays, dropout_p=0.5, dropout_seed=2**64 - 7), "negative")
