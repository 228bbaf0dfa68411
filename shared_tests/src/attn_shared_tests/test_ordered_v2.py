"""Contract ordered-v2: the joint softmax with one exponential an element. Its bytes on every backend, what may not move them, and that it
is neither ordered-v1 nor a contract of other operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call, UnsupportedProblem
from attn_spec._contract import CONTRACTS
from attn_spec.testing import strategies
from attn_spec.testing.asserts import assert_bytes, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner
from hypothesis import HealthCheck, given, settings

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.test_forward import check_bytes

CONTRACT = "ordered-v2"
LENGTHS = (1, 255, 1023, 1024, 1025, 2049, 3000)
INF = float("inf")
relaxed = settings(suppress_health_check=list(HealthCheck))


def _call(*shape: int, gradient: bool = True, **keywords: Any) -> Call:
    return replace(problems.softmax(shape, gradient=gradient, **keywords), contract=CONTRACT)


def _rows(call: Call, index: list[int]) -> Call:
    """The call on some batch items."""
    arrays = {name: array[index] for name, array in call.arrays.items()}
    return replace(call, arrays=arrays, cotangents={name: array[index] for name, array in (call.cotangents or {}).items()})


def check_rows_stand_alone(evaluate: Evaluate, keys: int) -> None:
    """An item alone, at every slot of a batch, and beside items full of NaN, infinities and other lengths."""
    call = _call(3, 2, keys, key_padding_mask=problems.mask_of((keys, keys // 2, keys), keys))
    alone = evaluate(_rows(call, [0]))
    for order in ([0, 1, 2], [1, 0], [2, 1, 0]):
        found = evaluate(_rows(call, order))
        slot = order.index(0)
        assert_same({name: array[slot : slot + 1] for name, array in found.items()}, alone, f"slot {slot} of {len(order)}")
    for value in (float("nan"), INF, -INF, 1e30):
        scores = problems.poisoned(call.arrays["scores"], (slice(1, 3),), value)
        found = evaluate(problems.edited(call, scores=scores))
        assert_same({name: array[:1] for name, array in found.items()}, alone, f"beside {value}")


def check_padding(evaluate: Evaluate, side: str, dtype: str) -> None:
    """1100 keys compact, and with 700 dropped ones before, behind or between them, which hold NaN."""
    kept, dropped = 1100, 700
    compact = _call(2, 2, kept, dtype=dtype)
    position = np.arange(kept) + {"left": dropped, "right": 0, "middle": 0}[side]
    if side == "middle":
        position[400:] += dropped
    mask = np.zeros((2, kept + dropped), bool)
    mask[:, position] = True

    def spread(array: np.ndarray, value: float) -> np.ndarray:
        wide = np.empty((*array.shape[:-1], kept + dropped), array.dtype)
        wide[...] = problems.scalar(value, array)
        wide[..., position] = array
        return wide

    arrays = {"scores": spread(compact.arrays["scores"], float("nan")), "key_padding_mask": mask}
    cotangents = {"probs": spread((compact.cotangents or {})["probs"], float("nan"))}
    found = evaluate(replace(compact, arrays=arrays, cotangents=cotangents))
    for name, array in evaluate(compact).items():
        assert_bytes(found[name][..., position], array, f"{name} with {side} padding")
        assert_zero(found[name][..., ~mask[0]], f"{name} at dropped keys")


def check_repetition(evaluate: Evaluate) -> None:
    """The same call three times, and on arrays that lie in another order."""
    call = _call(2, 3, 2100)
    first = evaluate(call)
    for _ in range(2):
        assert_same(evaluate(call), first, "repetition")
    scores = call.arrays["scores"]
    strided = np.ascontiguousarray(scores.transpose(2, 1, 0)).transpose(2, 1, 0)
    assert not strided.flags.c_contiguous
    assert_same(evaluate(problems.edited(call, scores=strided)), first, "another layout")


def check_specials(evaluate: Evaluate, reference: Evaluate, dtype: str) -> None:
    """Masked, dead, NaN, infinite, huge and far-apart rows, over dead and live tiles."""
    call = _call(11, 2500, dtype=dtype, spread=3.0)
    scores = call.arrays["scores"].copy()
    edits: list[tuple[Any, float]] = [
        ((0, slice(0, 1300)), -INF),
        ((1, slice(None)), -INF),
        ((2, slice(1024, 2048)), -INF),
        ((3, slice(None, None, 3)), -INF),
        ((4, 2000), float("nan")),
        ((5, 7), INF),
        ((6, slice(0, 2499)), -INF),
        ((7, slice(None)), -3e4),
        ((8, slice(0, 1024)), -100.0),
        ((9, slice(1024, 2500)), -86.9),
        ((10, slice(None, None, 2)), -3e4),
    ]
    for where, value in edits:
        scores[where] = problems.scalar(value, scores)
    scores[4, 5] = scores[5, 2400] = problems.scalar(-INF, scores)
    call = problems.edited(call, scores=scores)
    found = evaluate(call)
    assert_same(found, reference(call), dtype)
    for name, array in found.items():
        assert_zero(array[1], f"{name} of a dead row")
        assert_zero(array[4, 5:6], f"{name} at a masked key of a NaN row")


def check_differs_from_v1(evaluate: Evaluate) -> None:
    """Asking for the contract has an effect: the bits are not those of the default, the values nearly are."""
    call = _call(4, 3000, gradient=False)
    second, first = evaluate(call)["probs"], evaluate(replace(call, contract=None))["probs"]
    assert (second.view(np.int32) != first.view(np.int32)).any(), "the bits of ordered-v1"
    assert (np.abs(second - first) <= 4e-6 * first).all(), "values far from ordered-v1"


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
def test_bytes_equal_the_reference(backend: Runner, reference: Evaluate, gradient: bool) -> None:
    @relaxed
    @given(call=strategies.softmax_calls(gradient=gradient))
    def on_every_problem(call: Call) -> None:
        backend.run(check_bytes, reference, replace(call, contract=CONTRACT))

    on_every_problem()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_bytes_around_the_tile_edges(backend: Runner, reference: Evaluate, dtype: str) -> None:
    for keys in LENGTHS:
        backend.run(check_bytes, reference, _call(2, keys, dtype=dtype))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_special_rows(backend: Runner, reference: Evaluate, dtype: str) -> None:
    backend.run(check_specials, reference, dtype)


def test_rows_stand_alone(backend: Runner) -> None:
    backend.run(check_rows_stand_alone, 1100)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("side", ("left", "right", "middle"))
def test_padding_moves_no_bit(backend: Runner, side: str, dtype: str) -> None:
    backend.run(check_padding, side, dtype)


def test_same_call_same_bits(backend: Runner) -> None:
    backend.run(check_repetition)


def test_it_is_not_the_default(backend: Runner) -> None:
    backend.run(check_differs_from_v1)


@pytest.mark.parametrize("op", sorted(set(CONTRACTS["ordered-v1"].operators) - set(CONTRACTS[CONTRACT].operators)))
def test_other_operators_refuse_it(reference: Evaluate, op: str) -> None:
    calls = {
        "attention": problems.attention(),
        "attention_varlen": problems.varlen((2, 3)),
        "joint_attention": problems.joint(),
        "joint_attn_qk_gemm": _product("joint_attn_qk_gemm"),
        "joint_attn_av_gemm": _product("joint_attn_av_gemm"),
    }
    with pytest.raises(UnsupportedProblem, match=f"contract {CONTRACT} for {op} .it covers joint_attn_softmax"):
        reference(replace(calls[op], contract=CONTRACT))


def _product(op: str) -> Call:
    """A small product call."""
    rng = np.random.default_rng(0)
    shapes = {
        "joint_attn_qk_gemm": {"q": (1, 1, 2, 4), "k": (1, 1, 3, 4)},
        "joint_attn_av_gemm": {"probs": (1, 1, 2, 3), "v": (1, 1, 3, 4)},
    }
    return Call(op, {name: problems.normal(rng, shape) for name, shape in shapes[op].items()})


def answers_with_v1(evaluate: Evaluate) -> Evaluate:
    """Accepts the contract and runs the default."""
    return lambda call: evaluate(replace(call, contract=None))


def chooses_by_batch_size(evaluate: Evaluate) -> Evaluate:
    """Larger batches run the other contract."""
    return lambda call: evaluate(replace(call, contract=CONTRACT if call.arrays["scores"].shape[0] == 1 else None))


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_rows_stand_alone, chooses_by_batch_size, (1100,)),
        (check_padding, faulty.pads_in_place, ("middle", "float32")),
        (check_repetition, faulty.drifts, ()),
        (check_differs_from_v1, answers_with_v1, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
