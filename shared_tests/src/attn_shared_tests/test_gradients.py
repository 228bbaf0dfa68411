"""Gradients: the bytes of the reference, a float64 oracle, known answers; any subset of them, through LSE, in the dtype of the input."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec._arrays import from_float32, to_float32
from attn_spec.testing.asserts import assert_close, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner
from attn_spec.testing.strategies import values

from attn_shared_tests import faulty, oracle, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.test_forward import check_bytes, column

INPUTS = ("q", "k", "v", "sinks", "bias")
SUBSETS = [subset for size in range(1, 6) for subset in itertools.combinations(INPUTS, size)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
BIAS_SHAPES = ((1, 1, 1, 6), (1, 4, 3, 6), (2, 1, 3, 1), (2, 4, 3, 6), (1, 1, 1, 1))
GROUPS = ((6, 2), (8, 1), (12, 3), (5, 5))

KNOWN: dict[str, tuple[dict[str, Any], dict[str, list[float]]]] = {
    "an empty row gives no gradient": (
        {
            "q": np.eye(2, dtype=np.float32)[None, None],
            "k": np.eye(2, dtype=np.float32)[None, None],
            "v": np.array([[[[1, 2], [3, 4]]]], np.float32),
            "bias": np.array([[[[0, -np.inf], [-np.inf, -np.inf]]]], np.float32),
            "causal": False,
        },
        {"q": [0, 0, 0, 0], "k": [0, 0, 0, 0], "v": [1, 1, 0, 0]},
    ),
    "bottom-right causal with more queries than keys": (
        {"q": column(1, 1, 1, 1, 1), "k": column(0, np.log(3)), "v": column(1, 5)},
        {"q": [0, 0, 0, 0, 0.8239592], "k": [-0.75, 0.75], "v": [1.25, 0.75]},
    ),
    "a learnable sink": ({"q": column(0), "k": column(0, 0), "v": column(3, 6), "sinks": np.zeros(1, np.float32)}, {"sinks": [-1]}),
    "a large sink": (
        {"q": column(0), "k": column(0, 0), "v": column(3, 6), "sinks": np.full(1, 20, np.float32)},
        {"sinks": [-9 / (2 + np.exp(20))]},
    ),
    "head groups": (
        {
            "q": np.zeros((1, 4, 1, 1), np.float32),
            "k": np.zeros((1, 2, 1, 1), np.float32),
            "v": np.array([[[[10]], [[20]]]], np.float32),
            "dout": np.array([[[[1]], [[2]], [[4]], [[8]]]], np.float32),
        },
        {"q": [0, 0, 0, 0], "k": [0, 0], "v": [3, 12]},
    ),
    "bias alone": (
        {
            "q": np.zeros((2, 1, 2, 1), np.float32),
            "k": np.zeros((2, 1, 2, 1), np.float32),
            "v": np.array([[[[0], [1]]]] * 2, np.float32),
            "bias": np.zeros((1, 1, 1, 2), np.float32),
            "causal": False,
        },
        {"bias": [-1, 1]},
    ),
}


def check_known(evaluate: Evaluate, name: str) -> None:
    arguments, expected = KNOWN[name]
    arguments = dict(arguments)
    dout = arguments.pop("dout", None)
    rows = (*arguments["q"].shape[:3], arguments["v"].shape[3])
    call = problems.edited(problems.attention(batch=1, queries=1), scale=1.0, **arguments)
    call = replace(call, wrt=tuple(expected), cotangents={"out": np.ones(rows, np.float32) if dout is None else dout})
    found = evaluate(call)
    for gradient, numbers in expected.items():
        assert_close(found[f"d{gradient}"].reshape(-1), np.array(numbers), f"{name}: d{gradient}", tolerance=1e-6)


def check_oracle(evaluate: Evaluate, call: Call) -> None:
    found, expected = evaluate(call), oracle.attention(call)
    for name in call.wrt:
        dtype = "bfloat16" if found[f"d{name}"].dtype.names else str(found[f"d{name}"].dtype)
        assert_close(found[f"d{name}"], expected[f"d{name}"], f"d{name}", tolerance=TOLERANCE[dtype])


def check_subset(evaluate: Evaluate, subset: tuple[str, ...]) -> None:
    call = problems.attention(batch=1, queries=3, keys=6, with_sinks=True, bias_shape=(1, 4, 1, 6), wrt=INPUTS)
    every, some = evaluate(call), evaluate(replace(call, wrt=subset))
    assert set(some) == {"out", "lse", *(f"d{name}" for name in subset)}, sorted(some)
    assert_same(some, every, f"gradients of {', '.join(subset)}", [f"d{name}" for name in subset])


def check_dtype(evaluate: Evaluate, dtype: str) -> None:
    call = problems.attention(batch=1, queries=3, dtype=dtype, with_sinks=True, bias_shape=(1, 4, 3, 7), wrt=INPUTS)
    found = evaluate(call)
    for name in INPUTS:
        gradient, given = found[f"d{name}"], call.arrays[name]
        assert gradient.dtype == given.dtype and gradient.shape == given.shape, (name, gradient.dtype, gradient.shape)


def check_lse_gradient(evaluate: Evaluate) -> None:
    """With a cotangent of LSE alone, dq is that of the log-sum-exp."""
    call = problems.attention(batch=1, queries=3, wrt=("q", "k", "v"))
    call = replace(call, cotangents={"lse": (call.cotangents or {})["lse"]})
    found, expected = evaluate(call), oracle.attention(call)
    for name in ("dq", "dk"):
        assert_close(found[name], expected[name], name, tolerance=2e-5)
    assert_zero(found["dv"], "LSE does not depend on v")


def check_masked_backward(evaluate: Evaluate) -> None:
    """With a cotangent in row 0 alone, causal gradients stop at key 0."""
    call = problems.attention(batch=1, queries=12, keys=12, q_start=0, wrt=("q", "k", "v"))
    dout = np.zeros_like((call.cotangents or {})["out"])
    dout[:, :, 0] = 1
    found = evaluate(replace(call, cotangents={"out": dout}))
    for name in ("dk", "dv"):
        assert_zero(found[name][:, :, 1:], f"{name} past key 0")
    assert found["dv"][:, :, 0].any(), "dv of key 0"
    assert_zero(found["dq"][:, :, 1:], "dq past row 0")


def check_softmax_gradient(evaluate: Evaluate) -> None:
    scores = np.array([[1, 1, 100]], np.float32)
    mask = np.array([[True, True, False]])
    cotangents = {"probs": np.array([[1, 2, 3]], np.float32)}
    found = evaluate(Call("joint_attn_softmax", {"scores": scores, "key_padding_mask": mask}, {}, cotangents, ("scores",)))
    assert_close(found["probs"], np.array([[0.5, 0.5, 0]]), "probs", tolerance=1e-6)
    assert_close(found["dscores"], np.array([[-0.25, 0.25, 0]]), "dscores", tolerance=1e-6)
    assert_zero(found["dscores"][:, 2], "dscores of the dropped key")


def check_large_equal(evaluate: Evaluate, dtype: str) -> None:
    shape = (1, 4, 10, 16)
    thousand = from_float32(np.full(shape, 1000, np.float32), dtype)
    call = problems.attention(batch=1, heads=4, kv_heads=4, queries=10, keys=10, head_dim=16, dtype=dtype, causal=False, wrt=("q", "k"))
    cotangents = {"out": from_float32(np.full(shape, 1e-3, np.float32), dtype)}
    found = evaluate(replace(problems.edited(call, q=thousand, k=thousand, v=thousand), cotangents=cotangents))
    # dP and delta agree to the rounding of ten P * dP of 16 each; dq multiplies that by ten keys of 1000 and the scale of 1/4.
    for name in ("dq", "dk"):
        assert np.abs(to_float32(found[name])).max() < 0.1, name


def skewed(dtype: str, head_dim: int, size: int) -> Call:
    """Strong channels and row norms over four decades, two batch items, GQA."""
    rng = np.random.default_rng(3)
    call = problems.attention(batch=2, heads=8, kv_heads=1, queries=size, keys=size, head_dim=head_dim, dtype=dtype, wrt=("q", "k", "v"))
    return problems.edited(call, **{name: values(rng, call.arrays[name].shape, dtype, "skewed") for name in ("q", "k", "v")})


def check_skewed(evaluate: Evaluate, call: Call) -> None:
    """Each item is as alone, and the oracle agrees."""
    both = evaluate(call)
    check_oracle(lambda _: both, call)
    for item in range(2):
        alone = evaluate(problems.take(call, "B", [item]))
        assert_same(alone, problems.part(both, "B", [item]), f"item {item}")


def check_sink_sum(evaluate: Evaluate) -> None:
    """dsinks is a float32 sum of terms that cancel, here of 4096 rows: 2e-5 of the float64 answer, which terms of bfloat16 miss."""
    sinks = np.zeros(2, np.float32)
    call = problems.attention(
        batch=1, heads=2, kv_heads=1, queries=4096, keys=32, head_dim=16, dtype="bfloat16", sinks=sinks, wrt=("sinks",), causal=False
    )
    call = replace(call, cotangents={"out": (call.cotangents or {})["out"]})
    found = evaluate(call)["dsinks"]
    assert found.dtype == np.float32
    assert_close(found, oracle.attention(call)["dsinks"], "dsinks", tolerance=2e-5)


def _full(**keywords: Any) -> Call:
    return problems.attention(queries=3, keys=6, with_sinks=True, wrt=INPUTS, **{"bias_shape": (1, 4, 3, 6), **keywords})


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_every_gradient_gives_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, dtype: str, causal: bool) -> None:
    call = _full(dtype=dtype, causal=causal)
    backend.run(check_bytes, reference, call)
    backend.run(check_oracle, call)


@pytest.mark.parametrize("dims", ((1, 1), (7, 20), (64, 128), (130, 72), (256, 256)), ids=lambda dims: f"D{dims[0]}-V{dims[1]}")
def test_gradients_of_every_head_dim(backend: Runner, reference: Evaluate, dims: tuple[int, int]) -> None:
    call = problems.attention(batch=1, heads=2, kv_heads=1, queries=3, head_dim=dims[0], value_dim=dims[1], wrt=("q", "k", "v"))
    backend.run(check_bytes, reference, call)
    backend.run(check_oracle, call)


@pytest.mark.parametrize("keys", (255, 257, 513))
def test_gradients_across_tile_edges(backend: Runner, reference: Evaluate, keys: int) -> None:
    call = problems.attention(batch=1, heads=2, kv_heads=1, queries=2, keys=keys, with_sinks=True, wrt=("q", "k", "v", "sinks"))
    backend.run(check_bytes, reference, call)
    backend.run(check_bytes, reference, problems.softmax((2, keys), gradient=True, dtype="bfloat16"))


@pytest.mark.parametrize("heads", GROUPS, ids=lambda heads: f"H{heads[0]}-K{heads[1]}")
def test_kv_gradients_sum_over_the_group(backend: Runner, reference: Evaluate, heads: tuple[int, int]) -> None:
    call = problems.attention(heads=heads[0], kv_heads=heads[1], queries=2, keys=3, head_dim=4, wrt=("q", "k", "v"))
    backend.run(check_bytes, reference, call)
    backend.run(check_oracle, call)


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_gradients_reduce_over_broadcast_axes(backend: Runner, reference: Evaluate, shape: tuple[int, int, int, int]) -> None:
    backend.run(check_bytes, reference, _full(bias_shape=shape))
    backend.run(check_oracle, _full(bias_shape=shape))


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_a_subset_of_gradients_equals_the_whole(backend: Runner, subset: tuple[str, ...]) -> None:
    backend.run(check_subset, subset)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_a_gradient_has_the_dtype_of_its_input(backend: Runner, dtype: str) -> None:
    backend.run(check_dtype, dtype)


@pytest.mark.parametrize("name", KNOWN)
def test_known_gradients(backend: Runner, name: str) -> None:
    backend.run(check_known, name)


def test_lse_is_differentiable(backend: Runner) -> None:
    backend.run(check_lse_gradient)


def test_backward_keeps_the_causal_mask(backend: Runner) -> None:
    backend.run(check_masked_backward)


def test_softmax_gradient_is_masked_before_the_maximum(backend: Runner) -> None:
    backend.run(check_softmax_gradient)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gradients_of_large_equal_values_are_finite(backend: Runner, dtype: str) -> None:
    backend.run(check_large_equal, dtype)


def test_gradients_of_skewed_data(backend: Runner, reference: Evaluate) -> None:
    """Small, and with the head dim and dtype of the fault, with more rows and keys than a block where the engine is quick."""
    rows = 70 if backend.backend.runs_layers(backend.device, backend.engine) else 20
    for call in (skewed("float32", 32, 6), skewed("bfloat16", 256, rows)):
        backend.run(check_skewed, call)
        backend.run(check_bytes, reference, call)


def test_sink_gradient_is_summed_in_float32(backend: Runner) -> None:
    backend.run(check_sink_sum)


def loses_delta(evaluate: Evaluate) -> Evaluate:
    """dq lacks the subtraction of delta, so that equal keys of 1000 do not cancel."""

    def faulty_evaluate(call: Call) -> dict[str, np.ndarray]:
        return {name: array + np.float32(250) if name == "dq" else array for name, array in evaluate(call).items()}

    return faulty_evaluate


def rounds_sink_terms(evaluate: Evaluate) -> Evaluate:
    """The term of each row is rounded to bfloat16 before the sum."""

    def faulty_evaluate(call: Call) -> dict[str, np.ndarray]:
        exact = oracle.attention(call)
        weights = np.exp(call.arrays["sinks"].astype(np.float64)[None, :, None] - exact["lse"])
        terms = -weights * (exact["out"] * to_float32((call.cotangents or {})["out"])).sum(axis=-1)
        rounded = to_float32(from_float32(terms.astype(np.float32), "bfloat16")).astype(np.float64)
        return {**evaluate(call), "dsinks": rounded.sum(axis=(0, 2)).astype(np.float32)}

    return faulty_evaluate


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_oracle, faulty.returns_zeros, (_full(),)),
        (check_oracle, faulty.drops_the_sink, (_full(),)),
        (check_oracle, faulty.drops_the_lse_gradient, (_full(),)),
        (check_oracle, faulty.forgets_the_group_sum, (_full(),)),
        (check_subset, faulty.computes_gradients_by_request, (("q",),)),
        (check_dtype, faulty.gives_float32_gradients, ("bfloat16",)),
        (check_lse_gradient, faulty.returns_zeros, ()),
        (check_masked_backward, faulty.forgets_the_mask_in_backward, ()),
        (check_softmax_gradient, faulty.ignores_masks, ()),
        (check_skewed, faulty.tiles_by_batch_size, (skewed("float32", 32, 6),)),
        (check_skewed, faulty.forgets_the_group_sum, (skewed("bfloat16", 256, 70),)),
        (check_sink_sum, faulty.returns_zeros, ()),
        (check_sink_sum, rounds_sink_terms, ()),
        (check_large_equal, loses_delta, ("float32",)),
        (check_known, faulty.drops_the_sink, ("a learnable sink",)),
        (check_known, faulty.forgets_the_group_sum, ("head groups",)),
        (check_known, faulty.aligns_causal_top_left, ("bottom-right causal with more queries than keys",)),
        (check_known, faulty.returns_zeros, ("bias alone",)),
        (check_known, faulty.masks_with_a_large_number, ("an empty row gives no gradient",)),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
