"""Every cell of the matrix, on all processors: ``python whole_matrix.py [--part I/N] [--output FILE]``; exits with 1 when a cell fails.

Each cell runs on both engines and twice, so that these two axes need no cells of their own. A cell takes about a second of one processor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

from matrix_cells import AXES, Cell, whole


def failure(cell: Cell) -> str | None:
    """What is wrong with a cell on either engine."""
    from matrix_check import check  # JAX starts in the worker

    for engine in AXES["engine"]:
        try:
            check(replace(cell, engine=engine))
        except Exception as error:  # whatever it is, the other cells still run
            return f"{engine}: {type(error).__name__}: {str(error)[:300]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="the I-th of N parts")
    parser.add_argument("--output", type=Path, help="write the counts and failures as JSON")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    cells = list(whole({**AXES, "repeated": ("twice",), "engine": ("host",)}))[part - 1 :: parts]
    failed: dict[str, str] = {}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for index, (cell, reason) in enumerate(zip(cells, pool.imap(failure, cells, chunksize=8), strict=True), 1):
            if reason is not None:
                failed[str(cell)] = reason
                print(f"FAILED {cell}: {reason}", flush=True)
            if index % 100 == 0 or index == len(cells):
                print(f"{index} of {len(cells)} cells, {len(failed)} failed", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({"part": options.part, "cells": len(cells), "failed": failed}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
