"""Every cell of the matrix, on all processors: ``python whole_matrix.py [--part I/N] [--output FILE]``; exits with 1 when a cell fails.

Each cell runs on every engine and twice, so that these two axes need no cells of their own; on the ck engine, over the recording fake of
AITER, it runs or is refused as ``matrix_ck`` lists. Cells run operation by operation, so that they share what XLA compiles; ``--compiled``
makes one program of each, as the tests do with their sample, and takes several times as long.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matrix_cells import AXES, Cell, whole

_kept: list[Any] = []
"""What a worker holds for its life: the fakes, and the engine over them."""


def start(library: Path) -> None:
    """Put the ck engine of a worker over the fakes. JAX starts in the workers alone."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="the I-th of N parts")
    parser.add_argument("--compiled", action="store_true", help="one XLA program a cell")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, help="start no further cell after this time")
    parser.add_argument("--output", type=Path, help="write the counts and failures as JSON")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    cells = list(whole({**AXES, "repeated": ("twice",), "engine": ("host",)}))[part - 1 :: parts]
    failed: dict[str, str] = {}
    started, done = time.monotonic(), 0
    from engine_fakes import build

    folder = Path(tempfile.mkdtemp())
    library = build(folder)[0]
    with multiprocessing.get_context("spawn").Pool(options.processes, start, (library,)) as pool:
        for cell, reason in zip(cells, pool.imap(partial(failure, compiled=options.compiled), cells, chunksize=4), strict=True):
            done += 1
            if reason is not None:
                failed[str(cell)] = reason
                print(f"FAILED {cell}: {reason}", flush=True)
            if done % 100 == 0 or done == len(cells):
                print(f"{done} of {len(cells)} cells, {len(failed)} failed, {time.monotonic() - started:.0f} s", flush=True)
            if options.seconds is not None and time.monotonic() - started > options.seconds:
                print(f"stopped after {done} of {len(cells)} cells", flush=True)
                break
    shutil.rmtree(folder)
    if options.output is not None:
        counts = {"part": options.part, "compiled": options.compiled, "cells": len(cells), "done": done, "failed": failed}
        options.output.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if failed or done < len(cells) else 0


if __name__ == "__main__":
    raise SystemExit(main())
