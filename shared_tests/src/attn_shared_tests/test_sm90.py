"""Contract sm90-v1: tensor-core attention. Its bytes on every backend that has it, what may not move them, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call, UnsupportedProblem
from attn_spec._contract import CONTRACTS
from attn_spec.testing.asserts import assert_close, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, oracle, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV
from attn_shared_tests.test_batch_invariance import check_size_and_slot
from attn_shared_tests.test_chunking import check_chunks
from attn_shared_tests.test_forward import check_bytes
from attn_shared_tests.test_varlen import LENGTHS, check_packed

CONTRACT = "sm90-v1"
SMALL: dict[str, Any] = {"head_dim": 64, "dtype": "bfloat16"}
FEW: dict[str, Any] = {**SMALL, "heads": 2, "kv_heads": 1, "queries": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "one pair": {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1, "keys": 1},
    "tile and one": {"batch": 1, "queries": 3, "keys": 129, "causal": False},
    "D 128": {"batch": 1, "queries": 17, "keys": 130, "head_dim": 128},
    "D 256": {"batch": 1, "heads": 2, "kv_heads": 2, "queries": 5, "keys": 70, "head_dim": 256},
    "two segments": {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 2, "keys": 1100},
    "window and sinks": {"queries": 20, "keys": 200, "window": (30, 0), "with_sinks": True},
    "three heads a group": {"heads": 6, "kv_heads": 2, "queries": 33, "keys": 40, "with_sinks": True},
    "large scores": {"batch": 1, "queries": 3, "keys": 150, "spread": 8.0},
    "a given scale": {"queries": 3, "keys": 20, "scale": 0.7},
    "more queries than keys": {"queries": 9, "keys": 4, "with_sinks": True},
    "no queries": {"queries": 0},
    "no batch": {"batch": 0},
    "no keys": {"keys": 0, "with_sinks": True},
}
STARTS = (1, 100, 127, 1000, 1023, 2048)
EDGES = (1015, 1031)
STEPS = (1022, 1023, 1024, 1025)
PACKED = ("self", "cross", "empty queries", "empty keys", "more queries than keys")
TOLERANCE = 0.02


def under_contract(check: Callable[..., None]) -> Callable[..., None]:
    """The check with every call under this contract."""

    def checked(evaluate: Evaluate, *arguments: Any, **keywords: Any) -> None:
        check(lambda call: evaluate(replace(call, contract=CONTRACT)), *arguments, **keywords)

    checked.__name__ = getattr(check, "__name__", "check")
    return checked


def _attention(gradient: bool, **keywords: Any) -> Call:
    wrt = (*QKV, *(("sinks",) if keywords.get("with_sinks") else ())) if gradient else ()
    return replace(problems.attention(**{**SMALL, **keywords}, wrt=wrt), contract=CONTRACT)


def check_starts(evaluate: Evaluate, reference: Evaluate) -> None:
    """Rolling caches of several starts and lengths in one batch."""
    call = _attention(True, batch=len(STARTS), heads=2, kv_heads=1, queries=2, keys=70)
    call = problems.edited(call, k_start=np.array(STARTS), kv_lengths=np.array([70, 0, 1, 69, 30, 70], np.int32))
    assert_same(evaluate(call), reference(call), "starts")


def check_decode_at_edges(evaluate: Evaluate) -> None:
    """Decode steps around the edge of tiles and segments against a chunk of prefill that holds them."""
    begin, end = EDGES
    whole = _attention(False, batch=1, heads=2, kv_heads=1, queries=end - begin, keys=end, with_sinks=True)
    rows = evaluate(whole)
    for step in STEPS:
        piece = problems.take(problems.take(whole, "S", [step - begin]), "T", slice(0, step + 1))
        assert_same(evaluate(piece), problems.part(rows, "S", [step - begin]), f"step {step}")
        rolling = problems.edited(problems.take(piece, "T", slice(1, None)), k_start=1, window=(step - 1, 0))
        full = problems.edited(piece, window=(step - 1, 0))
        assert_same(evaluate(rolling), evaluate(full), f"step {step}, without the first key")


def check_past_the_end(evaluate: Evaluate) -> None:
    """NaN at keys past the used length moves nothing, and their gradients are +0."""
    call = problems.edited(_attention(True, queries=4, keys=140), kv_lengths=np.array([33, 129], np.int32))
    clean = evaluate(call)
    arrays = {name: call.arrays[name].copy() for name in ("k", "v")}
    for array in arrays.values():
        array[0, :, 33:] = array[1, :, 129:] = problems.scalar(np.nan, array)
    found = evaluate(problems.edited(call, **arrays))
    assert_same(found, clean, "NaN past the end")
    for name in ("dk", "dv"):
        assert_zero(found[name][0, :, 33:], f"{name} past the end")


def check_rows_are_alone(evaluate: Evaluate) -> None:
    """A query full of NaN makes its own row NaN and moves no other one."""
    call = _attention(False, queries=20, keys=40)
    clean = evaluate(call)
    found = evaluate(problems.edited(call, q=problems.poisoned(call.arrays["q"], (slice(None), slice(None), 7), np.nan)))
    others = [row for row in range(20) if row != 7]
    assert_same(problems.part(found, "S", others), problems.part(clean, "S", others), "rows beside a NaN")
    assert np.isnan(found["lse"][:, :, 7]).all(), "LSE of a NaN row"


def check_repetition(evaluate: Evaluate) -> None:
    """The same call three times, and on arrays that lie in another order."""
    call = _attention(True, queries=30, keys=140, with_sinks=True)
    first = evaluate(call)
    for _ in range(2):
        assert_same(evaluate(call), first, "repetition")
    arrays = {name: np.ascontiguousarray(call.arrays[name].transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0) for name in QKV}
    assert not arrays["q"].flags.c_contiguous
    assert_same(evaluate(problems.edited(call, **arrays)), first, "another layout")


def check_values(evaluate: Evaluate) -> None:
    """Near the float64 formulas, gradients too."""
    call = _attention(True, queries=40, keys=150, with_sinks=True, window=(100, 0))
    found, expected = evaluate(call), oracle.attention(call)
    assert found.keys() == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    for name, array in found.items():
        assert_close(array, expected[name], name, tolerance=TOLERANCE)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_equal_the_reference(backend: Runner, reference: Evaluate, shape: str, dtype: str) -> None:
    backend.run(check_bytes, reference, _attention(True, **{**SHAPES[shape], "dtype": dtype}))


def test_starts_and_lengths(backend: Runner, reference: Evaluate) -> None:
    backend.run(check_starts, reference)


@pytest.mark.parametrize("keywords", ({}, {"with_sinks": True, "keys": 150, "causal": False}), ids=("causal", "sinks, full"))
def test_items_stand_alone(backend: Runner, keywords: dict[str, Any]) -> None:
    backend.run(under_contract(check_size_and_slot), {**FEW, **keywords}, True)


@pytest.mark.parametrize("cuts", ((0, 200, 270), (0, 1, 127, 128, 129, 270)), ids=str)
def test_chunked_prefill(backend: Runner, cuts: tuple[int, ...]) -> None:
    backend.run(under_contract(check_chunks), cuts, SMALL, ("q",))


def test_decode_equals_prefill(backend: Runner) -> None:
    backend.run(check_decode_at_edges)


@pytest.mark.parametrize("lengths", PACKED)
def test_packed_equals_alone(backend: Runner, lengths: str) -> None:
    backend.run(under_contract(check_packed), LENGTHS[lengths], SMALL, True)


def test_keys_past_the_end(backend: Runner) -> None:
    backend.run(check_past_the_end)


def test_a_nan_stays_in_its_row(backend: Runner) -> None:
    backend.run(check_rows_are_alone)


def test_same_call_same_bits(backend: Runner) -> None:
    backend.run(check_repetition)


def test_values(backend: Runner) -> None:
    backend.run(check_values)


@pytest.mark.parametrize("op", sorted(set(CONTRACTS["ordered-v1"].operators) - set(CONTRACTS[CONTRACT].operators)))
def test_other_operators_refuse_it(reference: Evaluate, op: str) -> None:
    scores = problems.softmax((1, 1, 2, 3)).arrays["scores"]
    calls = {
        "joint_attention": problems.joint(),
        "joint_attn_softmax": problems.softmax((2, 3)),
        "joint_attn_qk_gemm": Call("joint_attn_qk_gemm", {"q": scores, "k": scores}),
        "joint_attn_av_gemm": Call("joint_attn_av_gemm", {"probs": scores, "v": scores.swapaxes(2, 3)}),
    }
    with pytest.raises(UnsupportedProblem, match=rf"contract {CONTRACT} for {op} .it covers attention, attention_varlen"):
        reference(replace(calls[op], contract=CONTRACT))


def answers_with_v1(evaluate: Evaluate) -> Evaluate:
    """Accepts the contract and runs the default."""
    return lambda call: evaluate(replace(call, contract=None))


def carries_on_over_segments(evaluate: Evaluate) -> Evaluate:
    """Longer caches are placed at another start, so that segments fall elsewhere."""
    return lambda call: evaluate(problems.shifted(call, 1024 - 1000) if call.arrays["k"].shape[2] > 1024 else call)


def test_it_is_not_the_default(reference: Evaluate) -> None:
    call = _attention(False, queries=20, keys=40)
    first, second = reference(replace(call, contract=None)), reference(call)
    with pytest.raises(AssertionError):
        assert_same(first, second, "ordered-v1 against sm90-v1")


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (under_contract(check_size_and_slot), faulty.tiles_by_batch_size, ({**FEW, "keys": 150}, False)),
        (under_contract(check_chunks), faulty.tiles_by_query_count, ((0, 200, 205, 270), SMALL, ())),
        (under_contract(check_chunks), faulty.aligns_causal_top_left, ((0, 200, 270), SMALL, ())),
        (check_decode_at_edges, faulty.tiles_by_query_count, ()),
        (check_decode_at_edges, carries_on_over_segments, ()),
        (check_past_the_end, faulty.ignores_masks, ()),
        (check_values, faulty.drops_the_sink, ()),
        (check_values, faulty.widens_the_window, ()),
        (check_values, faulty.returns_zeros, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)


def test_bytes_are_compared(reference: Evaluate) -> None:
    with pytest.raises(AssertionError):
        check_bytes(answers_with_v1(reference), reference, _attention(True, queries=20, keys=40))
