"""Masks: a masked key cannot matter, positions are the contract's, dead rows are zero, and a finite bias is a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attn_spec._arrays import from_float32, to_float32
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, oracle, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV
from attn_shared_tests.test_forward import check_bytes

POISON = (np.nan, np.inf, -np.inf, 1e30)
SIZE = 9
WINDOWS: tuple[tuple[int | None, int | None], ...] = (
    (0, 0),
    (1, 0),
    (2, 0),
    (SIZE - 1, 0),
    (SIZE, 0),
    (SIZE + 1, 0),
    (None, 0),
    (0, None),
    (1, 1),
    (0, 2),
    (None, None),
    (3, SIZE),
)
POSITIONS: dict[str, dict[str, Any]] = {
    "bottom right": {},
    "fewer queries than keys": {"queries": 3},
    "more queries than keys": {"queries": 12, "keys": 5},
    "top left": {"q_start": 0, "queries": 4},
    "q_start for each item": {"q_start": np.array([2, 5]), "queries": 3},
    "negative q_start": {"q_start": -2},
    "lengths": {"kv_lengths": np.array([9, 4], np.int32), "queries": 3},
    "a length of zero": {"kv_lengths": np.array([0, 9], np.int64), "queries": 3},
    "lengths and q_start": {"kv_lengths": np.array([9, 4], np.int32), "queries": 3, "q_start": 3},
    "k_start": {"k_start": 250},
    "k_start and q_start": {"k_start": np.array([255, 3]), "q_start": np.array([258, 8]), "queries": 3},
}


def _square(**keywords: Any) -> Any:
    return problems.attention(**{"queries": SIZE, "keys": SIZE, "wrt": QKV, **keywords})


def check_positions(evaluate: Evaluate, keywords: dict[str, Any]) -> None:
    """Causality, window and lengths equal a bias of -inf at the pairs that they exclude, byte for byte, and the oracle agrees."""
    call = _square(**keywords)
    bias = np.where(oracle.visible(call), np.float32(0), np.float32(-np.inf))
    k_start = call.arrays.get("k_start", call.options.get("k_start"))
    masked = problems.edited(call, drop=("window", "kv_lengths", "q_start"), causal=False, bias=bias)
    found = evaluate(call)
    assert_same(found, evaluate(masked if k_start is None else problems.edited(masked, k_start=k_start)), "mask against bias")
    expected = oracle.attention(call)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_close(found[name], expected[name], name, tolerance=2e-5)


def check_poison(evaluate: Evaluate, kind: str, value: float, dtype: str) -> None:
    """What a masked key holds moves no bit. A bias of -inf masks a finite or -inf score, so there the poison is in v alone."""
    call = _square(dtype=dtype, queries=6, wrt=QKV)
    lengths = np.array([1, 6], np.int32)
    clean = {
        "length": problems.edited(call, kv_lengths=lengths),
        "padding": problems.edited(call, key_padding_mask=problems.mask_of(lengths, SIZE)),
        "bias": problems.edited(call, bias=np.where(problems.mask_of(lengths, SIZE), np.float32(0), np.float32(-np.inf))[:, None, None, :]),
        "window": problems.edited(call, window=(0, 0), q_start=0),
    }[kind]
    arrays = {}
    for name in ("v",) if kind == "bias" else ("k", "v"):
        array = call.arrays[name].copy()
        if kind == "window":
            array = problems.poisoned(array, (slice(None), slice(None), slice(6, None)), value)
        else:
            for item, length in enumerate(lengths):
                array = problems.poisoned(array, (item, slice(None), slice(int(length), None)), value)
        arrays[name] = array
    assert_same(evaluate(problems.edited(clean, **arrays)), evaluate(clean), f"{value} at masked keys ({kind})")


def check_dead_row_poison(evaluate: Evaluate, value: float) -> None:
    """q and dO of a row without a visible key touch nothing."""
    call = _square(queries=12, keys=5)
    dead = slice(0, 7)
    q = problems.poisoned(call.arrays["q"], (slice(None), slice(None), dead), value)
    dout = problems.poisoned((call.cotangents or {})["out"], (slice(None), slice(None), dead), value)
    lse = problems.poisoned((call.cotangents or {})["lse"], (slice(None), slice(None), dead), value)
    found = evaluate(problems.edited(call, q=q, cotangents={"out": dout, "lse": lse}))
    assert_same(found, evaluate(call), f"{value} in dead rows")


def check_dead_rows(evaluate: Evaluate, with_sinks: bool) -> None:
    """Output +0, LSE -inf or the sink, gradients +0, and the others as if the dead rows were not there."""
    call = problems.attention(queries=8, keys=5, with_sinks=with_sinks, wrt=QKV)
    found = evaluate(call)
    dead, live = slice(0, 3), slice(3, None)
    assert_zero(found["out"][:, :, dead], "out of dead rows")
    assert_zero(found["dq"][:, :, dead], "dq of dead rows")
    lse = np.broadcast_to(call.arrays["sinks"][None, :, None], (2, 4, 3)) if with_sinks else np.full((2, 4, 3), -np.inf, np.float32)
    assert_bytes(found["lse"][:, :, dead], lse.astype(np.float32), "lse of dead rows")
    without = evaluate(problems.take(call, "S", live))
    assert_same(problems.part(found, "S", live, problems.ROWS), problems.part(without, "S", slice(None), problems.ROWS), "live rows")
    assert_same(found, without, "gradients shared with dead rows", ("dk", "dv"))


def check_banded_padding(evaluate: Evaluate) -> None:
    """A banded bias and padding leave rows empty; a loss on the other rows has the gradients of the data without them."""
    band = np.where(np.tri(4, 4, 0, bool) & ~np.tri(4, 4, -2, bool), np.float32(0), np.float32(-np.inf))[None, None]
    call = problems.attention(queries=4, keys=4, head_dim=1, bias=band, causal=False, key_padding_mask=problems.mask_of((4, 1), 4), wrt=QKV)
    dout, dlse = ((call.cotangents or {})[name].copy() for name in ("out", "lse"))
    dout[1, :, 2:], dlse[1, :, 2:] = 0, 0
    found = evaluate(problems.edited(call, cotangents={"out": dout, "lse": dlse}))
    short = problems.take(problems.take(problems.edited(call, cotangents={"out": dout, "lse": dlse}), "B", [1]), "S", slice(0, 2))
    alone = evaluate(short)
    assert all(np.isfinite(found[f"d{name}"]).all() for name in QKV), "finite gradients"
    assert_same(problems.part(found, "B", [1], ("dk", "dv")), alone, "shared gradients", ("dk", "dv"))
    assert_same(problems.part(problems.part(found, "B", [1], ("dq",)), "S", slice(0, 2)), alone, "dq", ("dq",))


def check_window_equals_causal(evaluate: Evaluate) -> None:
    call = problems.attention(batch=1, heads=2, kv_heads=1, queries=40, keys=40, wrt=QKV)
    causal = evaluate(call)
    for left in (39, 40, 1000, None):
        assert_same(evaluate(problems.edited(call, window=(left, None))), causal, f"left window {left}")


def check_finite_bias(evaluate: Evaluate) -> None:
    """A bias at the end of the range is a number: a row of it is a plain mean; in half of a row it wins nothing."""
    low = np.finfo(np.float32).min
    bias = np.zeros((1, 1, 4, 4), np.float32)
    bias[0, 0, 0] = low
    bias[0, 0, 1, :2] = low
    call = problems.attention(batch=1, heads=1, kv_heads=1, queries=4, keys=4, bias=bias, causal=False, wrt=(*QKV, "bias"))
    found = evaluate(call)
    mean = to_float32(call.arrays["v"])[0, 0].astype(np.float64).mean(axis=0)
    assert_close(found["out"][0, 0, 0], mean, "mean of v", tolerance=1e-6)
    half = problems.edited(call, drop=("bias",))
    expected = oracle.attention(problems.take(problems.take(half, "S", [1]), "T", [2, 3]))
    assert_close(found["out"][0, 0, 1], expected["out"][0, 0, 0], "unbiased half", tolerance=1e-5)
    assert all(np.isfinite(found[f"d{name}"]).all() for name in (*QKV, "bias")), "finite gradients"


def check_unmasked_nan(evaluate: Evaluate, value: float) -> None:
    """An unmasked NaN or +inf makes its row NaN and no other row."""
    call = problems.attention(queries=6, keys=6, batch=1)
    score = np.zeros((1, 1, 6, 6), np.float32)
    score[0, 0, 3, 1] = value
    found, clean = evaluate(problems.edited(call, bias=score)), evaluate(problems.edited(call, bias=np.zeros_like(score)))
    assert np.isnan(found["out"][:, :, 3]).all() and np.isnan(found["lse"][:, :, 3]).all(), f"row with {value}"
    others = [0, 1, 2, 4, 5]
    assert_same(problems.part(found, "S", others), problems.part(clean, "S", others), f"rows beside {value}")


def check_all_masked(evaluate: Evaluate) -> None:
    call = problems.attention(key_padding_mask=np.zeros((2, 7), bool), causal=False, wrt=QKV)
    found = evaluate(call)
    for name in ("out", "dq", "dk", "dv"):
        assert_zero(found[name], name)
    assert np.isneginf(found["lse"]).all(), "lse"
    every = evaluate(problems.edited(call, drop=("key_padding_mask",)))
    assert every["out"].any(), "without the mask"


def check_underflowed_key(evaluate: Evaluate) -> None:
    """A visible key whose P underflowed keeps its term, so its NaN shows; a masked one has none."""
    bias = np.array([0, -1e4], np.float32).reshape(1, 1, 1, 2)
    call = problems.attention(batch=1, heads=1, kv_heads=1, queries=1, keys=2, bias=bias, causal=False)
    v = problems.poisoned(call.arrays["v"], (0, 0, 1), np.nan)
    assert np.isnan(evaluate(problems.edited(call, v=v))["out"]).all(), "P of zero times NaN"
    masked = problems.edited(call, v=v, bias=np.array([0, -np.inf], np.float32).reshape(1, 1, 1, 2))
    assert np.isfinite(evaluate(masked)["out"]).all(), "a masked key"


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_positions_decide_what_is_visible(backend: Runner, reference: Evaluate, name: str, causal: bool) -> None:
    keywords = {**POSITIONS[name], "causal": causal}
    backend.run(check_positions, keywords)
    backend.run(check_bytes, reference, _square(**keywords))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_a_window_counts_keys_besides_the_diagonal(backend: Runner, window: tuple[int | None, int | None], causal: bool) -> None:
    backend.run(check_positions, {"window": window, "causal": causal})
    backend.run(check_positions, {"window": window, "causal": causal, "queries": 3, "kv_lengths": np.array([7, 2])})


def test_a_full_width_window_is_causal(backend: Runner) -> None:
    backend.run(check_window_equals_causal)


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("kind", ("length", "padding", "bias", "window"))
def test_masked_keys_cannot_matter(backend: Runner, kind: str, value: float) -> None:
    backend.run(check_poison, kind, value, "bfloat16" if kind == "length" else "float32")


@pytest.mark.parametrize("value", POISON)
def test_dead_rows_cannot_matter(backend: Runner, value: float) -> None:
    backend.run(check_dead_row_poison, value)


@pytest.mark.parametrize("with_sinks", (False, True), ids=("plain", "sinks"))
def test_a_dead_row_is_zero(backend: Runner, with_sinks: bool) -> None:
    backend.run(check_dead_rows, with_sinks)


def test_an_empty_row_does_not_reach_shared_gradients(backend: Runner) -> None:
    backend.run(check_banded_padding)


def test_a_large_finite_bias_is_a_number(backend: Runner) -> None:
    backend.run(check_finite_bias)


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_an_unmasked_nan_stays_in_its_row(backend: Runner, value: float) -> None:
    backend.run(check_unmasked_nan, value)


def test_a_mask_of_false_gives_zeros(backend: Runner) -> None:
    backend.run(check_all_masked)


def test_an_underflowed_probability_keeps_its_term(backend: Runner) -> None:
    backend.run(check_underflowed_key)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("masks", ("padding", "lengths"))
def test_masks_in_half_precision_give_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, dtype: str, masks: str) -> None:
    lengths = np.array([3, 9], np.int32)
    keywords = {"key_padding_mask": problems.mask_of(lengths, SIZE)[:, ::-1].copy()} if masks == "padding" else {"kv_lengths": lengths}
    backend.run(check_bytes, reference, _square(dtype=dtype, bias=from_float32(np.zeros((1, 1, 1, SIZE), np.float32), dtype), **keywords))


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_positions, faulty.aligns_causal_top_left, ({"queries": 3},)),
        (check_positions, faulty.ignores_q_start, (POSITIONS["q_start for each item"],)),
        (check_positions, faulty.ignores_k_start, (POSITIONS["k_start and q_start"],)),
        (check_positions, faulty.ignores_masks, (POSITIONS["lengths and q_start"],)),
        (check_positions, faulty.widens_the_window, ({"window": (1, 0)},)),
        (check_positions, faulty.ignores_the_window, ({"window": (1, 0)},)),
        (check_positions, faulty.averages_dead_rows, (POSITIONS["a length of zero"],)),
        (check_positions, faulty.masks_with_a_large_number, (POSITIONS["a length of zero"],)),
        (check_poison, faulty.lets_masked_values_in, ("length", np.nan, "float32")),
        (check_poison, faulty.lets_masked_values_in, ("padding", np.inf, "float32")),
        (check_poison, faulty.ignores_masks, ("padding", 1e30, "float32")),
        (check_poison, faulty.masks_with_a_large_number, ("bias", np.nan, "float32")),
        (check_dead_rows, faulty.averages_dead_rows, (False,)),
        (check_dead_rows, faulty.divides_by_zero_in_dead_rows, (False,)),
        (check_dead_rows, faulty.reports_zero_for_a_dead_lse, (False,)),
        (check_dead_rows, faulty.drops_the_sink, (True,)),
        (check_dead_row_poison, faulty.aligns_causal_top_left, (np.nan,)),
        (check_banded_padding, faulty.divides_by_zero_in_dead_rows, ()),
        (check_window_equals_causal, faulty.narrows_the_window, ()),
        (check_finite_bias, faulty.masks_large_negative_bias, ()),
        (check_unmasked_nan, faulty.returns_zeros, (np.nan,)),
        (check_all_masked, faulty.ignores_masks, ()),
        (check_underflowed_key, faulty.ignores_the_bias, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
