"""Every cell of the matrix, on all processors: ``python whole_matrix.py [--part I/N] [--output FILE]``; exits with 1 when a cell fails.

Each cell runs on every engine and twice, so that these two axes need no cells of their own; on the ck engine, over the recording fake of
AITER, it runs or is refused as ``matrix_ck`` lists. Cells run operation by operation, so that they share what XLA compiles; a process
takes all cells of the same shapes and dtypes at a time, since then it compiles little. ``--compiled`` makes one program of each, as the
tests do with their sample, and takes several times as long. What the result files after ``--add`` have is kept and not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from matrix_cells import AXES, Cell, whole

XLA_FLAGS = (
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
)
"""One thread, and the older emitters, which compile faster."""
_kept: list[Any] = []
"""What a worker holds for its life: the fakes, and the engine over them."""


def start(library: Path, processors: multiprocessing.SimpleQueue[int]) -> None:
    """Give a worker one processor, so that what it starts has one thread, and put its ck engine over the fakes. JAX starts here alone."""
    os.sched_setaffinity(0, {processors.get()})
    import pytest
    from engine_fakes import Fakes, installed

    fakes = Fakes(library)
    fakes.set_aiter()
    engine = installed(fakes, "ck", pytest.MonkeyPatch())
    next(engine)
    _kept.extend((fakes, engine))


def failure(cell: Cell, *, compiled: bool) -> str | None:
    """What is wrong with a cell on one of the engines."""
    from matrix_check import check

    for engine in AXES["engine"]:
        try:
            check(replace(cell, engine=engine), compiled=compiled)
        except Exception as error:  # whatever it is, the other cells still run
            return f"{engine}: {type(error).__name__}: {str(error)[:300]}"
    _kept[0].take_log()
    return None


def failures(group: tuple[str, list[Cell]], *, compiled: bool) -> tuple[str, list[str | None]]:
    name, cells = group
    return name, [failure(cell, compiled=compiled) for cell in cells]


def results(chosen: dict[str, list[Cell]], processes: int, *, compiled: bool) -> Iterator[tuple[str, list[str | None]]]:
    """``failures`` of each group, in no order."""
    from engine_fakes import build

    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": XLA_FLAGS}
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))[0]
        context = multiprocessing.get_context("spawn")
        processors = context.SimpleQueue()
        for _, processor in zip(range(processes), itertools.cycle(os.sched_getaffinity(0)), strict=False):
            processors.put(processor)
        with context.Pool(processes, start, (library, processors)) as pool:
            yield from pool.imap_unordered(partial(failures, compiled=compiled), chosen.items())


def groups() -> dict[str, list[Cell]]:
    """All cells, those of the same shapes and dtypes together."""
    found: dict[str, list[Cell]] = {}
    for cell in whole({**AXES, "repeated": ("twice",), "engine": ("host",)}):
        found.setdefault("-".join((cell.layout, cell.heads, cell.dtype, cell.bias)), []).append(cell)
    return found


@dataclass
class Result:
    """Cells run by group, failures by cell, and where each part of it ran."""

    compiled: bool
    groups: dict[str, int]
    failed: dict[str, str]
    environments: list[dict[str, Any]]

    def add(self, other: Result) -> None:
        """Raises ValueError where the other ran otherwise."""
        if other.compiled != self.compiled:
            raise ValueError("one result is of compiled cells, the other is not")
        self.groups |= other.groups
        self.failed |= other.failed
        self.environments += other.environments


def about() -> dict[str, Any]:
    from attn_spec._environment import environment
    from attn_spec._registry import fingerprints

    return {**environment(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "fingerprints": fingerprints()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="the I-th of N parts")
    parser.add_argument("--compiled", action="store_true", help="one XLA program a cell")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, help="take no further results after this time")
    parser.add_argument("--output", type=Path, help="write the counts and failures as JSON, after every group")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="result files of earlier runs")
    options = parser.parse_args()
    result = Result(options.compiled, {}, {}, [])
    for path in options.add:
        result.add(Result(**{name: value for name, value in json.loads(path.read_text()).items() if name != "cells"}))
    part, parts = map(int, options.part.split("/"))
    wanted = dict(list(groups().items())[part - 1 :: parts])
    chosen = {name: cells for name, cells in wanted.items() if name not in result.groups}
    cells, started = sum(map(len, wanted.values())), time.monotonic()
    result.environments.append({**about(), "groups": 0, "seconds": 0})
    for name, reasons in results(chosen, options.processes, compiled=options.compiled):
        result.groups[name] = len(reasons)
        for cell, reason in zip(chosen[name], reasons, strict=True):
            if reason is not None:
                result.failed[str(cell)] = reason
                print(f"FAILED {cell}: {reason}", flush=True)
        done, seconds = sum(result.groups.values()), round(time.monotonic() - started)
        print(f"{done} of {cells} cells, {len(result.failed)} failed, {seconds} s", flush=True)
        if options.output is not None:
            result.environments[-1] |= {"groups": result.environments[-1]["groups"] + 1, "seconds": seconds}
            options.output.write_text(json.dumps({"cells": done, **asdict(result)}, indent=1) + "\n")
        if options.seconds is not None and seconds > options.seconds:
            break
    missing = [name for name in wanted if name not in result.groups]
    if missing:
        print(f"{len(missing)} groups were not run, {missing[0]} the first")
    return 1 if result.failed or missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
