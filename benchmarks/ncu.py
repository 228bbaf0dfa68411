"""Nsight Compute on named calls: a child process runs each call once between two markers, and the parent reads a row for each kernel.

ncu holds the GPU at its base clock, so its cycles compare kernels whatever the power limit makes of their clocks. It must be on the PATH
and may need the right to read performance counters.
"""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from measuring import Row

METRICS = {
    "cycles": "gpc__cycles_elapsed.max",
    "nanoseconds": "gpu__time_duration.sum",
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponential_pipe": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma_pipe": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "alu_pipe": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "shared_memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "device_memory": "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "waves": "launch__waves_per_multiprocessor",
}
SUMS = {"cycles", "nanoseconds", "bank_conflicts", "bytes_read", "bytes_written", "instructions"}
"""Of METRICS, what adds up over launches."""
UNITS = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "Kbyte/block": 1e3}
"""Of what ncu prints in a larger unit than the metric's own, how many of those it is."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
NUMBER = re.compile(r"-?[\d,]+(\.\d+)?")
MARKER = "spin_kernel"
"""torch's kernel that only waits: it stands before each call."""
FLAG = "--profiled"
"""The child's argument, and what it prints before the name of a call."""

Calls = Iterable[tuple[str, Callable[[], Callable[[], object]]]]
"""Names, and what makes the call."""


def run(calls: Calls, arguments: Sequence[str]) -> None:
    """What the child does, whose last argument is a pattern of names: each call once unprofiled, then once for ncu."""
    for name, make in calls:
        if re.search(arguments[-1], name) is None:
            continue
        print(f"{FLAG} {name}", flush=True)
        call = make()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile(program: str, pattern: str = "") -> list[Row]:
    """Of each kernel of each call that ``program --profiled PATTERN`` runs: METRICS, pipes in percent of their peak, and how many warps
    wait, by reason, for each one that issues an instruction."""
    command = ["ncu", "--profile-from-start", "off", "--section", "WarpStateStats", "--section", "LaunchStats"]
    command += ["--metrics", ",".join(METRICS.values()), "--csv", "--page", "raw", sys.executable, program, FLAG, pattern]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ... ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    head, units, *lines = csv.reader(io.StringIO("".join(line for line in done.stdout.splitlines(True) if line.startswith('"'))))
    factors = [UNITS.get(unit, 1.0) for unit in units]
    launches: dict[tuple[str, str], list[Row]] = {}
    remaining, case = iter(re.findall(rf"^{FLAG} (.*)$", done.stdout, re.MULTILINE)), ""
    for line in lines:
        cells = dict(zip(head, line, strict=True))
        if MARKER in cells["Kernel Name"]:
            case = next(remaining)
            continue
        values = {}
        for name, cell, factor in zip(head, line, factors, strict=True):
            if NUMBER.fullmatch(cell):
                values[name] = float(cell.replace(",", "")) * factor
        row: Row = {"grid": cells["Grid Size"], "block": cells["Block Size"], **{name: values[metric] for name, metric in METRICS.items()}}
        row["stalls"] = {found[1]: values[name] for name in head if (found := STALL.fullmatch(name))}
        launches.setdefault((case, short_name(cells["Kernel Name"])), []).append(row)
    return folded(launches)


def folded(launches: Mapping[tuple[str, str], list[Row]]) -> list[Row]:
    """A row for each kernel of each call, without those that take less than a hundredth of the call."""
    rows = [{"case": case, "kernel": kernel, "launches": len(found), **together(found)} for (case, kernel), found in launches.items()]
    whole = Counter[str]()
    for row in rows:
        whole[row["case"]] += row["nanoseconds"]
    return [row for row in rows if row["nanoseconds"] >= whole[row["case"]] / 100]


def together(rows: list[Row]) -> Row:
    """One row of a kernel's launches: sums, and means weighted by time, rounded to four digits; grid and block of the longest."""
    weights = [row["nanoseconds"] for row in rows]

    def mean(values: Iterable[float]) -> float:
        return float(f"{sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights):.4g}")

    longest = max(rows, key=lambda row: row["nanoseconds"])
    found: Row = {"grid": longest["grid"], "block": longest["block"]}
    for name in METRICS:
        found[name] = sum(row[name] for row in rows) if name in SUMS else mean(row[name] for row in rows)
    stalls = {name: mean(row["stalls"].get(name, 0.0) for row in rows) for name in longest["stalls"]}
    found["stalls"] = {name: value for name, value in sorted(stalls.items(), key=lambda item: -item[1]) if value >= 0.05}
    return found


def short_name(kernel: str) -> str:
    """``void attn_cuda::<unnamed>::tile_kernel<(int)1, attn::bfloat16>(...)`` to ``tile_kernel<1, bfloat16>``."""
    plain = re.sub(r"\((?:int|bool|anonymous namespace)\)|<unnamed>|attn::", "", kernel)
    found = re.search(r"(\w+)(<[^()]*>)?\(", plain)
    name = found[1] + (found[2] or "") if found else plain
    return "cuDNN" if name.startswith("cudnn") else name if len(name) < 80 else f"{name[:77]}..."
