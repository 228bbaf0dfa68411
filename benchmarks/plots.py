"""Plots of the result files, as SVG under benchmarks/results/plots/. The same results give the same bytes.

python benchmarks/plots.py [--check]    # --check writes nothing and exits 1 when a plot is missing or stale
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bars import Chart, Group, svg

RESULTS = Path(__file__).parent / "results"
PLOTS = RESULTS / "plots"
Row = dict[str, Any]


def grouped(rows: Iterable[Row], label: Callable[[Row], str], series: Callable[[Row], str], value: str) -> list[Group]:
    """One group a label, one bar a series, in the order of the rows."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(label(row), {})[series(row)] = row[value]
    return [Group(name, list(bars.items())) for name, bars in groups.items()]


def share(value: float) -> str:
    return f"{value:.2f}"


def size(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def with_type(row: Row) -> str:
    return f"{row['case']} {row['dtype']}"


def softmax(results: list[Row], direction: str) -> Chart:
    rows = [row for row in results if row["direction"] == direction and row["contender"] != "copy" and row["rows"] > 1000]
    groups = grouped(rows, with_type, lambda row: row["contender"], "of_copy")
    return Chart(f"Joint softmax, {direction}", "bandwidth over that of a copy (dashed: the copy)", groups, share, line=1.0)


def contender_and_direction(row: Row) -> str:
    return f"{row['contender']} {row['direction']}"


def attention_rate(results: list[Row]) -> Chart:
    rows = [row for row in results if row["contender"].startswith("attn_")]
    groups = grouped(rows, lambda row: row["case"], contender_and_direction, "of_fp32_gemm")
    return Chart("Ordered attention and products", "useful rate over torch's float32 matrix product", groups, share)


def attention_memory(results: list[Row]) -> Chart:
    measured = [row for row in results if "shape" in row and "peak_bytes" in row]
    rows = [row for row in measured if row["contender"].startswith("attn_") or row["contender"] == "materialised"]
    groups = grouped(rows, lambda row: row["case"], contender_and_direction, "peak_bytes")
    return Chart("Peak memory of attention", "bytes beyond inputs and results", groups, size, logarithmic=True, least=2**20)


def decode(results: list[Row]) -> Chart:
    found = []
    for row in results:
        if row["direction"] == "forward":
            found.append({**row, "us": row["median_ms"] * 1e3})
            if "bound_ms" in row:
                found.append({**row, "contender": "chain of FMAs", "us": row["bound_ms"] * 1e3})
    groups = grouped(found, lambda row: row["case"], lambda row: row["contender"], "us")
    return Chart("Decode", "microseconds; the chain is what the order of the sums cannot go below", groups, lambda value: f"{value:.0f} us")


def tiles(results: list[Row]) -> Chart:
    rows = [row for row in results if row["contender"] != "copy"]
    groups = grouped(rows, lambda row: f"{with_type(row)} {row['direction']}", lambda row: row["contender"], "of_copy")
    return Chart("Joint softmax by tile", "bandwidth over that of a copy (dashed: the copy)", groups, share, line=1.0)


def tensor_core_rate(results: list[Row], direction: str) -> Chart:
    rows = [row for row in results if row["direction"] == direction and "terabytes_per_second" not in row]
    groups = grouped(rows, lambda row: row["case"], lambda row: row["contender"], "tflops")
    return Chart(f"Attention of sm90-v1, {direction}", "useful TFLOP/s, bfloat16", groups, lambda value: f"{value:.0f}")


def tensor_core_decode(results: list[Row]) -> Chart:
    rows = [row for row in results if "terabytes_per_second" in row]
    groups = grouped(rows, lambda row: row["case"], lambda row: row["contender"], "terabytes_per_second")
    return Chart("Decode of sm90-v1", "TB/s of keys and values read", groups, share)


CHARTS: dict[str, tuple[str, Callable[[list[Row]], Chart]]] = {
    "softmax-forward": ("softmax-h200.json", lambda results: softmax(results, "forward")),
    "softmax-backward": ("softmax-h200.json", lambda results: softmax(results, "backward")),
    "attention-rate": ("attention-h200.json", attention_rate),
    "attention-memory": ("attention-h200.json", attention_memory),
    "decode": ("latency-h200.json", decode),
    "sm90-forward": ("sm90-h200.json", lambda results: tensor_core_rate(results, "forward")),
    "sm90-backward": ("sm90-h200.json", lambda results: tensor_core_rate(results, "backward")),
    "sm90-decode": ("sm90-h200.json", tensor_core_decode),
    "tile-sweep": ("tile-sweep-h200.json", tiles),
}


def rendered(results: Path = RESULTS) -> dict[str, str]:
    """Text of every plot whose result file exists and has rows for it, by file name."""
    found = {}
    for name, (source, make) in CHARTS.items():
        if (results / source).exists():
            chart = make(json.loads((results / source).read_text())["results"])
            if chart.groups:
                found[f"{name}.svg"] = svg(chart)
    return found


def stale(results: Path = RESULTS) -> list[str]:
    """Plots that are missing, differ from their results, or have none."""
    wanted = rendered(results)
    present = {path.name: path.read_text() for path in (results / "plots").glob("*.svg")}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for name in stale():
            print(f"{name} is stale: run `python benchmarks/plots.py`")
        return int(bool(stale()))
    PLOTS.mkdir(exist_ok=True)
    for path in PLOTS.glob("*.svg"):
        path.unlink()
    for name, text in rendered().items():
        (PLOTS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
