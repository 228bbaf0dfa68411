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
from attn_shared_tests.test_joint import check_prompt_padding
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
JOINT: dict[str, Any] = {"head_dim": 64, "dtype": "bfloat16", "heads": 2, "kv_heads": 1}
PROMPT = ("bfloat16", True, (77,), 20, 64)
"""Arguments of ``check_prompt_padding`` after the side: dtype, gradient, slots of the prompt, image rows, head dim."""
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


def _joint(**keywords: Any) -> Call:
    return replace(problems.joint(**{**JOINT, "gradient": True, **keywords}), contract=CONTRACT)


def check_image_grid(evaluate: Evaluate) -> None:
    """The keys of image begin a tile and a segment, and its queries a step, wherever the prompt ends: the same rows for prompts of one
    token whose v is zero and whose score is far below all others."""
    call = _joint(batch=1, heads=1, text=1, image=130)
    arrays = {name: call.arrays[name].copy() for name in ("q_txt", "k_txt", "v_txt", "q_img")}
    arrays["q_img"][..., 0] = problems.scalar(8.0, arrays["q_img"])
    arrays["k_txt"][:] = arrays["v_txt"][:] = arrays["q_txt"][:] = problems.scalar(0.0, arrays["k_txt"])
    arrays["k_txt"][..., 0] = problems.scalar(-4096.0, arrays["k_txt"])
    cotangents = {name: array.copy() for name, array in (call.cotangents or {}).items()}
    cotangents["out_txt"][:] = problems.scalar(0.0, cotangents["out_txt"])
    call = problems.edited(call, cotangents=cotangents, **arrays)
    found = evaluate(call)
    alone = _attention(True, batch=1, heads=1, kv_heads=1, queries=130, keys=130, causal=False)
    names = {name: call.arrays[f"{name}_img"] for name in QKV}
    expected = evaluate(problems.edited(alone, cotangents={"out": cotangents["out_img"]}, **names))
    assert_same(
        {name: found[f"{name}_img"] for name in ("out", "dq", "dk", "dv")},
        {name: expected[name] for name in ("out", "dq", "dk", "dv")},
        "image rows",
    )


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


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(
    "keywords",
    (
        {"text": 8, "image": 20, "prompt_mask": problems.mask_of((8, 3), 8)},
        {"text": 130, "image": 5, "batch": 1, "heads": 1, "prompt_mask": problems.mask_of((129,), 130)[:, ::-1].copy()},
        {"text": 20, "image": 30, "head_dim": 128},
        {"text": 0, "image": 20, "batch": 1},
        {"text": 20, "image": 0, "batch": 1},
    ),
    ids=("two prompts", "a tile of text", "D 128, no mask", "no text", "no image"),
)
def test_joint_bytes_equal_the_reference(backend: Runner, reference: Evaluate, keywords: dict[str, Any], dtype: str) -> None:
    backend.run(check_bytes, reference, _joint(**{**keywords, "dtype": dtype}))


@pytest.mark.parametrize("side", ("left", "middle"))
def test_prompt_padding_moves_no_bit(backend: Runner, side: str) -> None:
    backend.run(under_contract(check_prompt_padding), side, *PROMPT)


def test_image_begins_its_own_grid(backend: Runner) -> None:
    backend.run(check_image_grid)


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
        "joint_attn_softmax": problems.softmax((2, 3)),
        "joint_attn_qk_gemm": Call("joint_attn_qk_gemm", {"q": scores, "k": scores}),
        "joint_attn_av_gemm": Call("joint_attn_av_gemm", {"probs": scores, "v": scores.swapaxes(2, 3)}),
    }
    with pytest.raises(UnsupportedProblem, match=rf"contract {CONTRACT} for {op} .it covers joint_attention, attention, attention_varlen"):
        reference(replace(calls[op], contract=CONTRACT))


def joins_without_a_gap(evaluate: Evaluate) -> Evaluate:
    """Image keys and queries follow the kept text at once: one ``attention`` call of one grid."""

    def faulty_joint(call: Call) -> dict[str, np.ndarray]:
        kept = call.arrays.get("prompt_mask", np.ones(call.arrays["q_txt"].shape[::2][:2], bool))[0]
        joined = {name: np.concatenate([call.arrays[f"{name}_txt"][:, :, kept], call.arrays[f"{name}_img"]], axis=2) for name in QKV}
        cotangents = call.cotangents or {}
        dout = np.concatenate([cotangents["out_txt"][:, :, kept], cotangents["out_img"]], axis=2)
        whole = evaluate(Call("attention", joined, {"causal": False}, {"out": dout}, QKV, CONTRACT))
        count = int(kept.sum())
        found = {f"{name}_img": whole[name][:, :, count:] for name in ("out", "dq", "dk", "dv")}
        for name in ("out", "dq", "dk", "dv"):
            shape = whole[name].shape
            text = np.zeros((*shape[:2], kept.size, shape[3]), whole[name].dtype)
            text[:, :, kept] = whole[name][:, :, :count]
            found[f"{name}_txt"] = text
        return found

    return lambda call: faulty_joint(call) if call.op == "joint_attention" else evaluate(call)


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
        (under_contract(check_prompt_padding), faulty.ignores_masks, ("left", *PROMPT)),
        (check_image_grid, joins_without_a_gap, ()),
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
