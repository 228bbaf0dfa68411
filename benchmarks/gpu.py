"""Run the GPU benchmarks one after the other within a time budget; each writes its result file as far as it came.

    python benchmarks/gpu.py --out benchmarks/results --label h200 [--budget-seconds 480] [softmax attention latency tiles sanitizer]

A benchmark starts no further case once its share of the budget is spent (what is left, divided by the weights of those to come), and is
stopped when it outruns that by ``GRACE`` seconds. Exits 1 when one failed, was stopped or did not start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE = 45.0
"""Seconds for the case that runs when a share is spent."""
LEAST = 15.0
"""Seconds below which a benchmark is not started."""


@dataclass(frozen=True)
class Benchmark:
    """A script, the result file's stem, and its weight in the budget."""

    script: str
    stem: str
    weight: float

    def command(self, out: Path, label: str, seconds: float) -> list[str]:
        return [sys.executable, str(ROOT / self.script), "--output", str(out / f"{self.stem}-{label}.json"), "--seconds", f"{seconds:.0f}"]


BENCHMARKS = {
    "softmax": Benchmark("benchmarks/softmax_gpu.py", "softmax", 1.0),
    "attention": Benchmark("benchmarks/attention_gpu.py", "attention", 2.0),
    "latency": Benchmark("benchmarks/latency_gpu.py", "latency", 0.7),
    "tiles": Benchmark("benchmarks/tile_sweep.py", "tile-sweep", 1.0),
    "sanitizer": Benchmark("packages/attn-cuda/tests/sanitize.py", "sanitizer", 2.0),
}
Run = Callable[[Sequence[str], float], int | None]


def run(command: Sequence[str], limit: float) -> int | None:
    """Exit code of the command, or None when it was stopped after ``limit`` seconds."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            return None


def share(left: float, names: Sequence[str]) -> float:
    """Seconds of the first of ``names`` when all of them share ``left``."""
    weights = [BENCHMARKS[name].weight for name in names]
    return left * weights[0] / sum(weights)


def run_all(
    names: Sequence[str], out: Path, label: str, budget: float, run: Run = run, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Run the named benchmarks within ``budget`` seconds; whether all of them ended well."""
    started, good = clock(), True
    for place, name in enumerate(names):
        left = budget - (clock() - started)
        seconds = share(left, names[place:])
        if seconds < LEAST:
            print(f"gpu: {name}: not started, {left:.0f} s are left", flush=True)
            good = False
            continue
        print(f"gpu: {name}: {seconds:.0f} s", flush=True)
        code = run(BENCHMARKS[name].command(out, label, seconds), seconds + GRACE)
        print(f"gpu: {name}: {'stopped' if code is None else f'exit code {code}'} after {clock() - started:.0f} s", flush=True)
        good = good and code == 0
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--label", default="h200", help="end of the result files' names")
    parser.add_argument("--budget-seconds", type=float, default=480)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if run_all(options.names, options.out, options.label, options.budget_seconds) else 1)


if __name__ == "__main__":
    main()
