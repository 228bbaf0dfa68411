"""Sinks: one more state, merged last; -inf is none; counted once however the queries are cut; differentiable in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec._arrays import to_float32
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_same
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, oracle, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV
from attn_shared_tests.test_forward import check_bytes

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"window": (2, 0)},
    "group": {"heads": 8, "kv_heads": 2},
    "padding": {"key_padding_mask": problems.mask_of((3, 9), 9)},
    "lengths": {"kv_lengths": np.array([0, 9])},
    "two tiles": {"batch": 1, "keys": 300},
    "bfloat16": {"dtype": "bfloat16"},
}


def _call(**keywords: Any) -> Call:
    return problems.attention(**{"keys": 9, "with_sinks": True, "wrt": (*QKV, "sinks"), **keywords})


def check_oracle(evaluate: Evaluate, call: Call) -> None:
    found, expected = evaluate(call), oracle.attention(call)
    half = found["out"].dtype != np.float32
    for name in ("out", "dq", "dk", "dv"):
        assert_close(found[name], expected[name], name, tolerance=1e-2 if half else 2e-5)
    for name in ("lse", "dsinks"):
        assert_close(found[name], expected[name], name, tolerance=2e-5)


def check_no_sink(evaluate: Evaluate) -> None:
    """-inf is no sink, byte for byte, in dead rows too, and its gradient is +0."""
    call = problems.edited(_call(queries=12), sinks=np.full(4, -np.inf, np.float32))
    found = evaluate(call)
    plain = evaluate(replace(problems.edited(call, drop=("sinks",)), wrt=QKV))
    assert_same(found, plain, "a sink of -inf", ("out", "lse", "dq", "dk", "dv"))
    assert_bytes(found["dsinks"], np.zeros(4, np.float32), "dsinks")


def check_matters(evaluate: Evaluate) -> None:
    """Every backend with sinks differs from itself without them."""
    call = problems.attention(heads=8, kv_heads=2, keys=40, queries=40, window=(16, 0), sinks=np.linspace(-2, 4, 8).astype(np.float32))
    with_sinks, without = (to_float32(evaluate(problems.edited(call, drop=drop))["out"]) for drop in ((), ("sinks",)))
    difference = np.abs(with_sinks - without).max(axis=(0, 2, 3))
    assert (difference > 1e-2).all(), f"sinks move the output of each head by {difference}"


def check_counted_once(evaluate: Evaluate) -> None:
    """Prefill in one piece, in chunks and as decode steps gives the same bytes with a sink."""
    call = problems.attention(batch=1, queries=20, keys=20, sinks=np.full(4, 3, np.float32))
    whole = evaluate(call)
    for chunk in (1, 7):
        for start in range(0, 20, chunk):
            rows = slice(start, min(start + chunk, 20))
            piece = problems.edited(problems.take(problems.take(call, "S", rows), "T", slice(0, rows.stop)))
            assert_same(evaluate(piece), problems.part(whole, "S", rows), f"rows {start} to {rows.stop}")


def check_sink_alone(evaluate: Evaluate) -> None:
    """The gradient of sinks alone is that of the whole."""
    every = evaluate(_call())
    alone = evaluate(_call(wrt=("sinks",)))
    assert set(alone) == {"out", "lse", "dsinks"}, sorted(alone)
    assert_same(alone, every, "sinks alone", alone)


def check_head_subset(evaluate: Evaluate) -> None:
    """Five heads with a low sink: a head does not know how many there are."""
    call = problems.attention(batch=1, heads=5, kv_heads=5, sinks=np.full(5, -50, np.float32))
    every = evaluate(call)
    for head in range(5):
        index = [head]
        arrays = {name: call.arrays[name][:, index] for name in QKV}
        alone = evaluate(problems.edited(call, sinks=call.arrays["sinks"][index], **arrays))
        assert_same(alone, {name: array[:, index] for name, array in every.items()}, f"head {head}")


def check_nan_sink(evaluate: Evaluate, value: float) -> None:
    """A sink of NaN or +inf makes its head NaN and no other head."""
    call = problems.attention(with_sinks=True)
    found = evaluate(problems.edited(call, sinks=problems.poisoned(call.arrays["sinks"], 1, value)))
    clean = evaluate(call)
    assert np.isnan(found["out"][:, 1]).all(), "the head of that sink"
    others = [0, 2, 3]
    assert_same({n: a[:, others] for n, a in found.items()}, {n: a[:, others] for n, a in clean.items()}, "other heads")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sink", ("random", 20.0, -50.0))
def test_sinks_give_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, setting: str, sink: Any) -> None:
    call = _call(**SETTINGS[setting])
    if sink != "random":
        call = problems.edited(call, sinks=np.full(call.arrays["sinks"].shape, sink, np.float32))
    backend.run(check_bytes, reference, call)
    backend.run(check_oracle, call)


def test_packed_sinks_give_the_bytes_of_the_reference(backend: Runner, reference: Evaluate) -> None:
    backend.run(check_bytes, reference, problems.varlen((3, 0, 4), with_sinks=True, window=(2, 0), wrt=(*QKV, "sinks")))


def test_a_sink_of_minus_infinity_is_none(backend: Runner) -> None:
    backend.run(check_no_sink)


def test_a_sink_changes_every_head(backend: Runner) -> None:
    backend.run(check_matters)


def test_a_sink_is_counted_once(backend: Runner) -> None:
    backend.run(check_counted_once)


def test_only_the_sink_needs_a_gradient(backend: Runner) -> None:
    backend.run(check_sink_alone)


def test_a_head_count_off_the_tile_changes_nothing(backend: Runner) -> None:
    backend.run(check_head_subset)


@pytest.mark.parametrize("value", (np.inf, np.nan))
def test_a_nan_sink_stays_in_its_head(backend: Runner, value: float) -> None:
    backend.run(check_nan_sink, value)


def check_nan_sink_alone(evaluate: Evaluate, reference: Evaluate, value: float) -> None:
    """In a row without keys such a sink is LSE and nothing else: out and the gradients of q, k and v are +0, the sink's own is NaN."""
    call = _call(kv_lengths=np.array([0, 9], np.int32))
    call = problems.edited(call, sinks=np.array([value, 0.5, 1.0, -1.0], np.float32))
    found = evaluate(call)
    assert_same(found, reference(call), f"a sink of {value} in rows without keys", tuple(found))
    for name in ("out", "dq", "dk", "dv"):
        assert_bytes(found[name][0], np.zeros_like(found[name][0]), name)
    if "lse" in found:
        assert_bytes(found["lse"][0, 0], np.full_like(found["lse"][0, 0], value), "lse")
    assert np.isnan(found["dsinks"][0]) and np.isfinite(found["dsinks"][1:]).all()


@pytest.mark.parametrize("value", (np.inf, np.nan))
def test_a_sink_that_is_not_finite_is_the_lse_of_a_row_without_keys(backend: Runner, reference: Evaluate, value: float) -> None:
    backend.run(check_nan_sink_alone, reference, value)


def counts_the_sink_at_each_step(evaluate: Evaluate) -> Evaluate:
    """A decode step merges the sink a second time."""
    return lambda call: (faulty.counts_the_sink_twice(evaluate) if call.arrays["q"].shape[2] == 1 else evaluate)(call)


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_oracle, faulty.drops_the_sink, (_call(),)),
        (check_oracle, faulty.counts_the_sink_twice, (_call(),)),
        (check_no_sink, faulty.floors_the_sink, ()),
        (check_matters, faulty.drops_the_sink, ()),
        (check_counted_once, counts_the_sink_at_each_step, ()),
        (check_sink_alone, faulty.computes_gradients_by_request, ()),
        (check_head_subset, faulty.tiles_by_head_count, ()),
        (check_nan_sink, faulty.drops_the_sink, (np.nan,)),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
