"""The goals of speed: each has its figures in the result files, and a missed one says why and what is next."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield import_module("goals")
    sys.modules.pop("goals", None)


@pytest.fixture
def documents(goals: Any) -> dict[str, Any]:
    return {name: json.loads((ROOT / "benchmarks" / "results" / name).read_text()) for name in goals.FILES}


def test_every_goal_has_its_rows_and_a_missed_one_its_reason(goals: Any, documents: dict[str, Any]) -> None:
    found = goals.verdicts(documents)
    assert [verdict.goal for verdict in found] == list(goals.GOALS) and all(verdict.reached for verdict in found)
    without = [verdict.goal.what for verdict in found if verdict.missed and verdict.goal.reason is None]
    assert without == [], "missed without a reason in benchmarks/goals.py"
    reasons = {goal.reason for goal in goals.GOALS} - {None}
    assert all(reason.why.endswith(".") and reason.then.endswith(".") for reason in reasons)


def test_every_operator_and_contract_has_goals(goals: Any) -> None:
    text = " ".join(goal.what for goal in goals.GOALS)
    for name in (
        "softmax",
        "joint_attn_qk_gemm",
        "joint_attn_av_gemm",
        "decode",
        "eager",
        "ordered-v1",
        "ordered-v2",
        "sm90-v1",
        "nvfp4-sm90-v1",
    ):
        assert name in text


def test_a_rerun_decides_what_is_met(goals: Any, documents: dict[str, Any]) -> None:
    """Every rate halved misses what was met, every time halved meets what was missed: no verdict is written down."""
    what = "attention, `ordered-v1`, attn_cuda, D = 128 forward"
    slow = copy.deepcopy(documents)
    for row in slow[goals.ATTENTION]["results"]:
        row["of_fp32_gemm"] /= 100
    (slower,) = [verdict for verdict in goals.verdicts(slow) if verdict.goal.what == what and len(verdict.reached) > 1]
    assert set(slower.missed) == set(slower.reached)
    fast = copy.deepcopy(documents)
    for row in fast[goals.LATENCY]["results"]:
        row["kernels_us"] = dict.fromkeys(row.get("kernels_us", {}), 1.0)
        row["host_us"] = 1.0
    bounded = [verdict for verdict in goals.verdicts(fast) if verdict.goal.at_most and "sm90" not in verdict.goal.what]
    assert len(bounded) == 7 and all(verdict.missed == () for verdict in bounded)


def test_a_row_that_is_absent_or_twice_there_is_named(goals: Any, documents: dict[str, Any]) -> None:
    rows = documents[goals.SOFTMAX]["results"]
    documents[goals.SOFTMAX]["results"] = rows[1:]
    with pytest.raises(LookupError, match=r"softmax-h200\.json has 0 rows of .*110592x4608"):
        goals.verdicts(documents)
    documents[goals.SOFTMAX]["results"] = [rows[0], *rows]
    with pytest.raises(LookupError, match="has 2 rows"):
        goals.verdicts(documents)


def test_the_chain_of_the_values_is_of_its_kernel_alone(goals: Any) -> None:
    row = {"contender": "attn_cuda", "kernels_us": {"values_kernel<2>": 30.0, "merge_kernel": 5.0}, "bound_ms": 0.01}
    assert goals.av_chain(row) == pytest.approx(3.0)
    assert goals.av_chain({**row, "contender": "torch sdpa"}) is None
    assert goals.av_chain({**row, "kernels_us": {}}) is None
    with pytest.raises(LookupError, match="lacks"):
        goals.Figure("f", goals.av_chain, {}).read({"f": {"results": [{**row, "kernels_us": {}}]}})


def test_a_figure_is_over_the_largest_of_its_peers(goals: Any) -> None:
    rows = [{"contender": name, "rate": rate} for name, rate in (("ours", 6.0), ("one", 8.0), ("other", 12.0))]
    peers = tuple(goals.Figure("f", "rate", {"contender": name}) for name in ("one", "other"))
    assert goals.Figure("f", "rate", {"contender": "ours"}, peers).read({"f": {"results": rows}}) == 0.5
