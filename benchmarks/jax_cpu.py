"""The host engine of attn-jax-rocm-sink beside XLA's attention on this CPU: medians of interleaved calls on random data.

    python benchmarks/jax_cpu.py --output benchmarks/results/jax-cpu.json [--rounds 5] [--seconds 300]

XLA is ``jax.nn.dot_product_attention`` with ``implementation="xla"``. Outputs are compared before anything is timed. Cases with sinks
time the host engine alone, since JAX's own attention has none.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import measuring
from jax_contenders import Case, arrays_of, backward_of, forward_of, largest_difference, ours, theirs

METHOD = "wall time of one compiled call, block_until_ready; rounds interleave the contenders after two warm-up calls; standard normal data"
CASES = (
    Case(1, 8, 8, 512, 64, "float32"),
    Case(1, 8, 2, 1024, 64, "float32"),
    Case(1, 8, 2, 1024, 64, "bfloat16"),
    Case(1, 8, 2, 2048, 64, "float32", window=127),
    Case(1, 8, 1, 1024, 64, "bfloat16", window=127, sinks=True),
)
CLOSE = {"float32": 1e-4, "bfloat16": 4e-2}


def milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - begin)


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    for _ in range(2):
        for call in calls.values():
            milliseconds(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    return times


def run(case: Case, rounds: int, report: measuring.Report) -> None:
    arrays = arrays_of(case)
    contenders = {"host": ours(case, "host")} | ({} if case.sinks else {"xla": theirs(case, "xla")})
    for direction, program in (("forward", forward_of), ("both", backward_of)):
        calls = {name: program(contender, arrays) for name, contender in contenders.items()}
        if "xla" in calls:
            difference = largest_difference(calls["host"](), calls["xla"]())
            if difference > CLOSE[case.dtype]:
                raise measuring.Different(f"host and xla differ by {difference:.3g} on {case}; nothing was timed")
        for name, samples in interleaved(calls, rounds).items():
            row = {"case": str(case), "contender": name, "direction": direction, **measuring.durations(samples)}
            report.add(row, "")
    report.compare("host", "xla")
    report.save()


def main() -> None:
    options = measuring.options(__doc__, rounds=5).parse_args()
    facts = {
        "jax": jax.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
    }
    report = measuring.Report(options.output, METHOD, options.seconds, facts=facts)
    for case in CASES:
        if report.has_time(str(case)):
            with report.guarded(str(case)):
                run(case, options.rounds, report)
    report.finish(options.add)


if __name__ == "__main__":
    main()
