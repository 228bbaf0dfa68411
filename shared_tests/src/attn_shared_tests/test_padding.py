"""Padding: dropped keys leave the row as if they had never been there, wherever they stand and whatever they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attn_spec.testing.asserts import assert_bytes, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV

KEPT = 23
PADS: dict[str, list[int]] = {
    "left": list(range(10, 10 + KEPT)),
    "right": list(range(KEPT)),
    "middle": [*range(9), *range(20, 20 + KEPT - 9)],
    "scattered": list(range(0, 2 * KEPT, 2)),
    "across a tile": [*range(5), *range(251, 251 + KEPT - 5)],
}


def check_padding(evaluate: Evaluate, place: str, keywords: dict[str, Any], gradient: bool) -> None:
    """Self-attention over padded tokens equals that over the kept ones, at the kept rows; pads hold garbage and have no cotangent."""
    kept = PADS[place]
    size = kept[-1] + 11
    mask = np.zeros((2, size), bool)
    mask[:, kept] = True
    wide = problems.attention(**{"heads": 2, "kv_heads": 1, "queries": size, "keys": size, "wrt": QKV if gradient else (), **keywords})
    pads = np.flatnonzero(~mask[0])
    arrays = {name: problems.poisoned(wide.arrays[name], (slice(None), slice(None), pads), np.nan if name != "q" else 3.0) for name in QKV}
    cotangents = {name: problems.poisoned(array, (slice(None), slice(None), pads), 0.0) for name, array in (wide.cotangents or {}).items()}
    alone = evaluate(problems.take(problems.take(wide, "S", kept), "T", kept))
    found = evaluate(problems.edited(wide, cotangents=cotangents or None, key_padding_mask=mask, **arrays))
    assert_same(
        problems.part(found, "S", kept, ("out", "lse", "dq")), alone, f"{place} padding", [n for n in ("out", "lse", "dq") if n in alone]
    )
    for name in ("dk", "dv") if gradient else ():
        assert_bytes(found[name][:, :, kept], alone[name], f"{place} padding: {name}")
        assert_zero(found[name][:, :, pads], f"{place} padding: {name} of pads")


def check_softmax_padding(evaluate: Evaluate, place: str, dtype: str, gradient: bool) -> None:
    kept = PADS[place]
    size = kept[-1] + 300
    mask = np.zeros((2, size), bool)
    mask[:, kept] = True
    wide = problems.softmax((2, 3, size), dtype=dtype, gradient=gradient)
    scores = problems.poisoned(wide.arrays["scores"], (..., ~mask[0]), np.nan)
    cotangents = {name: problems.poisoned(array, (..., ~mask[0]), np.nan) for name, array in (wide.cotangents or {}).items()}
    found = evaluate(problems.edited(wide, scores=scores, key_padding_mask=mask, cotangents=cotangents or None))
    short = {name: array[..., kept] for name, array in (wide.cotangents or {}).items()}
    alone = evaluate(problems.edited(wide, scores=wide.arrays["scores"][..., kept], cotangents=short or None))
    assert_same({name: array[..., kept] for name, array in found.items()}, alone, f"{place} padding")
    for name, array in found.items():
        assert_zero(array[..., ~mask[0]], f"{place} padding: {name} of pads")


def check_ragged(evaluate: Evaluate) -> None:
    """Left padded, right padded, packed and alone give one answer for a batch of unequal lengths."""
    lengths = (28, 25, 3)
    longest = max(lengths)
    tokens = problems.attention(batch=3, heads=4, kv_heads=2, queries=longest, keys=longest, dtype="bfloat16", wrt=QKV)
    alone = [
        evaluate(problems.take(problems.take(problems.take(tokens, "B", [b]), "S", slice(0, n)), "T", slice(0, n)))
        for b, n in enumerate(lengths)
    ]
    for side in ("right", "left"):
        call, mask = tokens, problems.mask_of(lengths, longest)
        if side == "left":
            call, mask = _rolled(call, [longest - n for n in lengths]), mask[:, ::-1].copy()
        cotangents = {name: array.copy() for name, array in (call.cotangents or {}).items()}
        for item in range(3):
            for name, array in cotangents.items():
                cotangents[name] = problems.poisoned(array, (item, slice(None), ~mask[item]), 0.0)
        found = evaluate(problems.edited(call, key_padding_mask=mask, cotangents=cotangents))
        for item in range(3):
            one = problems.part(found, "B", [item])
            rows = np.flatnonzero(mask[item])
            assert_same({name: array[:, :, rows] for name, array in one.items()}, alone[item], f"{side} padding, item {item}")
    packed = problems.varlen(lengths, heads=4, kv_heads=2, dtype="bfloat16", wrt=QKV)
    arrays = {name: np.concatenate([tokens.arrays[name][b, :, :n] for b, n in enumerate(lengths)], axis=1).swapaxes(0, 1) for name in QKV}
    outs = {
        name: np.concatenate([array[b, :, :n] for b, n in enumerate(lengths)], axis=1) for name, array in (tokens.cotangents or {}).items()
    }
    found = evaluate(problems.edited(packed, cotangents={"out": outs["out"].swapaxes(0, 1), "lse": outs["lse"]}, **arrays))
    bounds = np.cumsum((0, *lengths))
    for item, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        for name, array in found.items():
            piece = array[:, begin:end] if name == "lse" else array[begin:end].swapaxes(0, 1)
            assert_bytes(piece[None], alone[item][name], f"packed, item {item}: {name}")


def _rolled(call: Any, shifts: list[int]) -> Any:
    """Each item's tokens moved right by its shift."""

    def roll(array: np.ndarray) -> np.ndarray:
        return np.stack([np.roll(array[item], shift, axis=1) for item, shift in enumerate(shifts)])

    cotangents = {name: roll(array) for name, array in (call.cotangents or {}).items()}
    return problems.edited(call, cotangents=cotangents, **{name: roll(call.arrays[name]) for name in QKV})


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
@pytest.mark.parametrize("place", PADS)
def test_padding_moves_no_bit(backend: Runner, place: str, causal: bool, gradient: bool) -> None:
    backend.run(check_padding, place, {"causal": causal}, gradient)


@pytest.mark.parametrize("feature", ("sinks", "bfloat16"))
@pytest.mark.parametrize("place", ("left", "across a tile"))
def test_padding_with_other_features_moves_no_bit(backend: Runner, place: str, feature: str) -> None:
    backend.run(check_padding, place, {"with_sinks": True} if feature == "sinks" else {"dtype": "bfloat16"}, True)


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("place", PADS)
def test_softmax_padding_moves_no_bit(backend: Runner, place: str, dtype: str, gradient: bool) -> None:
    backend.run(check_softmax_padding, place, dtype, gradient)


def test_padded_and_packed_batches_agree(backend: Runner) -> None:
    backend.run(check_ragged)


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_padding, faulty.pads_in_place, ("across a tile", {"causal": False}, False)),
        (check_padding, faulty.ignores_masks, ("left", {}, True)),
        (check_padding, faulty.lets_masked_values_in, ("right", {}, True)),
        (check_softmax_padding, faulty.pads_in_place, ("across a tile", "float32", False)),
        (check_softmax_padding, faulty.ignores_masks, ("left", "float32", True)),
        (check_ragged, faulty.ignores_masks, ()),
        (check_ragged, faulty.tiles_by_batch_size, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
