"""Plots and tables say what the result files say."""

from __future__ import annotations

import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODULES = ("plots", "tables", "bars", "goals")
MEASURED = ("softmax-h200.json", "attention-h200.json", "latency-h200.json", "tile-sweep-h200.json")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the result files that a test may change."""
    return Path(shutil.copytree(RESULTS, tmp_path / "results"))


def change(path: Path, value: str, factor: float) -> None:
    """Multiply ``value`` of every row."""
    document = json.loads(path.read_text())
    for row in document["results"]:
        row[value] *= factor
    path.write_text(json.dumps(document))


def test_the_plots_are_current(modules: SimpleNamespace) -> None:
    assert modules.plots.stale() == [], "run `python benchmarks/plots.py`"


def test_a_changed_result_makes_its_plots_stale(modules: SimpleNamespace, results: Path) -> None:
    assert modules.plots.stale(results) == []
    change(results / "softmax-h200.json", "of_copy", 0.5)
    assert modules.plots.stale(results) == ["softmax-backward.svg", "softmax-forward.svg"]
    (results / "plots" / "extra.svg").write_text("")
    assert "extra.svg" in modules.plots.stale(results)


def test_plots_are_well_formed_and_show_every_value(modules: SimpleNamespace) -> None:
    for text in modules.plots.rendered().values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
    group = modules.bars.Group("<label>", [("a & b", 3.0), ("c", 300.0)])
    chart = modules.bars.Chart("title", "meaning", [group], lambda value: f"{value:.1f} s", logarithmic=True, least=1.0)
    text = modules.bars.svg(chart)
    shown = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")]
    assert shown == ["title", "a & b", "c", "<label>", "3.0 s", "300.0 s", "meaning, logarithmic"]
    assert modules.bars.position(chart, 300.0) == 1.0 and modules.bars.position(chart, 0.5) == 0.0
    assert modules.bars.position(chart, 300.0**0.5) == pytest.approx(0.5)


def test_a_chart_with_more_series_than_colours_is_refused(modules: SimpleNamespace) -> None:
    group = modules.bars.Group("one", [(str(number), 1.0) for number in range(9)])
    with pytest.raises(ValueError, match="9 series; at most 8"):
        modules.bars.svg(modules.bars.Chart("title", "meaning", [group], str))


def test_the_tables_in_the_document_are_current(modules: SimpleNamespace) -> None:
    document = modules.tables.DOCUMENT.read_text()
    assert modules.tables.replaced(document) == document, "run `python benchmarks/tables.py`"
    assert {name for _, name, _ in modules.tables.PLACE.findall(document)} >= {"goals", "softmax", "attention", "products"}


def test_a_changed_result_or_an_edited_figure_is_noticed(modules: SimpleNamespace, results: Path) -> None:
    document = modules.tables.DOCUMENT.read_text()
    place = modules.tables.PLACE.search(document)
    edited = document.replace(place.group(0), place.group(0).replace("0.", "0.9", 1))
    assert edited != document and modules.tables.replaced(edited, results) == document
    change(results / "softmax-h200.json", "of_copy", 0.5)
    assert modules.tables.replaced(document, results) != document


def test_an_unknown_table_and_a_missing_file_are_named(modules: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown table 'none'; known: goals, softmax"):
        modules.tables.table("none")
    with pytest.raises(ValueError, match=r"softmax-h200\.json, which is not there"):
        modules.tables.table("softmax", tmp_path)


@pytest.mark.parametrize("name", [name for name in MEASURED if (RESULTS / name).exists()])
def test_a_result_file_says_how_it_was_made(name: str) -> None:
    document = json.loads((RESULTS / name).read_text())
    assert document["environment"].keys() >= {"date", "command", "device", "python", "torch", "cuda", "method"}
    assert "H200" in document["environment"]["device"]
    assert document["results"]
    assert all(row.keys() >= {"case", "contender", "direction", "median_ms"} and row["median_ms"] > 0 for row in document["results"])


LATENCY = {
    "results": [
        {
            "case": "decode-1x8192",
            "contender": "attn_cuda",
            "direction": "forward",
            "median_ms": 0.05,
            "bound_ms": 0.02,
            "of_bound": 2.5,
            "kernels_us": {"values_kernel": 30.0},
        },
        {"case": "overhead attention", "contender": "attn_cuda", "direction": "eager", "median_ms": 0.012, "host_us": 12.0},
        {"case": "overhead attention", "contender": "torch", "direction": "eager", "median_ms": 0.02, "host_us": 20.0},
    ]
}
SWEEP = {
    "environment": {"accuracy": [{"tile": 64, "max_ulp": 2.5, "sum_relative": 1e-7}, {"tile": 64, "max_ulp": 1.5, "sum_relative": 3e-7}]},
    "results": [{"case": "8x9", "dtype": "float32", "contender": "tile 64", "direction": "forward", "median_ms": 1.0, "of_copy": 0.5}],
}
SANITIZED = {"tools": {"racecheck": {"errors": 0, "false_reports": 2, "parts": 8, "parts_without_result": ["3/8"], "seconds": 71.4}}}


def test_tables_of_the_other_files(modules: SimpleNamespace) -> None:
    tables = modules.tables
    assert "| decode-1x8192 | attn_cuda | 50.0 | 20.0 | 2.50 | 1.50 |" in tables.decode(LATENCY)
    assert "| attention | 12.0 | 20.0 |" in tables.overhead(LATENCY)
    assert "| 64 | 0.50 | 2.50 | 3.0e-07 |" in tables.tiles(SWEEP)
    assert "| racecheck | 8 | 0 | 2 | 3/8 | 71 |" in tables.sanitizer(SANITIZED)
    ratio = {"case": "d128", "direction": "forward", "contender": "attn_cuda", "beside": "materialised", "times_faster": 21.5}
    assert "| d128 | forward | attn_cuda | materialised | 21.50 |" in tables.ratios({"ratios": [ratio]})


def test_plots_of_the_other_files(modules: SimpleNamespace) -> None:
    groups = modules.plots.decode(LATENCY["results"]).groups
    assert [(group.label, dict(group.bars)) for group in groups] == [("decode-1x8192", {"attn_cuda": 50.0, "chain of FMAs": 20.0})]
    assert modules.plots.tiles(SWEEP["results"]).groups[0].bars == [("tile 64", 0.5)]
    used = {"case": "d", "shape": {}, "contender": "materialised", "direction": "forward", "peak_bytes": 3 << 30}
    chart = modules.plots.attention_memory([used, {**used, "contender": "torch math"}])
    assert chart.series == ["materialised forward"] and "3.00 GiB" in modules.bars.svg(chart)
