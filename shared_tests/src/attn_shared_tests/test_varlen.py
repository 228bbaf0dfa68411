"""Packed input: each segment is alone; empty and padded segments, trailing rows and any offsets are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.asserts import assert_bytes, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV
from attn_shared_tests.test_forward import check_bytes

LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "self": ((3, 1, 5), (3, 1, 5)),
    "cross": ((3, 1, 5), (7, 260, 2)),
    "empty queries": ((0, 2, 0), (3, 2, 3)),
    "empty keys": ((2, 3), (0, 4)),
    "all empty": ((0, 0), (0, 0)),
    "one of many": ((1,) * 12, (2,) * 12),
    "more queries than keys": ((76, 34), (1, 2)),
}


def check_packed(evaluate: Evaluate, lengths: tuple[tuple[int, ...], tuple[int, ...]], keywords: dict[str, Any], gradient: bool) -> None:
    """A packed segment equals the same data alone, as a dense batch of one."""
    call = problems.varlen(*lengths, wrt=QKV if gradient else (), **keywords)
    found = evaluate(call)
    offsets_q, offsets_k = (call.arrays[f"cu_seqlens_{name}"] for name in "qk")
    for item in range(len(lengths[0])):
        rows, keys = slice(*offsets_q[item : item + 2]), slice(*offsets_k[item : item + 2])
        alone = evaluate(_alone(call, rows, keys))
        for name, array in found.items():
            if name == "lse":
                piece = array[:, rows]
            else:
                piece = array[keys if name in ("dk", "dv") else rows].swapaxes(0, 1)
            assert_bytes(piece[None], alone[name], f"segment {item}: {name}")


def check_trailing(evaluate: Evaluate) -> None:
    """Rows past the last segment hold NaN and give exact zeros; the rest is as without them."""
    call = problems.varlen((2, 3), head_dim=16, dtype="bfloat16", trailing=2, wrt=QKV)
    arrays = {name: problems.poisoned(call.arrays[name], slice(5, None), np.nan) for name in QKV}
    cotangents = call.cotangents or {}
    poisoned = {
        "out": problems.poisoned(cotangents["out"], slice(5, None), np.nan),
        "lse": problems.poisoned(cotangents["lse"], (slice(None), slice(5, None)), np.nan),
    }
    found = evaluate(problems.edited(call, cotangents=poisoned, **arrays))
    for name in ("out", "dq", "dk", "dv"):
        assert_zero(found[name][5:], f"{name} past the end")
    assert np.isneginf(found["lse"][:, 5:]).all(), "lse past the end"
    short = {name: call.arrays[name][:5] for name in QKV}
    alone = evaluate(problems.edited(call, cotangents={"out": cotangents["out"][:5], "lse": cotangents["lse"][:, :5]}, **short))
    assert_same({name: array[:, :5] if name == "lse" else array[:5] for name, array in found.items()}, alone, "rows of segments")


def check_padded_segments(evaluate: Evaluate) -> None:
    """Segments with room to spare: the spare rows hold NaN, give zeros, and move no bit of the used ones."""
    used_q, used_k, room = (2, 0, 3), (4, 2, 3), 5
    tight = problems.varlen(used_q, used_k, wrt=QKV)
    alone = evaluate(tight)
    starts = np.arange(4) * room
    places = {name: np.concatenate([starts[i] + np.arange(n) for i, n in enumerate(used)]) for name, used in (("q", used_q), ("k", used_k))}
    places["v"] = places["k"]

    def spread(array: np.ndarray, place: np.ndarray, axis: int) -> np.ndarray:
        shape = list(array.shape)
        shape[axis] = 3 * room
        wide = np.full(shape, np.nan, np.float32)
        wide[(slice(None),) * axis + (place,)] = array
        return wide

    arrays = {name: spread(tight.arrays[name], places[name], 0) for name in QKV}
    cotangents = {name: spread(array, places["q"], 1 if name == "lse" else 0) for name, array in (tight.cotangents or {}).items()}
    offsets = starts.astype(np.int32)
    lengths = {"seqlens_q": np.array(used_q, np.int32), "seqlens_k": np.array(used_k, np.int32)}
    found = evaluate(problems.edited(tight, cotangents=cotangents, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **lengths, **arrays))
    for name, array in found.items():
        place, axis = places["k" if name in ("dk", "dv") else "q"], 1 if name == "lse" else 0
        assert_bytes(np.take(array, place, axis=axis), alone[name], f"used rows: {name}")
        spare = np.delete(array, place, axis=axis)
        assert np.isneginf(spare).all() if name == "lse" else not spare.any(), f"spare rows: {name}"


def check_segment_numbers(evaluate: Evaluate) -> None:
    """With v filled by segment number, each output row is its own number."""
    call = problems.varlen((3, 4, 5), causal=False)
    number = np.repeat(np.arange(1, 4, dtype=np.float32), (3, 4, 5))[:, None, None]
    found = evaluate(problems.edited(call, v=np.broadcast_to(number, call.arrays["v"].shape).copy()))
    expected = np.broadcast_to(number, found["out"].shape)
    assert np.abs(found["out"] - expected).max() < 1e-5, "a row of another segment"


def check_offset_dtypes(evaluate: Evaluate) -> None:
    """int64 and strided offsets are read as what they are."""
    call = problems.varlen((2, 3))
    plain = evaluate(call)
    for dtype in (np.int32, np.int64):
        spaced = np.zeros(6, dtype)
        spaced[::2] = call.arrays["cu_seqlens_q"]
        found = evaluate(problems.edited(call, cu_seqlens_q=spaced[::2], cu_seqlens_k=call.arrays["cu_seqlens_k"].astype(dtype)))
        assert_same(found, plain, f"offsets of {np.dtype(dtype).name}")


def _alone(call: Call, rows: slice, keys: slice) -> Call:
    arrays = {name: call.arrays[name][rows if name == "q" else keys].swapaxes(0, 1)[None] for name in QKV}
    if "sinks" in call.arrays:
        arrays["sinks"] = call.arrays["sinks"]
    cotangents = None
    if call.cotangents is not None:
        cotangents = {"out": call.cotangents["out"][rows].swapaxes(0, 1)[None], "lse": call.cotangents["lse"][None, :, rows]}
    return replace(call, op="attention", arrays=arrays, cotangents=cotangents)


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_equals_alone(backend: Runner, lengths: str, causal: bool, gradient: bool) -> None:
    backend.run(check_packed, LENGTHS[lengths], {"causal": causal}, gradient)


def test_packed_equals_alone_with_sinks_and_window(backend: Runner) -> None:
    backend.run(check_packed, LENGTHS["cross"], {"with_sinks": True, "window": (3, 1), "dtype": "bfloat16"}, True)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_gives_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, lengths: str) -> None:
    backend.run(check_bytes, reference, problems.varlen(*LENGTHS[lengths], wrt=QKV))


def test_rows_past_the_last_segment_are_zero(backend: Runner) -> None:
    backend.run(check_trailing)


def test_padded_segments_are_zero_between(backend: Runner) -> None:
    backend.run(check_padded_segments)


def test_a_row_stays_in_its_segment(backend: Runner) -> None:
    backend.run(check_segment_numbers)


def test_offsets_of_any_integer_dtype(backend: Runner) -> None:
    backend.run(check_offset_dtypes)


def rounds_wide_offsets(evaluate: Evaluate) -> Evaluate:
    """Reads int64 offsets as pairs of int32."""

    def faulty_evaluate(call: Call) -> dict[str, np.ndarray]:
        offsets = call.arrays["cu_seqlens_k"]
        if offsets.dtype != np.int64:
            return evaluate(call)
        return evaluate(problems.edited(call, cu_seqlens_k=np.maximum.accumulate(offsets.view(np.int32)[: len(offsets)])))

    return faulty_evaluate


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_packed, faulty.ignores_segments, (LENGTHS["self"], {}, True)),
        (check_trailing, faulty.leaves_rows_unwritten, ()),
        (check_padded_segments, faulty.ignores_used_lengths, ()),
        (check_segment_numbers, faulty.ignores_segments, ()),
        (check_offset_dtypes, rounds_wide_offsets, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
