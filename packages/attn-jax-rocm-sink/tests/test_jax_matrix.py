"""The matrix of features: out, log-sum-exp and every gradient of each cell, by bytes on the host engine and close to float64 on all.

CI runs a sample in which every two values of two axes meet; ``nox -s jax_matrix`` runs the whole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import whole_matrix
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_same
from matrix_cells import AXES, Axes, Cell, missing_pairs, sample, whole
from matrix_check import check, check_bytes, check_close
from matrix_ck import RUNNING, refusals, runs
from matrix_run import SEED, Case

EXACT: Axes = {**AXES, "engine": ("host", "xla")}
CELLS = sample(EXACT)
CK_CELLS = sample(RUNNING, runs)
REFUSED_CELLS = [
    Cell("learnable", "none", "causal", "none", "none", "attention", "gqa", "float32", "once", "ck"),
    Cell("learnable", "1HSS", "padding_causal", "none", "none", "bshd", "mha", "bfloat16", "once", "ck"),
    Cell("vanilla", "alibi", "causal", "none", "none", "bshd", "mha", "float16", "once", "ck"),
    Cell("off_by_one", "none", "padding_bottom_right", "window", "none", "thd_packed", "mqa", "float16", "once", "ck"),
    Cell("learnable", "BHSS", "padding_bottom_right", "none", "dropout", "thd_padded", "gqa", "bfloat16", "once", "ck"),
    Cell("learnable", "pre_scale", "padding", "none", "none", "attention", "mha", "bfloat16", "once", "ck"),
]


def test_every_pair_of_values_meets_in_the_sample() -> None:
    assert missing_pairs(CELLS, EXACT) == set()
    assert missing_pairs(CELLS[1:], EXACT) != set()
    assert missing_pairs(CK_CELLS, RUNNING, runs) == set()
    assert {len(refusals(cell)) for cell in REFUSED_CELLS} == {1, 2, 3} and len({*map(refusals, REFUSED_CELLS)}) == 6


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell) -> None:
    check(cell)


@pytest.mark.usefixtures("fake_ck")
@pytest.mark.parametrize("cell", [*CK_CELLS, *REFUSED_CELLS], ids=str)
def test_cell_of_the_ck_engine(cell: Cell) -> None:
    """Over the recording fake: close to float64, or refused for the listed reasons."""
    check(cell)


@pytest.mark.usefixtures("fake_ck")
def test_a_fault_of_the_ck_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("learnable", "BHSS", "causal", "window", "dropout", "bshd", "gqa", "bfloat16", "once", "ck")
    case = Case(cell)
    check_close(case, case.run())
    ignored = {"softmax": "off_by_one", "bias": "none", "mask": "none", "window": "none", "dropout": "none"}
    for axis, value in ignored.items():
        with pytest.raises(AssertionError, match="float64"):
            check_close(case, case.run(cell=replace(cell, **{axis: value})))
    monkeypatch.setattr("matrix_check.refusals", lambda cell: ("dtype",))
    with pytest.raises(AssertionError, match=r"runs, and should be refused for \('dtype',\)"):
        check(cell)
    with pytest.raises(AssertionError, match=r"refused for \('forward: a bias together with lengths"):
        check(replace(cell, mask="padding_causal"))


def test_a_bias_that_packed_sequences_share() -> None:
    """Its gradient is one sum over sequences and heads, which float32 tells from a sum over sequences of sums over heads."""
    check(Cell("vanilla", "11SS", "padding", "none", "none", "thd_packed", "mha", "float32", "once", "host"))


FULL = Cell("learnable", "BHSS", "padding_causal", "window", "dropout", "bshd", "gqa", "float32", "once", "host")


@cache
def full() -> tuple[Case, dict[str, np.ndarray]]:
    case = Case(FULL)
    return case, case.run()


def broken(fault: str) -> dict[str, np.ndarray]:
    """What an implementation with one fault gives in the cell that has every feature."""
    case, good = full()
    if fault == "zeros":
        return {name: np.zeros_like(array) for name, array in good.items()}
    if fault == "another mask in backward":
        other = case.run(seed=SEED + 1)
        return {name: array if name == "out" else other[name] for name, array in good.items()}
    if fault == "kv heads in turn":  # head h reads kv head h % K
        turned = {name: case.arrays[name][:, [0, 1, 0, 1]] for name in ("k", "v")}
        found = case.run(**turned)
        return found | {name: found[name][:, :2] + found[name][:, 2:] for name in ("dk", "dv")}
    ignored = {
        "sink dropped": replace(FULL, softmax="vanilla"),
        "sink of zero": replace(FULL, softmax="off_by_one"),
        "bias ignored": replace(FULL, bias="none"),
        "window ignored": replace(FULL, window="none"),
        "mask ignored": replace(FULL, mask="padding"),
        "other alignment": replace(FULL, mask="padding_bottom_right"),
        "dropout ignored": replace(FULL, dropout="none"),
    }
    return case.run(cell=ignored[fault])


FAULTS = (
    "zeros",
    "sink dropped",
    "sink of zero",
    "bias ignored",
    "window ignored",
    "mask ignored",
    "other alignment",
    "dropout ignored",
    "another mask in backward",
    "kv heads in turn",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    case, good = full()
    check_bytes(case, good)
    check_close(case, good)
    bad = broken(fault)
    with pytest.raises(ContractViolation):
        check_bytes(case, bad)
    with pytest.raises(AssertionError, match="float64"):
        check_close(case, bad)


def test_dropout_has_one_mask_in_both_directions() -> None:
    """out is linear in v: <dv, v> = <dout, out> holds only for the mask of forward."""
    case, good = full()
    values = {"out": good["out"], "dv": good["dv"], "dout": case.dout, "v": case.arrays["v"]}
    wide = {name: array.astype(np.float64) for name, array in values.items()}
    assert (wide["dv"] * wide["v"]).sum() == pytest.approx((wide["dout"] * wide["out"]).sum(), rel=1e-5)
    other = case.run(seed=SEED + 1)["dv"].astype(np.float64)
    assert (other * wide["v"]).sum() != pytest.approx((wide["dout"] * wide["out"]).sum(), rel=1e-2)


def test_one_bit_is_found() -> None:
    case, good = full()
    changed = good["dk"].copy()
    changed.view(np.uint32).flat[0] ^= 1
    with pytest.raises(ContractViolation, match="dk"):
        assert_same(good | {"dk": changed}, case.exact(), "one bit", ("dk",))


def test_runs_of_the_whole_matrix_become_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is stopped goes on, parts are joined, every cell is checked once, and no failure is lost."""
    asked: list[Cell] = []

    def results(chosen: dict[str, list[Cell]], processes: int, *, compiled: bool) -> Iterator[tuple[str, list[str | None]]]:
        for name, cells in chosen.items():
            asked.extend(cells)
            yield name, ["wrong" if cell == asked[0] else None for cell in cells]

    def run(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["whole_matrix.py", "--output", str(output), *arguments])
        return whole_matrix.main(), json.loads(output.read_text())

    monkeypatch.setattr(whole_matrix, "results", results)
    code, stopped = run("stopped.json", "--part", "1/2", "--seconds", "-1")
    assert code == 1 and len(stopped["groups"]) == 1 and stopped["cells"] == len(asked)
    code, last = run("last.json", "--part", "2/2")
    assert code == 0 and last["failed"] == {}
    code, found = run("whole.json", "--add", str(tmp_path / "stopped.json"), str(tmp_path / "last.json"))
    assert code == 1 and found["failed"] == {str(asked[0]): "wrong"} and len(found["environments"]) == 3
    assert len(asked) == len(set(asked)) == found["cells"] == sum(found["groups"].values())
    assert set(asked) == set(whole({**AXES, "repeated": ("twice",), "engine": ("host",)}))
    with pytest.raises(ValueError, match="one result is of compiled cells"):
        run("compiled.json", "--compiled", "--add", str(tmp_path / "last.json"))
