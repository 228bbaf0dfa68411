"""vmap folds the mapped axis into the batch, and has the bytes of a loop where it cannot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention
from attn_spec.testing.asserts import assert_bytes
from jax_calls import bits, jax_arrays, make_call


def same(found: Any, expected: Any) -> None:
    left, right = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(left) == len(right) > 0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert_bytes(bits(a), bits(b), str(index))


def gradients(arrays: dict[str, jax.Array], wanted: tuple[str, ...], **options: Any) -> Any:
    moving = {name: arrays[name] for name in wanted}
    rest = {name: array for name, array in arrays.items() if name not in moving}
    (out, lse), pullback = jax.vjp(lambda part: attention(**rest, **part, **options, return_lse=True), moving)
    return out, lse, pullback((jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape), jnp.ones_like(lse)))[0]


def calls(function: Any, *arguments: Any) -> tuple[int, int]:
    """Calls of the kernels, forward and backward, and loops in the compiled program."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return text.count('custom_call_target="attn_jax_rocm_sink_host_'), text.count(" while(")


CASES = {
    "all": ({"q": 0, "k": 0, "v": 0, "key_padding_mask": 0}, ("q", "k", "v", "sinks"), {}),
    "an inner axis": ({"q": 2, "v": -1}, ("q", "k", "v", "sinks"), {}),
    "mask alone": ({"key_padding_mask": 1}, ("q", "k", "v", "sinks"), {}),
    "shared bias": ({"q": 0, "bias": None}, ("q", "k", "bias"), {}),
    "own bias": ({"bias": 0}, ("q", "bias", "sinks"), {}),
    "own sinks": ({"sinks": 0, "k": 1}, ("k", "sinks"), {}),
    "dropout": ({"q": 0}, ("q", "k", "v", "sinks"), {"dropout_p": 0.3, "dropout_seed": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_under_vmap_equal_a_loop(case: str) -> None:
    axes, wanted, options = CASES[case]
    features = ["sinks", "key_padding_mask", *(["bias"] if "bias" in axes else [])]
    arrays = jax_arrays(make_call(*features, dtype="bfloat16"))
    many = {n: jnp.stack([arrays[n], arrays[n][::-1], jnp.flip(arrays[n], -1)], axis) for n, axis in axes.items() if axis is not None}
    rest = {name: array for name, array in arrays.items() if name not in many}
    in_axes = {name: axes.get(name) for name in (*many, *rest)}
    mapped = jax.jit(jax.vmap(lambda given: gradients(given, wanted, **options), in_axes=(in_axes,)))(many | rest)
    each = jax.jit(lambda given: gradients(given, wanted, **options))
    loop = [each(rest | {name: jnp.take(array, i, axes[name]) for name, array in many.items()}) for i in range(3)]
    same(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop))


def test_a_mapped_call_is_one_call() -> None:
    arrays = jax_arrays(make_call("key_padding_mask"))
    many = {name: jnp.stack([array] * 3) for name, array in arrays.items()}
    assert calls(jax.vmap(lambda given: gradients(given, ("q", "k", "v"))), many) == (2, 0)
    nested = {name: jnp.stack([array] * 2) for name, array in many.items()}
    assert calls(jax.vmap(jax.vmap(lambda given: gradients(given, ("q", "k", "v")))), nested) == (2, 0)


def test_nested_maps_over_different_arrays_equal_a_loop() -> None:
    arrays = jax_arrays(make_call("sinks", "bias"))
    q, v = (jnp.stack([arrays[name], -arrays[name]]) for name in ("q", "v"))
    each = jax.jit(lambda q, v: gradients(arrays | {"q": q, "v": v}, ("q", "v", "sinks", "bias")))
    inner = jax.vmap(each, in_axes=(None, 0))
    mapped = jax.jit(jax.vmap(inner, in_axes=(0, None)))(q, v)
    for i, j in np.ndindex(2, 2):
        same(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], mapped), each(q[i], v[j]))


def test_nothing_mapped_is_lost_in_an_empty_batch() -> None:
    q, k = jnp.ones((3, 0, 4, 5, 6)), jnp.ones((0, 2, 9, 6))
    assert jax.vmap(lambda q: attention(q, k, k))(q).shape == (3, 0, 4, 5, 6)
