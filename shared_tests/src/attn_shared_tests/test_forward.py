"""Forward: the bytes of the reference, known answers, and a float64 oracle that shares no code with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec._arrays import from_float32, to_float32
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, oracle, problems
from attn_shared_tests.controls import assert_bites, control_id

SHAPES: dict[str, dict[str, Any]] = {
    "one query, one key": {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1, "keys": 1, "head_dim": 1},
    "tile less one": {"batch": 1, "queries": 2, "keys": 255},
    "one tile": {"batch": 1, "queries": 2, "keys": 256},
    "tile and one": {"batch": 1, "queries": 2, "keys": 257},
    "three tiles": {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 2, "keys": 600},
    "more queries than keys": {"queries": 9, "keys": 4},
    "one kv head": {"heads": 8, "kv_heads": 1},
    "three heads a group": {"heads": 6, "kv_heads": 2},
    "twelve and three": {"heads": 12, "kv_heads": 3, "queries": 2},
    "five heads": {"heads": 5, "kv_heads": 5},
    "no queries": {"queries": 0},
    "no batch": {"batch": 0},
    "no keys": {"keys": 0},
}
HEAD_DIMS = ((1, 1), (3, 3), (7, 7), (20, 20), (72, 72), (100, 100), (130, 130), (200, 200), (32, 48), (64, 128), (128, 64), (192, 128))
SCALES = (0.0, -0.5, 1.0, 3)
ROWS = (1, 2, 31, 33, 127, 129, 1023, 1025, 4097)
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 7e-4}
LN2, LN3 = math.log(2.0), math.log(3.0)


def column(*values: float) -> np.ndarray:
    """[1, 1, n, 1] float32."""
    return np.array(values, np.float32).reshape(1, 1, -1, 1)


KNOWN: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "an empty row is zero": (
        {
            "q": np.eye(2, dtype=np.float32)[None, None],
            "k": np.eye(2, dtype=np.float32)[None, None],
            "v": column(1, 3),
            "bias": np.array([[[[0, -np.inf], [-np.inf, -np.inf]]]], np.float32),
            "scale": 1.0,
            "causal": False,
        },
        [1, 0],
        [1, -np.inf],
    ),
    "more queries than keys, bottom right": (
        {"q": column(1, 1, 1, 1, 1), "k": column(0, LN3), "v": column(1, 5), "scale": 1.0},
        [0, 0, 0, 1, 4],
        [-np.inf, -np.inf, -np.inf, 0, 2 * LN2],
    ),
    "a window of two tokens": (
        {"q": column(0, 0, 0, 0), "k": column(0, 0, 0, 0), "v": column(1, 2, 4, 8), "window": (1, 0)},
        [1, 1.5, 3, 6],
        [0, LN2, LN2, LN2],
    ),
    "a sink of zero": ({"q": column(0), "k": column(0, 0), "v": column(3, 6), "sinks": np.zeros(1, np.float32)}, [3], [LN3]),
    "a sink of twenty": (
        {"q": column(0), "k": column(0, 0), "v": column(3, 6), "sinks": np.full(1, 20, np.float32)},
        [9 / (2 + math.exp(20))],
        [20.000000004],
    ),
    "off-by-one beside large scores": (
        {"q": column(10), "k": column(1, 1), "v": column(3, 6), "scale": 1.0, "sinks": np.zeros(1, np.float32)},
        [4.499897852],
        [10.69316988],
    ),
    "natural logarithm": ({"q": column(1), "k": column(0, LN3), "v": column(1, 1), "scale": 1.0}, [1], [2 * LN2]),
    "a row without keys keeps its sink": (
        {"q": column(1, 1), "k": column(1), "v": column(7), "scale": 1.0, "q_start": -1, "sinks": np.full(1, 2, np.float32)},
        [0, 7 * math.e / (math.e + math.exp(2))],
        [2, math.log(math.e + math.exp(2))],
    ),
}


def check_bytes(evaluate: Evaluate, reference: Evaluate, call: Call) -> None:
    assert_same(evaluate(call), reference(call), call.op)


def check_known(evaluate: Evaluate, name: str) -> None:
    arguments, out, lse = KNOWN[name]
    base = problems.attention(batch=1, heads=1, kv_heads=1, queries=1, keys=1, head_dim=1)
    found = evaluate(problems.edited(base, **arguments))
    assert_close(found["out"].reshape(-1), np.array(out), f"{name}: out", tolerance=1e-6)
    assert_close(found["lse"].reshape(-1), np.array(lse), f"{name}: lse", tolerance=1e-6)


def check_oracle(evaluate: Evaluate, call: Call) -> None:
    found, expected = evaluate(call), oracle.attention(call)
    dtype = "bfloat16" if found["out"].dtype.names else str(found["out"].dtype)
    assert_close(found["out"], expected["out"], "out", tolerance=TOLERANCE[dtype])
    assert_close(found["lse"], expected["lse"], "lse", tolerance=1e-5)


def check_dtype(evaluate: Evaluate, dtype: str) -> None:
    call = problems.attention(dtype=dtype, queries=2, value_dim=3)
    found = evaluate(call)
    assert found["out"].dtype == call.arrays["v"].dtype and found["out"].shape == (2, 4, 2, 3), (found["out"].dtype, found["out"].shape)
    assert found["lse"].dtype == np.float32 and found["lse"].shape == (2, 4, 2), (found["lse"].dtype, found["lse"].shape)


def check_softmax_rows(evaluate: Evaluate, reference: Evaluate, length: int, dtype: str) -> None:
    call = problems.softmax((2, length), dtype=dtype)
    found = evaluate(call)
    assert_same(found, reference(call), f"rows of {length}")
    scores = to_float32(call.arrays["scores"]).astype(np.float64)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    assert_close(found["probs"], weights / weights.sum(axis=1, keepdims=True), f"rows of {length}", tolerance=TOLERANCE[dtype])


def check_guards(evaluate: Evaluate) -> None:
    """Rows that a fast-math build gets wrong."""
    low = evaluate(Call("joint_attn_softmax", {"scores": np.full((1, 512), -1000, np.float32)}))["probs"]
    assert_bytes(low, np.full((1, 512), 1 / 512, np.float32), "512 scores of -1000")
    rows = problems.poisoned(problems.normal(np.random.default_rng(0), (3, 40)), (1, 7), np.nan)
    probs = evaluate(Call("joint_attn_softmax", {"scores": rows}))["probs"]
    assert np.isnan(probs[1]).all() and not np.isnan(probs[[0, 2]]).any(), "a NaN belongs to its row alone"
    alone = evaluate(Call("joint_attn_softmax", {"scores": rows[[0, 2]]}))["probs"]
    assert_bytes(probs[[0, 2]], alone, "rows beside a NaN row")


def check_subnormals(evaluate: Evaluate) -> None:
    """A subnormal v comes back as it is."""
    tiny = np.float32(1e-42)
    call = problems.edited(problems.attention(batch=1, heads=1, kv_heads=1, queries=1, keys=1), v=np.full((1, 1, 1, 8), tiny, np.float32))
    assert_bytes(evaluate(call)["out"], np.full((1, 1, 1, 8), tiny, np.float32), "one key")


def check_stored_zeros(evaluate: Evaluate) -> None:
    """A zero result is +0, whatever the signs that met in it."""
    call = problems.attention(batch=1, queries=3, keys=3, scale=0.0)
    minus = np.full(call.arrays["v"].shape, -0.0, np.float32)
    assert_zero(evaluate(problems.edited(call, v=minus))["out"], "v of -0")


def check_large_values(evaluate: Evaluate, dtype: str) -> None:
    """Equal large values come back as they are."""
    call = problems.attention(batch=1, heads=2, kv_heads=2, queries=6, keys=6, head_dim=4, dtype=dtype, causal=False)
    thousand = from_float32(np.full((1, 2, 6, 4), 1000, np.float32), dtype)
    assert_close(
        evaluate(problems.edited(call, q=thousand, k=thousand, v=thousand))["out"], np.full((1, 2, 6, 4), 1000.0), dtype, tolerance=1e-6
    )


def check_gemm_row(evaluate: Evaluate, rows: int, width: int) -> None:
    """Row 0 of both products does not know how many rows there are."""
    rng = np.random.default_rng(1)
    q, k = problems.normal(rng, (1, 1, rows, width)), problems.normal(rng, (1, 1, 5, width))
    many = evaluate(Call("joint_attn_qk_gemm", {"q": q, "k": k}))["scores"]
    assert_bytes(many[:, :, :1], evaluate(Call("joint_attn_qk_gemm", {"q": q[:, :, :1], "k": k}))["scores"], f"qk, {rows} rows")
    v = problems.normal(rng, (1, 1, width, 3))
    many = evaluate(Call("joint_attn_av_gemm", {"probs": q, "v": v}))["out"]
    assert_bytes(many[:, :, :1], evaluate(Call("joint_attn_av_gemm", {"probs": q[:, :, :1], "v": v}))["out"], f"av, {rows} rows")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, shape: str, dtype: str) -> None:
    backend.run(check_bytes, reference, problems.attention(dtype=dtype, **SHAPES[shape]))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=lambda dims: f"D{dims[0]}-V{dims[1]}")
def test_every_head_dim_gives_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, dims: tuple[int, int]) -> None:
    call = problems.attention(batch=1, queries=3, head_dim=dims[0], value_dim=dims[1], dtype="bfloat16")
    backend.run(check_bytes, reference, call)
    backend.run(check_oracle, call)


@pytest.mark.parametrize("scale", SCALES)
def test_an_explicit_scale_is_used_as_it_is(backend: Runner, reference: Evaluate, scale: float) -> None:
    backend.run(check_bytes, reference, problems.attention(scale=scale))
    backend.run(check_oracle, problems.attention(scale=scale))


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(backend: Runner, name: str) -> None:
    backend.run(check_known, name)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_forward_agrees_with_float64(backend: Runner, dtype: str, causal: bool) -> None:
    call = problems.attention(dtype=dtype, keys=40, head_dim=16, causal=causal, with_sinks=True, bias_shape=(2, 4, 5, 40))
    backend.run(check_oracle, call)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_out_has_the_dtype_of_v_and_lse_is_float32(backend: Runner, dtype: str) -> None:
    backend.run(check_dtype, dtype)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("length", ROWS)
def test_softmax_rows_of_every_length(backend: Runner, reference: Evaluate, length: int, dtype: str) -> None:
    backend.run(check_softmax_rows, reference, length, dtype)


@pytest.mark.parametrize("shape", ((0, 5), (2, 0, 3), (7,)), ids=str)
def test_softmax_of_any_rank(backend: Runner, reference: Evaluate, shape: tuple[int, ...]) -> None:
    backend.run(check_bytes, reference, problems.softmax(shape))


def test_low_and_nan_rows_keep_their_guards(backend: Runner) -> None:
    backend.run(check_guards)


def test_subnormal_values_are_kept(backend: Runner) -> None:
    backend.run(check_subnormals)


def test_a_stored_zero_is_positive(backend: Runner) -> None:
    backend.run(check_stored_zeros)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_large_equal_values_stay_finite(backend: Runner, dtype: str) -> None:
    backend.run(check_large_values, dtype)


@pytest.mark.parametrize("rows", (2, 7, 16, 129))
@pytest.mark.parametrize("width", (64, 300))
def test_a_product_row_does_not_know_the_other_rows(backend: Runner, rows: int, width: int) -> None:
    backend.run(check_gemm_row, rows, width)


@pytest.mark.parametrize(
    "fault", (faulty.returns_zeros, faulty.drops_the_sink, faulty.ignores_the_bias, faulty.aligns_causal_top_left), ids=control_id
)
def test_the_oracle_catches(reference: Evaluate, fault: faulty.Fault) -> None:
    assert_bites(check_oracle, fault, reference, problems.attention(queries=3, keys=9, with_sinks=True, bias_shape=(1, 1, 3, 9)))


@pytest.mark.parametrize(
    ("name", "fault"),
    (
        ("an empty row is zero", faulty.masks_with_a_large_number),
        ("an empty row is zero", faulty.averages_dead_rows),
        ("an empty row is zero", faulty.reports_zero_for_a_dead_lse),
        ("more queries than keys, bottom right", faulty.aligns_causal_top_left),
        ("a window of two tokens", faulty.widens_the_window),
        ("a sink of zero", faulty.drops_the_sink),
        ("a sink of twenty", faulty.drops_the_sink),
        ("a sink of twenty", faulty.counts_the_sink_twice),
        ("off-by-one beside large scores", faulty.drops_the_sink),
        ("natural logarithm", faulty.reports_lse_in_base_two),
        ("a row without keys keeps its sink", faulty.drops_the_sink),
    ),
    ids=control_id,
)
def test_known_answers_catch(reference: Evaluate, name: str, fault: faulty.Fault) -> None:
    assert_bites(check_known, fault, reference, name)


@pytest.mark.parametrize("fault", (faulty.rounds_twice, faulty.tiles_by_batch_size, faulty.returns_zeros), ids=control_id)
def test_the_byte_comparison_catches(reference: Evaluate, fault: faulty.Fault) -> None:
    call = problems.attention(keys=300, causal=False)
    assert_bites(lambda evaluate: check_bytes(evaluate, reference, call), fault, reference)


def test_the_zero_rule_catches_a_negative_zero(reference: Evaluate) -> None:
    assert_bites(check_stored_zeros, faulty.stores_negative_zero, reference)


def test_the_dtype_check_catches_a_wide_output(reference: Evaluate) -> None:
    def widens(evaluate: Evaluate) -> Evaluate:
        return lambda call: {name: to_float32(array) for name, array in evaluate(call).items()}

    assert_bites(check_dtype, widens, reference, "bfloat16")
