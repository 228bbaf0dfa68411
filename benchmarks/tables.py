"""The tables of docs/performance.md, written from the result files between their markers.

    python benchmarks/tables.py [--check]    # --check writes nothing and exits 1 when a table is stale

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is one of ``TABLES``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import goals

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
Row = dict[str, Any]
Document = dict[str, Any]
NOTHING = ""


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def cell(rows: Iterable[Row], value: str, show: Callable[[float], str], **wanted: Any) -> str:
    """``value`` of the row that has all of ``wanted``, or nothing."""
    for row in rows:
        if all(row.get(name) == one for name, one in wanted.items()) and row.get(value) is not None:
            return show(row[value])
    return NOTHING


def two_digits(value: float) -> str:
    return f"{value:.2f}"


def microseconds(milliseconds: float) -> str:
    return f"{milliseconds * 1e3:.1f}"


def size(value: float) -> str:
    return f"{value / 2**20:.1f}"


def softmax(document: Document, direction: str) -> str:
    """Share of the copy's bandwidth: a line for a shape and dtype, a column for a contender."""
    rows = [row for row in document["results"] if row["direction"] == direction and row["rows"] > 1000]
    contenders = [name for name in unique(row["contender"] for row in rows) if name != "copy"]
    cases = dict.fromkeys((row["case"], row["dtype"]) for row in rows)
    lines = [
        [
            f"{case.replace('x', ' x ')}, {dtype}",
            *(cell(rows, "of_copy", two_digits, case=case, dtype=dtype, contender=name) for name in contenders),
        ]
        for case, dtype in cases
    ]
    return markdown(["rows x keys, dtype", *contenders], lines)


def few_rows(document: Document) -> str:
    """Microseconds of the softmax of few rows."""
    rows = [row for row in document["results"] if row["rows"] <= 1000]
    contenders = unique(row["contender"] for row in rows)
    lines = [
        [f"{case.replace('x', ' x ')}, {dtype}, {way}"]
        + [cell(rows, "median_ms", microseconds, case=case, dtype=dtype, direction=way, contender=name) for name in contenders]
        for case, dtype, way in dict.fromkeys((row["case"], row["dtype"], row["direction"]) for row in rows)
    ]
    return markdown(["us", *contenders], lines)


def described(row: Row) -> str:
    """A shape in words, from the strings of the result file."""
    shape = row["shape"]
    heads = shape["heads"] if shape["heads"] == shape["kv_heads"] else f"{shape['heads']}/{shape['kv_heads']}"
    parts = [f"{heads} heads", f"{shape['queries']} x {shape['keys']}", f"D = {shape['head_dim']}", shape["dtype"].removeprefix("torch.")]
    parts += ["causal"] * (shape.get("causal") == "True") + ["sinks"] * (shape.get("sinks") == "True")
    for name, words in (("window", "window {}"), ("segments", "packed {}"), ("text", "{} text tokens")):
        parts += [words.format(shape[name])] if shape.get(name, "None") != "None" else []
    return f"{row['case']}: {', '.join(parts)}"


def attention(document: Document) -> str:
    """Useful rate over the float32 product, and peak memory, for each backend and direction."""
    rows = [row for row in document["results"] if "shape" in row]
    lines = []
    words = {row["case"]: described(row) for row in rows}
    for case, contender in dict.fromkeys((row["case"], row["contender"]) for row in rows):
        cells = [
            cell(rows, value, show, case=case, contender=contender, direction=way)
            for value, show in (("of_fp32_gemm", two_digits), ("peak_bytes", size))
            for way in ("forward", "backward")
        ]
        lines.append([words[case], contender, *cells])
    return markdown(["case", "", "forward", "backward", "forward, MiB", "backward, MiB"], lines)


def products(document: Document) -> str:
    rows = [row for row in document["results"] if "shape" not in row]
    lines = [
        [
            f"`{case}`",
            contender,
            *(cell(rows, "of_fp32_gemm", two_digits, case=case, contender=contender, direction=way) for way in ("forward", "backward")),
        ]
        for case, contender in dict.fromkeys((row["case"], row["contender"]) for row in rows)
    ]
    return markdown(["product", "", "forward", "backward"], lines)


def ratios(document: Document) -> str:
    """How many times faster than what it is compared with."""
    lines = [
        [
            row["case"] + (f", {row['dtype']}" if "dtype" in row else ""),
            row["direction"],
            row["contender"],
            row["beside"],
            two_digits(row["times_faster"]),
        ]
        for row in document["ratios"]
    ]
    return markdown(["case", "", "contender", "beside", "times faster"], lines)


def decode(document: Document) -> str:
    rows = [row for row in document["results"] if row["direction"] == "forward"]
    lines = [
        [
            row["case"],
            row["contender"],
            microseconds(row["median_ms"]),
            microseconds(row.get("bound_ms", 0.0)),
            two_digits(row.get("of_bound", 0.0)),
            NOTHING if (chain := goals.av_chain(row)) is None else two_digits(chain),
        ]
        for row in rows
    ]
    return markdown(["queries x keys", "", "us", "chain of FMAs, us", "times the chain", "P times the values, times the chain"], lines)


def overhead(document: Document) -> str:
    rows = [row for row in document["results"] if row["direction"] == "eager"]
    contenders = unique(row["contender"] for row in rows)
    lines = [
        [
            case.removeprefix("overhead "),
            *(cell(rows, "host_us", lambda value: f"{value:.1f}", case=case, contender=name) for name in contenders),
        ]
        for case in unique(row["case"] for row in rows)
    ]
    return markdown(["us of the host a call", *contenders], lines)


def by_contender(document: Document, value: str, head: str, show: Callable[[float], str], wanted: Callable[[Row], bool]) -> str:
    """``value`` of the rows that are ``wanted``: a line for a case and direction, a column for a contender."""
    rows = [row for row in document["results"] if wanted(row)]
    contenders = unique(row["contender"] for row in rows)
    lines = [
        [f"{case}, {way}", *(cell(rows, value, show, case=case, direction=way, contender=name) for name in contenders)]
        for case, way in dict.fromkeys((row["case"], row["direction"]) for row in rows)
    ]
    return markdown([head, *contenders], lines)


def tensor_cores(document: Document) -> str:
    return by_contender(document, "tflops", "TFLOP/s", lambda value: f"{value:.0f}", lambda row: "terabytes_per_second" not in row)


def tensor_core_decode(document: Document) -> str:
    return by_contender(document, "median_ms", "us", microseconds, lambda row: "terabytes_per_second" in row)


def segments(document: Document) -> str:
    return by_contender(document, "median_ms", "ms", lambda value: f"{value:.3f}", lambda row: True)


def jax_attention(document: Document) -> str:
    return by_contender(document, "median_ms", "ms", two_digits, lambda row: True)


def tiles(document: Document) -> str:
    """Forward share of the copy by case, and the largest errors over all accuracy rows, a line for each tile."""
    rows, errors = document["results"], document["environment"]["accuracy"]
    cases = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
    lines = []
    for tile in dict.fromkeys(row["tile"] for row in errors):
        speeds = [
            cell(rows, "of_copy", two_digits, case=case, dtype=dtype, direction="forward", contender=f"tile {tile}")
            for case, dtype in cases
        ]
        mine = [row for row in errors if row["tile"] == tile]
        worst = [f"{max(row['max_ulp'] for row in mine):.2f}", f"{max(row['sum_relative'] for row in mine):.1e}"]
        lines.append([str(tile), *speeds, *worst])
    heads = [f"{case.replace('x', ' x ')}, {dtype}" for case, dtype in cases]
    return markdown(["tile", *heads, "largest error, ulp", "of the sum"], lines)


def sanitizer(document: Document) -> str:
    lines = [
        [
            tool,
            str(total["parts"]),
            str(total["errors"]),
            str(total["false_reports"]),
            ", ".join(total["parts_without_result"]) or "none",
            f"{total['seconds']:.0f}",
        ]
        for tool, total in document["tools"].items()
    ]
    return markdown(["tool", "parts", "errors", "false reports", "parts that did not end", "seconds"], lines)


PIPES = {
    "tensor_pipe": "tensor cores",
    "exponential_pipe": "exponentials",
    "shared_memory": "shared memory",
    "device_memory": "device memory",
}
ORDERED_PIPES = {
    "issue": "issue",
    "fma_pipe": "FMA",
    "alu_pipe": "ALU",
    "shared_memory": "shared memory",
    "device_memory": "device memory",
    "warps": "warps",
}
LEAST_SHARE = 0.2
"""Of a call's time, from which on goal_profiles shows a kernel."""
LEFT_OUT = ("torch", "6544", "7401 bfloat16", "4608 float32")
"""Calls that goal_profiles does not show: peers, and those that are like one that it shows."""


def kernel_profiles(document: Document) -> str:
    """What keeps each kernel of sm90-v1 busy, in percent, and the largest reasons for which its warps wait."""
    lines = [
        [row["case"], f"`{row['kernel']}`", f"{row['cycles'] / 1e3:.0f}", *(f"{row[pipe]:.0f}" for pipe in PIPES), waits(row)]
        for row in document["environment"]["kernels"]
    ]
    return markdown(["case", "kernel", "1000 cycles", *PIPES.values(), "warps waiting an instruction"], lines)


def goal_profiles(document: Document) -> str:
    """The same of the kernels that take most of a call whose goal is missed, in one of its cases; times at base clock."""
    rows, lines = document["environment"]["kernels"], []
    for row in rows:
        whole = sum(other["nanoseconds"] for other in rows if other["case"] == row["case"])
        if row["nanoseconds"] >= LEAST_SHARE * whole and not any(part in row["case"] for part in LEFT_OUT):
            name = row["kernel"].split("<")[0]
            pipes = [f"{row[pipe]:.0f}" for pipe in ORDERED_PIPES]
            lines.append([row["case"], f"`{name}`", f"{row['nanoseconds'] / 1e3:.1f}", *pipes, f"{row['registers']:.0f}", waits(row)])
    return markdown(["call", "kernel", "us", *ORDERED_PIPES.values(), "registers", "warps waiting an instruction"], lines)


def waits(row: Row) -> str:
    reasons = [item for item in row["stalls"].items() if item[0] != "selected"]
    return ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in reasons[:3])


def kernels_alone(document: Document) -> str:
    """TFLOP/s of what the gradient kernels of sm90-v1 execute, each alone."""
    rows = document["results"]
    ways = unique(row["direction"] for row in rows)
    lines = [
        [case, *(cell(rows, "executed_tflops", "{:.0f}".format, case=case, direction=way) for way in ways)]
        for case in unique(row["case"] for row in rows)
    ]
    return markdown(["TFLOP/s executed", *ways], lines)


def forward_ideas(document: Document) -> str:
    """Cycles of the forward of sm90-v1 with an idea, over those without it in the same run."""
    cases = ("d128", "d128-causal", "d64")
    lines = [
        [idea["idea"], *(f"{idea['of_before'][case]:.3f}" if case in idea["of_before"] else "" for case in cases)]
        for idea in document["forward"]
    ]
    return markdown(["cycles, of those before", *cases], lines)


def four_bit(document: Document) -> str:
    """Milliseconds of each direction and of a training step, and how many times as long the baselines take for a step."""
    rows, found = document["results"], document["ratios"]
    lines = []
    for case, contender in dict.fromkeys((row["case"], row["contender"]) for row in rows):
        times = [
            cell(rows, "median_ms", two_digits, case=case, contender=contender, direction=way) for way in ("forward", "backward", "step")
        ]
        shares = [
            cell(found, "times_faster", two_digits, case=case, contender=contender, beside=peer, direction="step")
            for peer in ("unquantized", "32x32 tiles")
        ]
        lines.append([case, contender, *times, *shares])
    return markdown(["heads x tokens", "", "forward, ms", "backward, ms", "step, ms", "of unquantized", "of 32x32 tiles"], lines)


def goal_verdicts(*documents: Document) -> str:
    """Every goal with what is wanted and reached, those missed in bold, and under the table why, and what to try next."""
    lines = []
    reasons: dict[goals.Reason, int] = {}
    for verdict in goals.verdicts(dict(zip(goals.FILES, documents, strict=True))):
        goal = verdict.goal
        shown = [f"{value:.{goal.digits}f}" for value in verdict.reached.values()]
        reached = [f"**{text}**" if label in verdict.missed else text for label, text in zip(verdict.reached, shown, strict=True)]
        note = "met"
        if verdict.missed:
            note = "missed" if goal.reason is None else f"missed ({reasons.setdefault(goal.reason, len(reasons) + 1)})"
        wanted = f"{'at most' if goal.at_most else 'at least'} {goal.wanted:g} {goal.unit}"
        lines.append([f"{goal.what}: {' / '.join(verdict.reached)}", wanted, " / ".join(reached), note])
    notes = "".join(f"{number}. {reason.why} Next: {reason.then[0].lower()}{reason.then[1:]}\n" for reason, number in reasons.items())
    return markdown(["goal", "wanted", "reached", ""], lines) + ("\n" + notes if notes else NOTHING)


TABLES: dict[str, tuple[str | tuple[str, ...], Callable[..., str]]] = {
    "goals": (goals.FILES, goal_verdicts),
    "softmax": ("softmax-h200.json", lambda document: softmax(document, "forward")),
    "softmax-backward": ("softmax-h200.json", lambda document: softmax(document, "backward")),
    "softmax-few-rows": ("softmax-h200.json", few_rows),
    "softmax-ratios": ("softmax-h200.json", ratios),
    "attention": ("attention-h200.json", attention),
    "products": ("attention-h200.json", products),
    "attention-ratios": ("attention-h200.json", ratios),
    "decode": ("latency-h200.json", decode),
    "overhead": ("latency-h200.json", overhead),
    "sm90": ("sm90-h200.json", tensor_cores),
    "sm90-decode": ("sm90-h200.json", tensor_core_decode),
    "sm90-profile": ("sm90-profile-h200.json", kernel_profiles),
    "sm90-alone": ("sm90-profile-h200.json", kernels_alone),
    "goal-profiles": ("goals-profile-h200.json", goal_profiles),
    "sm90-ideas": ("sm90-ideas-h200.json", forward_ideas),
    "segments": ("segments-h200.json", segments),
    "qat": ("qat-h200.json", four_bit),
    "jax": ("jax-h200.json", jax_attention),
    "jax-cpu": ("jax-cpu.json", jax_attention),
    "tile-sweep": ("tile-sweep-h200.json", tiles),
    "sanitizer": ("sanitizer-h200.json", sanitizer),
}


def table(name: str, results: Path = RESULTS) -> str:
    """The named table. Raises ValueError for an unknown name or a missing result file, LookupError for a goal without its row."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    sources, make = TABLES[name]
    files = [results / source for source in ((sources,) if isinstance(sources, str) else sources)]
    for file in files:
        if not file.exists():
            raise ValueError(f"table {name!r} is of {file.name}, which is not there")
    return make(*(json.loads(file.read_text()) for file in files))


def replaced(text: str, results: Path = RESULTS) -> str:
    """``text`` with every table between its markers."""
    return PLACE.sub(lambda found: f"{found.group(1)}{table(found.group(2), results)}{found.group(3)}", text)


def main(arguments: list[str]) -> int:
    before = DOCUMENT.read_text()
    after = replaced(before)
    if arguments == ["--check"]:
        print("the tables are current" if before == after else f"{DOCUMENT.name} is stale: run `python benchmarks/tables.py`")
        return int(before != after)
    DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
