"""Sharded calls on eight CPU devices; ``test_jax_sharding.py`` runs this file in a process that has them.

Every result is compared, byte for byte, with the same call on one device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention
from attn_spec import UnsupportedProblem
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_calls import bits

B, H, K, S, T, D, V = 8, 8, 4, 7, 9, 6, 3
LAYOUTS = {
    "2 batch": ((2,), ("data",), "data", None),
    "2 heads": ((2,), ("model",), None, "model"),
    "4 both": ((2, 2), ("data", "model"), "data", "model"),
    "8 batch": ((8,), ("data",), "data", None),
    "8 both": ((2, 4), ("data", "model"), "data", "model"),
    "8 batch over two axes": ((2, 4), ("data", "model"), ("data", "model"), None),
    "4 heads of 8 devices": ((2, 4), ("data", "model"), None, "model"),
}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\(")


def random_arrays(dtype: Any = jnp.float32, bias: tuple[int, ...] | None = (1, H, S, T)) -> dict[str, jax.Array]:
    rng = np.random.default_rng(7)

    def normal(*shape: int, kind: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32), kind)

    arrays = {"q": normal(B, H, S, D), "k": normal(B, K, T, D), "v": normal(B, K, T, V), "sinks": normal(H, kind=jnp.float32)}
    arrays |= {"dout": normal(B, H, S, V), "dlse": normal(B, H, S, kind=jnp.float32)}
    arrays["kv_lengths"] = jnp.asarray(rng.integers(3, T + 1, B), jnp.int32)
    return arrays if bias is None else arrays | {"bias": normal(*bias)}


def forward(arrays: dict[str, jax.Array], **options: Any) -> Any:
    operands = {name: array for name, array in arrays.items() if name not in ("dout", "dlse")}
    return attention(**operands, **options, return_lse=True)


def backward(arrays: dict[str, jax.Array], **options: Any) -> Any:
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks", "bias") if name in arrays}
    rest = {name: array for name, array in arrays.items() if name not in moving}
    outputs, pullback = jax.vjp(lambda part: forward(rest | part, **options), moving)
    (gradients,) = pullback((arrays["dout"].astype(outputs[0].dtype), arrays["dlse"]))
    return gradients


DROPPING_FORWARD, DROPPING_BACKWARD = (partial(function, dropout_p=0.3, dropout_seed=11) for function in (forward, backward))
"""Named, so that JAX compiles them for one device once."""


def specs_of(arrays: dict[str, jax.Array], batch: Any, heads: Any) -> dict[str, P]:
    specs = {"sinks": P(heads), "kv_lengths": P(batch)}
    if "bias" in arrays:
        specs["bias"] = P(batch if arrays["bias"].shape[0] > 1 else None, heads if arrays["bias"].shape[1] > 1 else None)
    return {name: specs.get(name, P(batch, heads)) for name in arrays}


def placed(arrays: dict[str, jax.Array], mesh: Any, batch: Any, heads: Any) -> dict[str, jax.Array]:
    specs = specs_of(arrays, batch, heads)
    return {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}


def mesh_of(layout: str, kind: AxisType = AxisType.Auto) -> tuple[Any, Any, Any]:
    shape, names, batch, heads = LAYOUTS[layout]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names)), batch, heads


def compiled(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Counter[str]]:
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), Counter(COLLECTIVE.findall(program.as_text()))


def same(found: Any, expected: Any) -> None:
    left, right = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(left) == len(right) > 0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert_bytes(bits(a), bits(b), str(index))


def test_there_are_eight_devices() -> None:
    assert len(jax.devices()) == 8


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*((layout, AxisType.Auto) for layout in LAYOUTS), *((layout, AxisType.Explicit) for layout in ("2 heads", "8 both"))],
    ids=str,
)
def test_a_sharded_call_has_the_bytes_of_one_device(layout: str, kind: AxisType) -> None:
    mesh, batch, heads = mesh_of(layout, kind)
    arrays = random_arrays()
    many = placed(arrays, mesh, batch, heads)
    outputs, used = compiled(DROPPING_FORWARD, many)
    same(outputs, jax.jit(DROPPING_FORWARD)(arrays))
    assert not used
    assert outputs[0].sharding.is_equivalent_to(NamedSharding(mesh, P(batch, heads)), 4)
    gradients, used = compiled(DROPPING_BACKWARD, many)
    same(gradients, jax.jit(DROPPING_BACKWARD)(arrays))
    assert used == ({"all-gather": 2} if batch else {})  # dsinks and dbias
    for name, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(many[name].sharding, gradient.ndim), name


BIASES = [(B, H, S, T), (B, 1, S, T), (1, 1, S, T), (1, 1, 1, T), (1, H, S, 1)]


@pytest.mark.parametrize(("shape", "layout"), [*((shape, "8 both") for shape in BIASES), (BIASES[1], "2 heads")], ids=str)
def test_every_bias_gradient_has_the_bytes_of_one_device(shape: tuple[int, ...], layout: str) -> None:
    mesh, batch, heads = mesh_of(layout)
    arrays = random_arrays(jnp.bfloat16, shape)
    gradients, used = compiled(backward, placed(arrays, mesh, batch, heads))
    same(gradients, jax.jit(backward)(arrays))
    gathers = bool(batch) + (bool(batch) and shape[0] == 1) + (bool(heads) and shape[1] == 1)
    assert used == ({"all-gather": gathers} if gathers else {})


def test_without_sums_over_the_batch_nothing_is_sent() -> None:
    mesh, batch, heads = mesh_of("8 both")
    arrays = random_arrays(jnp.bfloat16, None)
    del arrays["sinks"]
    gradients, used = compiled(backward, placed(arrays, mesh, batch, heads))
    same(gradients, jax.jit(backward)(arrays))
    assert not used


def test_an_eager_call_stays_sharded() -> None:
    mesh, batch, heads = mesh_of("8 both")
    arrays = random_arrays()
    out, lse = forward(placed(arrays, mesh, batch, heads))
    same((out, lse), forward(arrays))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(batch, heads)), 4)


@pytest.mark.parametrize("spec", [P(), P(None, None, "model")], ids=str)
def test_a_cotangent_that_lies_elsewhere_is_moved(spec: P) -> None:
    mesh, batch, heads = mesh_of("8 both")
    arrays = random_arrays()
    arrays["dout"] = jnp.concatenate([arrays["dout"]] * 4, axis=2)[:, :, :8]
    arrays["q"] = jnp.concatenate([arrays["q"]] * 2, axis=2)[:, :, :8]
    arrays["dlse"] = jnp.concatenate([arrays["dlse"]] * 2, axis=2)[:, :, :8]
    del arrays["bias"]
    many = placed(arrays, mesh, batch, heads) | {"dout": jax.device_put(arrays["dout"], NamedSharding(mesh, spec))}
    same(jax.jit(backward)(many), jax.jit(backward)(arrays))


def test_a_result_may_be_wanted_sharded_by_sequence() -> None:
    mesh, batch, heads = mesh_of("8 batch")
    arrays = random_arrays()
    arrays["q"] = jnp.concatenate([arrays["q"]] * 2, axis=2)[:, :, :8]
    del arrays["bias"]
    wanted = (NamedSharding(mesh, P(None, None, "data")), NamedSharding(mesh, P()))
    found = jax.jit(forward, out_shardings=wanted)(
        {**placed(arrays, mesh, batch, heads), "q": jax.device_put(arrays["q"], NamedSharding(mesh, P()))}
    )
    same(found, jax.jit(forward)(arrays))


REFUSED = [
    ({"q": P(None, None, "data")}, "the sequence axis of q is sharded over mesh axis data"),
    ({"k": P(None, None, "data")}, "the sequence axis of k is sharded over mesh axis data"),
    ({"q": P(None, None, None, "data")}, "the head dim of q is sharded over mesh axis data"),
    ({"q": P(None, ("data", "model"))}, "heads are sharded 8 ways over mesh axis data, model and there are 4 kv heads: the 2 query heads"),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("specs", "reason"), REFUSED, ids=[reason[:30] for _, reason in REFUSED])
def test_other_shardings_are_refused_with_the_reason(specs: dict[str, P], reason: str, kind: AxisType) -> None:
    mesh, _, _ = mesh_of("8 both", kind)
    q, k = jnp.ones((B, H, 8, D)), jnp.ones((B, K, 8, D))
    arrays = {"q": q, "k": k, "v": k}
    many = {name: jax.device_put(array, NamedSharding(mesh, specs.get(name, P()))) for name, array in arrays.items()}
    with pytest.raises(
        ValueError if kind == AxisType.Explicit else jax.errors.JaxRuntimeError, match=f"batch and kv heads alone; {reason}"
    ):
        jax.block_until_ready(jax.jit(forward)(many))


@pytest.mark.parametrize("layout", ["2 batch", "8 both", "8 batch over two axes"])
def test_shard_map_has_the_bytes_of_one_device(layout: str) -> None:
    mesh, batch, heads = mesh_of(layout)
    arrays = random_arrays(jnp.bfloat16)
    specs = specs_of(arrays, batch, heads)
    results = {name: specs[name] for name in ("q", "k", "v", "sinks", "bias")}
    inside = jax.shard_map(backward, mesh=mesh, in_specs=(specs,), out_specs=results)
    gradients, used = compiled(inside, arrays)
    expected = jax.jit(backward)(arrays)
    same(gradients, expected)
    assert used == ({"all-gather": 2} if batch else {})
    outputs, used = compiled(jax.shard_map(forward, mesh=mesh, in_specs=(specs,), out_specs=(P(batch, heads), P(batch, heads))), arrays)
    same(outputs, jax.jit(forward)(arrays))
    assert not used


def outside(mesh: Any, batch: Any, heads: Any, **options: Any) -> Callable[[dict[str, jax.Array]], Any]:
    """Gradients of a sharded map, taken outside it."""

    def run(arrays: dict[str, jax.Array]) -> Any:
        moving = {name: arrays[name] for name in ("q", "k", "v", "sinks")}
        rest = {"kv_lengths": arrays["kv_lengths"]}
        specs = specs_of(moving | rest, batch, heads)
        mapped = jax.shard_map(forward, mesh=mesh, in_specs=(specs,), out_specs=(P(batch, heads), P(batch, heads)), **options)
        _, pullback = jax.vjp(lambda part: mapped(rest | part), moving)
        return pullback((arrays["dout"], arrays["dlse"]))[0]

    return run


def test_a_sum_in_another_order_is_found() -> None:
    """JAX's own sum adds what each device has added up, four batch items on each of two."""
    mesh, batch, heads = mesh_of("2 batch")
    arrays = random_arrays(bias=None)
    expected = jax.jit(backward)(arrays)
    same(jax.jit(outside(mesh, batch, heads))(arrays), expected)
    reduced, used = compiled(outside(mesh, batch, heads, check_vma=False), arrays)
    assert used["all-reduce"] > 0
    same({name: reduced[name] for name in "qkv"}, {name: expected[name] for name in "qkv"})
    with pytest.raises(ContractViolation):
        same(reduced["sinks"], expected["sinks"])


def test_a_split_group_of_heads_is_found() -> None:
    """Two devices that each take half of every group, and add their dk: not the chain over the group."""
    arrays = random_arrays(bias=None)
    expected = jax.jit(backward)(arrays)
    halves = []
    for half in range(2):
        heads = jnp.arange(H).reshape(K, 2)[:, half]
        part = {name: arrays[name][:, heads] for name in ("q", "dout", "dlse")} | {"sinks": arrays["sinks"][heads]}
        halves.append(jax.jit(backward)(arrays | part))
    with pytest.raises(ContractViolation):
        same(halves[0]["k"] + halves[1]["k"], expected["k"])
    np.testing.assert_allclose(halves[0]["k"] + halves[1]["k"], expected["k"], rtol=1e-4, atol=1e-5)


def test_k_and_v_that_every_device_shares_are_refused_in_shard_map() -> None:
    mesh, _, _ = mesh_of("2 heads")
    arrays = {name: array for name, array in random_arrays(bias=None).items() if name not in ("kv_lengths", "sinks")}
    specs = {name: P() if name in "kv" else P(None, "model") for name in arrays}
    with pytest.raises(ValueError, match="k is the same on all devices of mesh axis model and other arrays differ"):
        jax.jit(jax.shard_map(backward, mesh=mesh, in_specs=(specs,), out_specs={name: specs[name] for name in "qkv"}))(arrays)


def test_an_engine_of_another_platform_is_refused_as_on_one_device() -> None:
    """Not from within XLA, which lowers the kernels of several devices."""
    arrays = placed(random_arrays(bias=None), *mesh_of("8 both"))
    with pytest.raises(UnsupportedProblem, match=r"lowering for platform cpu \(supported: rocm by engine hip"):
        jax.jit(lambda given: attention(given["q"], given["k"], given["v"], engine="hip"))(arrays)


def test_vmap_of_sharded_calls_equals_a_loop() -> None:
    mesh, batch, heads = mesh_of("8 both")
    arrays = random_arrays(bias=None)
    many = placed(arrays, mesh, batch, heads)
    pairs = {name: jnp.stack([many[name], -many[name]]) for name in ("q", "v")}
    mapped = jax.jit(jax.vmap(lambda own: backward(many | own)))(pairs)
    loop = [jax.jit(backward)(arrays | {name: sign * arrays[name] for name in ("q", "v")}) for sign in (1, -1)]
    same(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop))


def test_the_older_partitioner_gives_the_same_bytes() -> None:
    mesh, batch, heads = mesh_of("8 both")
    arrays = random_arrays()
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        many = placed(arrays, mesh, batch, heads)
        outputs, used = compiled(forward, many)
        gradients, sums = compiled(backward, many)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    same((outputs, gradients), (jax.jit(forward)(arrays), jax.jit(backward)(arrays)))
    assert not used and sums == {"all-gather": 2}
