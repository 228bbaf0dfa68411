"""Batch invariance: batch size, slot, and the contents and lengths of neighbours move no bit of out, LSE, dq, dk or dv."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec._arrays import dtype_name
from attn_spec.testing.asserts import assert_bytes, assert_same
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV

SIZES = (1, 2, 7)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full, bfloat16": {"causal": False, "dtype": "bfloat16"},
    "sinks and window": {"with_sinks": True, "window": (5, 0)},
    "bias": {"bias_shape": (1, 4, 3, 1), "causal": False},
    "two tiles": {"keys": 300, "heads": 2, "kv_heads": 1, "queries": 2},
}


def _call(batch: int, *, gradient: bool, **keywords: Any) -> Call:
    return problems.attention(**{"batch": batch, "queries": 3, "keys": 20, "wrt": QKV if gradient else (), **keywords})


def check_size_and_slot(evaluate: Evaluate, keywords: dict[str, Any], gradient: bool) -> None:
    """One item alone, and at the first, middle and last slot of batches of 2 and 7."""
    everything = _call(max(SIZES), gradient=gradient, **keywords)
    alone = evaluate(problems.take(everything, "B", [0]))
    for size in SIZES:
        for slot in sorted({0, size // 2, size - 1}):
            order = list(range(1, size))
            order.insert(slot, 0)
            found = evaluate(problems.take(everything, "B", order))
            assert_same(problems.part(found, "B", [slot]), alone, f"slot {slot} of {size}")


def check_contents(evaluate: Evaluate, value: float, gradient: bool) -> None:
    """A neighbour full of NaN, infinities or huge numbers."""
    call = _call(3, gradient=gradient)
    clean = evaluate(call)
    arrays = {name: problems.poisoned(call.arrays[name], (slice(0, 2),), value) for name in QKV}
    found = evaluate(problems.edited(call, **arrays))
    assert_same(problems.part(found, "B", [2]), problems.part(clean, "B", [2]), f"neighbours of {value}")


def check_lengths(evaluate: Evaluate, gradient: bool) -> None:
    """The victim's bits for every length of its neighbour, 9 and 10 among them."""
    call = _call(2, gradient=gradient, keys=300, queries=4)
    first: dict[str, np.ndarray] | None = None
    for length in (9, 10, 19, 256, 257, 300):
        found = evaluate(problems.edited(call, kv_lengths=np.array([280, length], np.int32)))
        victim = problems.part(found, "B", [0])
        if first is None:
            first = victim
            alone = problems.edited(problems.take(call, "B", [0]), kv_lengths=np.array([280], np.int32))
            assert_same(victim, evaluate(alone), "alone")
        assert_same(victim, first, f"neighbour of {length} keys")


def check_packed_lengths(evaluate: Evaluate) -> None:
    """The same beside a packed neighbour that grows from 9 to 10 queries."""
    victims = []
    for neighbour in (9, 10):
        call = problems.varlen((1, neighbour), (300, neighbour), heads=4, kv_heads=1)
        rng = np.random.default_rng(7)
        arrays = {name: array.copy() for name, array in call.arrays.items()}
        for name, rows in (("q", 1), ("k", 300), ("v", 300)):
            arrays[name][:rows] = problems.normal(rng, (rows, *arrays[name].shape[1:]), dtype_name(arrays[name].dtype))
        found = evaluate(problems.edited(call, **arrays))
        victims.append({"out": found["out"][:1], "lse": found["lse"][:, :1]})
    assert_same(victims[0], victims[1], "neighbour of 9 against 10 queries")


def check_shared_prefix(evaluate: Evaluate) -> None:
    """Rows that share a prefix of keys, together and alone."""
    call = problems.attention(batch=4, heads=2, kv_heads=1, queries=1, keys=270)
    for name in ("k", "v"):
        call.arrays[name][:, :, :256] = call.arrays[name][:1, :, :256]
    together = evaluate(call)
    for item in range(4):
        assert_same(evaluate(problems.take(call, "B", [item])), problems.part(together, "B", [item]), f"item {item}")


def check_softmax_batch(evaluate: Evaluate, gradient: bool) -> None:
    lengths = (40, 7, 300)
    mask = problems.mask_of(lengths, 300)
    call = problems.softmax((3, 2, 300), gradient=gradient, key_padding_mask=mask)
    together = evaluate(call)
    for item in range(3):
        cotangents = {name: array[item : item + 1] for name, array in (call.cotangents or {}).items()}
        arrays = {name: array[item : item + 1] for name, array in call.arrays.items()}
        alone = evaluate(problems.edited(call, cotangents=cotangents or None, **arrays))
        assert_same(alone, {name: array[item : item + 1] for name, array in together.items()}, f"item {item}")


def check_many(evaluate: Evaluate, count: int) -> None:
    """25 distinct heads, ``count`` times: each copy has the bytes of its original."""
    few = problems.attention(batch=1, heads=25, kv_heads=25, queries=1, keys=2, head_dim=4)
    found = evaluate(problems.edited(few, **{name: copies(few.arrays[name], count) for name in QKV}))
    for name, array in evaluate(few).items():
        assert_bytes(found[name], copies(array, count), name)


def copies(array: np.ndarray, count: int) -> np.ndarray:
    """The heads of ``array``, ``count`` times."""
    return np.tile(array, (1, count, 1, 1)[: array.ndim])


def check_many_items(evaluate: Evaluate, count: int) -> None:
    """``count`` batch items, four of them distinct, forward and backward: each copy has the bytes of its original."""
    few = problems.attention(batch=4, heads=2, kv_heads=1, queries=2, keys=3, head_dim=4, wrt=QKV)
    order = [item % 4 for item in range(count)]
    found = evaluate(problems.take(few, "B", order))
    for name, array in evaluate(few).items():
        assert_bytes(found[name], array[order], name)


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("feature", FEATURES)
def test_batch_size_and_slot(backend: Runner, feature: str, gradient: bool) -> None:
    backend.run(check_size_and_slot, FEATURES[feature], gradient)


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("value", (np.nan, np.inf, 1e30))
def test_neighbours(backend: Runner, value: float, gradient: bool) -> None:
    backend.run(check_contents, value, gradient)
    backend.run(check_lengths, gradient)


def test_a_packed_neighbour_of_another_length(backend: Runner) -> None:
    backend.run(check_packed_lengths)


def test_a_shared_prefix_changes_nothing(backend: Runner) -> None:
    backend.run(check_shared_prefix)


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
def test_softmax_rows_do_not_know_the_batch(backend: Runner, gradient: bool) -> None:
    backend.run(check_softmax_batch, gradient)


def test_more_heads_than_a_grid_axis_holds(backend: Runner) -> None:
    """65,600 heads; interpreters, which loop over the heads, take 50."""
    backend.run(check_many, 2_624 if _vectorized(backend) else 2)


def test_more_batch_items_than_a_grid_axis_holds(backend: Runner) -> None:
    """65,600 items; definitions and interpreters, which loop over the items and have no such axis, take a few copies of each."""
    backend.run(check_many_items, 65_600 if _vectorized(backend) else 24)


def _vectorized(backend: Runner) -> bool:
    """Whether the engine takes many items at once."""
    return backend.backend.runs_layers(backend.device, backend.engine)


def pads_softmax_in_slots(evaluate: Evaluate) -> Evaluate:
    """Padding keeps its place when the batch is larger than one."""
    return lambda call: (faulty.pads_in_place(evaluate) if call.arrays["scores"].shape[0] > 1 else evaluate)(_spread(call))


def _spread(call: Call) -> Call:
    """Masks with holes, where compaction and masking in place differ."""
    mask = call.arrays["key_padding_mask"].copy()
    mask[:, ::3] = False
    return problems.edited(call, key_padding_mask=mask)


def tiles_by_packed_queries(evaluate: Evaluate) -> Evaluate:
    """The rounding of a packed call depends on the largest segment."""
    return lambda call: (faulty.rounds_twice(evaluate) if int(np.diff(call.arrays["cu_seqlens_q"]).max()) > 9 else evaluate)(call)


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_size_and_slot, faulty.tiles_by_batch_size, (FEATURES["two tiles"], True)),
        (check_size_and_slot, faulty.tiles_by_batch_size, (FEATURES["causal"], False)),
        (check_size_and_slot, faulty.tiles_by_slot, (FEATURES["two tiles"], False)),
        (check_contents, faulty.mixes_the_batch, (np.nan, True)),
        (check_lengths, faulty.tiles_by_the_longest, (False,)),
        (check_packed_lengths, tiles_by_packed_queries, ()),
        (check_shared_prefix, faulty.tiles_by_batch_size, ()),
        (check_softmax_batch, pads_softmax_in_slots, (False,)),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)


def test_the_head_count_check_catches_a_wrapped_grid(reference: Evaluate) -> None:
    def copied(call: Call) -> dict[str, np.ndarray]:
        if call.arrays["q"].shape[1] == 25:
            return reference(call)
        first = {name: call.arrays[name][:, :25] for name in QKV}
        return {name: copies(array, 2_624) for name, array in reference(problems.edited(call, **first)).items()}

    def wrapped(evaluate: Evaluate) -> Evaluate:
        def unwritten(call: Call) -> dict[str, np.ndarray]:
            found = {name: array.copy() for name, array in evaluate(call).items()}
            for array in found.values():
                array[:, 65535:] = 0
            return found

        return unwritten

    assert_bites(check_many, wrapped, copied, 2_624)
