"""Chunking: prefill in any pieces, decode against a growing cache and a rolling cache give each row its own bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.asserts import assert_same
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import ROWS

LENGTH = 270
CUTS = ((0, LENGTH), (0, 200, LENGTH), (0, 37, 233, LENGTH), (0, 1, 2, 255, 256, 257, LENGTH))
STEPS = (0, 1, 94, 95, 96, 97, 126, 127, 128, 129, 190, 191, 192, 193, 254, 255, 256, 257, LENGTH - 1)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks and window": {"with_sinks": True, "window": (130, 0)},
    "bfloat16": {"dtype": "bfloat16"},
}


def _call(**keywords: Any) -> Call:
    return problems.attention(**{"batch": 1, "heads": 2, "kv_heads": 1, "queries": LENGTH, "keys": LENGTH, "head_dim": 4, **keywords})


def check_chunks(evaluate: Evaluate, cuts: tuple[int, ...], keywords: dict[str, Any], wrt: tuple[str, ...]) -> None:
    """Chunks against the cache so far (bottom right), and against the whole cache with ``q_start``."""
    call = _call(wrt=wrt, **keywords)
    whole = evaluate(call)
    for begin, end in zip(cuts, cuts[1:], strict=False):
        rows, piece = problems.part(whole, "S", slice(begin, end), ROWS), problems.take(call, "S", slice(begin, end))
        cached = evaluate(problems.take(piece, "T", slice(0, end)))
        assert_same(cached, rows, f"rows {begin} to {end}, cache of {end}", rows)
        started = evaluate(problems.edited(piece, q_start=begin))
        assert_same(started, rows, f"rows {begin} to {end}, q_start", rows)


def check_decode(evaluate: Evaluate, keywords: dict[str, Any]) -> None:
    """One query against the concatenated cache equals its row of prefill."""
    call = _call(**keywords)
    whole = evaluate(call)
    cache = {name: call.arrays[name][:, :, :0] for name in ("k", "v")}
    done = 0
    for step in STEPS:
        for name in cache:
            cache[name] = np.concatenate([cache[name], call.arrays[name][:, :, done : step + 1]], axis=2)
        done = step + 1
        found = evaluate(problems.edited(problems.take(call, "S", [step]), **cache))
        assert_same(found, problems.part(whole, "S", [step]), f"step {step}")


def check_batched_decode(evaluate: Evaluate) -> None:
    """Decode steps of different lengths in one batch, in a cache with room to spare."""
    call = _call(queries=20, keys=20)
    whole = evaluate(call)
    steps = np.array([0, 9, 10, 19])
    cache = {name: np.repeat(call.arrays[name], 4, axis=0) for name in ("k", "v")}
    for item, step in enumerate(steps):
        cache = {name: problems.poisoned(array, (item, slice(None), slice(int(step) + 1, None)), np.nan) for name, array in cache.items()}
    q = np.stack([call.arrays["q"][0][:, step : step + 1] for step in steps])
    found = evaluate(problems.edited(call, q=q, kv_lengths=(steps + 1).astype(np.int32), **cache))
    for item, step in enumerate(steps):
        assert_same(problems.part(found, "B", [item]), problems.part(whole, "S", [int(step)]), f"step {step}")


def check_rolling(evaluate: Evaluate, window: int) -> None:
    """A cache that keeps the window alone, with ``k_start``, equals the full cache with the window."""
    call = _call(window=(window, 0), with_sinks=True)
    whole = evaluate(call)
    for step in (0, window, window + 1, 255, 256, LENGTH - 1):
        start = max(0, step - window)
        piece = problems.take(problems.take(call, "S", [step]), "T", slice(start, step + 1))
        found = evaluate(problems.edited(piece, k_start=start))
        assert_same(found, problems.part(whole, "S", [step]), f"step {step}, keys from {start}")
        placed = evaluate(problems.edited(piece, k_start=np.array([start]), q_start=np.array([step])))
        assert_same(placed, found, f"step {step}, starts as arrays")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_chunked_prefill(backend: Runner, cuts: tuple[int, ...], feature: str) -> None:
    backend.run(check_chunks, cuts, FEATURES[feature], ())


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_chunked_prefill_has_the_same_query_gradient(backend: Runner, cuts: tuple[int, ...]) -> None:
    backend.run(check_chunks, cuts, {"with_sinks": True}, ("q",))


@pytest.mark.parametrize("feature", FEATURES)
def test_decode_equals_prefill(backend: Runner, feature: str) -> None:
    backend.run(check_decode, FEATURES[feature])


def test_decode_in_a_batch_equals_prefill(backend: Runner) -> None:
    backend.run(check_batched_decode)


@pytest.mark.parametrize("window", (3, 127, 128))
def test_a_rolling_cache_equals_the_full_one(backend: Runner, window: int) -> None:
    backend.run(check_rolling, window)


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_chunks, faulty.tiles_by_query_count, (CUTS[3], {}, ())),
        (check_chunks, faulty.tiles_by_query_count, (CUTS[3], {}, ("q",))),
        (check_chunks, faulty.aligns_causal_top_left, (CUTS[1], {}, ())),
        (check_chunks, faulty.ignores_q_start, (CUTS[1], {}, ())),
        (check_decode, faulty.tiles_by_query_count, ({},)),
        (check_decode, faulty.aligns_causal_top_left, ({},)),
        (check_batched_decode, faulty.tiles_by_query_count, ()),
        (check_rolling, faulty.tiles_by_stored_keys, (127,)),
        (check_rolling, faulty.ignores_k_start, (127,)),
        (check_rolling, faulty.widens_the_window, (3,)),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
