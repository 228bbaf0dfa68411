"""The main job: every operator on every backend engine of this machine, on the named cases, compared byte for byte.

``python benchmarks/cross_backend.py --output build/cross_backend`` prints progress and a table, writes ``report.json`` and ``report.html``,
and exits 1 when a row is ``different``. Sampled rows are compared with attn_reference's PyTorch definition; whole layers with the first
engine that runs them, with the recorded digests, and with the sample. Each case and dtype is a task; tasks run in processes side by side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from attn_spec import Backend, Call, UnsupportedProblem
from attn_spec._compare import Difference, difference, digest
from attn_spec._contract import CONTRACTS, default_contract
from attn_spec._registry import get_backend, installed, load
from attn_spec.testing.cases import CASES, Case, Sample
from captured import Captured
from report import Row, table, write

DEFINITION = ("attn_reference", "pytorch")
LARGE = 1_200_000_000
"""Pairs of a layer that takes an engine of the CPU most of a minute."""
DIGESTS = Path(__file__).parent / "layer_digests.json"
Layer = Case | Captured
ALL_CASES: dict[str, Layer] = {**CASES, Captured.name: Captured()}


@dataclass(frozen=True)
class Runner:
    """One engine on one device."""

    backend: Backend
    engine: str
    device: str

    @property
    def name(self) -> str:
        return f"{self.backend.name}:{self.engine}"

    def supports(self, op: str) -> bool:
        return op in self.backend.capabilities(self.engine).operators

    def evaluate(self, call: Call) -> dict[str, np.ndarray]:
        return self.backend.evaluate(call, device=self.device, engine=self.engine)


@dataclass(frozen=True)
class Task:
    """One case in one dtype. ``started`` is the wall clock (s) of the whole job; ``recorded``: layer digests to check, None: none.

    ``engines``: how many engines run the whole layer.
    """

    case: str
    dtype: str
    engines: int
    recorded: Mapping[str, str] | None
    started: float


@dataclass
class Job:
    """Rows so far, with progress on standard error."""

    runners: list[Runner]
    started: float
    rows: list[Row] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, **fields: object) -> None:
        self.rows.append(Row(**fields))  # type: ignore[arg-type]


@cache
def find_runners() -> tuple[list[Runner], list[Row]]:
    """Usable engines; an engine that is not usable becomes one ``absent`` row with its reason."""
    runners: list[Runner] = []
    absent: list[Row] = []
    for name in installed():
        loaded = load(name)
        if loaded.backend is None:
            absent.append(Row(op="all", backend=name, device="-", status="absent", reason=str(loaded.error)))
            continue
        for engine in loaded.backend.engines:
            for device in loaded.backend.capabilities(engine).devices:
                reason = loaded.backend.unavailable(device, engine)
                if reason is None:
                    runners.append(Runner(loaded.backend, engine, device))
                else:
                    absent.append(Row(op="all", backend=f"{name}:{engine}", device=device, status="absent", reason=reason))
    return runners, absent


def directions(call: Call, found: Mapping[str, np.ndarray]) -> Iterator[tuple[str, list[str]]]:
    gradients = [f"d{name}" for name in call.wrt]
    yield "forward", [name for name in found if name not in gradients]
    if gradients:
        yield "backward", gradients


def compare(names: list[str], found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Difference:
    """One verdict over several arrays: mismatches are added, the worst distance is kept."""
    parts = {name: difference(found[name], expected[name]) for name in names}
    bad = {name: part for name, part in parts.items() if not part.equal}
    if not bad:
        return Difference(True)
    reason = "; ".join(f"{name}: {part.text()}" for name, part in bad.items())
    return Difference(False, sum(part.mismatched for part in bad.values()), max(part.max_ulp for part in bad.values()), reason=reason)


def record(
    job: Job,
    runner: Runner,
    case: str,
    call: Call,
    dtype: str,
    fraction: float,
    seconds: float,
    found: dict,
    expected: Mapping,
    against: str,
) -> None:
    for direction, names in directions(call, found):
        shared = [name for name in names if name in expected]
        if not shared:
            continue
        job.add(
            op=call.op,
            contract=call.contract or default_contract(call.op, dtype, 1, runner.device),
            direction=direction,
            dtype=dtype,
            case=case,
            fraction=fraction,
            backend=runner.name,
            against=against,
            device=runner.device,
            seconds=round(seconds, 3),
            **judged(compare(shared, found, expected)),
        )


def judged(verdict: Difference) -> dict[str, Any]:
    """The columns of a row that say what a comparison found."""
    return {
        "byte_equal": verdict.equal,
        "mismatched": verdict.mismatched,
        "max_ulp": verdict.max_ulp,
        "status": "equal" if verdict.equal else "different",
        "reason": verdict.reason,
    }


def run(task: Task) -> tuple[list[Row], dict[str, str]]:
    """Rows of one task, and the digests of its layer."""
    job = Job(find_runners()[0], task.started)
    case = ALL_CASES[task.case]
    sampled = run_samples(job, case, task.dtype, Runner(get_backend(DEFINITION[0]), DEFINITION[1], "cpu"))
    if task.engines and layer_runners(job, case.operator, None):
        for call in under_each_contract(case.layer_call(task.dtype), task.dtype):
            run_layer(job, case, task, call, sampled)
    return job.rows, job.digests


def run_samples(job: Job, case: Layer, dtype: str, definition: Runner) -> dict[str | None, dict[str, np.ndarray]]:
    """Every engine on every sampled call; returns the definition's attention results by contract (None: the default one)."""
    kept: dict[str | None, dict[str, np.ndarray]] = {}
    for sample in case.sample_calls(dtype, definition.evaluate):
        for call in under_each_contract(sample.call, sample.dtype):
            start = time.perf_counter()
            try:
                expected = definition.evaluate(call)
            except UnsupportedProblem as refusal:
                if call.contract is None:
                    raise
                refuse(job, definition, case.name, call, sample.dtype, sample.fraction, refusal)
                continue
            seconds = time.perf_counter() - start
            name = f"{call.op}{'' if call.contract is None else f' {call.contract}'} {sample.dtype}"
            job.say(f"{case.name} {name} sample ({sample.fraction:.2%}): {seconds:.1f} s by the definition")
            if call.op in ("attention", "attention_varlen"):
                kept[call.contract] = expected
            run_sample(job, case.name, call, sample, definition, expected)
    return kept


def under_each_contract(call: Call, dtype: str) -> Iterator[Call]:
    """The call under the default contract, then under every other one that covers its operator."""
    yield call
    default = default_contract(call.op, dtype, 1, "cpu")
    yield from (replace(call, contract=name) for name, other in CONTRACTS.items() if name != default and call.op in other.operators)


def run_sample(job: Job, case: str, call: Call, sample: Sample, definition: Runner, expected: Mapping[str, np.ndarray]) -> None:
    """Every engine that has the operator on one call."""
    for runner in job.runners:
        if (runner.name, runner.device) == (definition.name, definition.device) or not runner.supports(call.op):
            continue
        start = time.perf_counter()
        try:
            found = runner.evaluate(call)
        except UnsupportedProblem as refusal:
            refuse(job, runner, case, call, sample.dtype, sample.fraction, refusal)
            continue
        seconds = time.perf_counter() - start
        record(job, runner, case, call, sample.dtype, sample.fraction, seconds, found, expected, definition.name)


def refuse(job: Job, runner: Runner, case: str, call: Call, dtype: str, fraction: float, refusal: UnsupportedProblem) -> None:
    job.add(
        op=call.op,
        contract=call.contract or default_contract(call.op, dtype, 1, runner.device),
        dtype=dtype,
        case=case,
        fraction=fraction,
        backend=runner.name,
        device=runner.device,
        status="refused",
        reason="; ".join(refusal.reasons),
    )


def layer_runners(job: Job, op: str, contract: str | None) -> list[Runner]:
    """Engines that run whole layers. Contracts but the default are of a GPU's tensor cores; no engine of the CPU is quick enough there."""
    return [
        runner
        for runner in job.runners
        if runner.backend.runs_layers(runner.device, runner.engine) and runner.supports(op) and (contract is None or runner.device != "cpu")
    ]


def run_layer(job: Job, case: Layer, task: Task, call: Call, sampled: Mapping[str | None, Mapping[str, np.ndarray]]) -> None:
    """The whole layer on the engines that are quick enough: against each other, the recorded digests (default contract) and the sample."""
    dtype, default = task.dtype, call.contract is None
    first: tuple[str, dict[str, np.ndarray]] | None = None
    for runner in layer_runners(job, call.op, call.contract)[: task.engines]:
        start = time.perf_counter()
        try:
            found = runner.evaluate(call)
        except UnsupportedProblem as refusal:
            refuse(job, runner, case.name, call, dtype, 1.0, refusal)
            continue
        seconds = time.perf_counter() - start
        job.say(f"{case.name} {call.op} {call.contract or ''} {dtype} layer by {runner.name} on {runner.device}: {seconds:.1f} s")
        if first is not None:
            record(job, runner, case.name, call, dtype, 1.0, seconds, found, first[1], first[0])
            continue
        first = (runner.name, found)
        if default:
            job.digests.update({f"{case.name} {dtype} {name}": digest(array) for name, array in found.items()})
            if task.recorded is not None:
                check_digests(job, runner, case.name, call, dtype, seconds, task.recorded)
        if call.contract in sampled:
            check_sample(job, runner, case, call, dtype, seconds, found, sampled[call.contract])


def check_digests(job: Job, runner: Runner, case: str, call: Call, dtype: str, seconds: float, recorded: Mapping[str, str]) -> None:
    wrong = [key.rpartition(" ")[2] for key, found in job.digests.items() if key in recorded and recorded[key] != found]
    missing = [key.rpartition(" ")[2] for key in job.digests if key not in recorded]
    job.add(
        op=call.op,
        direction="both",
        dtype=dtype,
        case=case,
        fraction=1.0,
        backend=runner.name,
        against="recorded digests",
        device=runner.device,
        byte_equal=not wrong and not missing,
        mismatched=len(wrong),
        status="different" if wrong or missing else "equal",
        reason="; ".join([f"digest of {name} differs" for name in wrong] + [f"no recorded digest of {name}" for name in missing]),
        seconds=round(seconds, 3),
    )


def check_sample(job: Job, runner: Runner, case: Layer, call: Call, dtype: str, seconds: float, found: dict, sample: Mapping) -> None:
    """The layer's sampled rows are the bytes that the definition computed for those rows alone."""
    part = case.sampled_part(found)
    names = [name for name in part if name in sample]
    expected = {name: sample[name].reshape(part[name].shape) for name in names}
    job.add(
        op=call.op,
        contract=call.contract or default_contract(call.op, dtype, 1, runner.device),
        direction="both",
        dtype=dtype,
        case=case.name,
        fraction=1.0,
        backend=runner.name,
        against="the sample of attn_reference:pytorch",
        device=runner.device,
        seconds=round(seconds, 3),
        **judged(compare(names, part, expected)),
    )


def engines(case: Layer, dtype: str, large_once: bool) -> int:
    """How many engines run a whole layer: all, or of a large one, with ``large_once``, one in the first dtype."""
    if not large_once or case.pairs < LARGE:
        return sys.maxsize
    return 1 if dtype == case.dtypes[0] else 0


def expense(case: Layer) -> int:
    """What a task's time grows with: pairs of the layer, and keys of the samples, each of which costs an interpreter as much as 10,000."""
    return case.pairs + (10_000 * len(case.sample_rows) * case.keys if isinstance(case, Case) else 0)


def run_all(tasks: list[Task], processes: int) -> Iterator[tuple[list[Row], dict[str, str]]]:
    """Results in the order of ``tasks``, which run with the longest first, so that no process is left alone with it at the end."""
    # Each process takes its share of the cores, and JAX no more GPU memory than it uses.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        order = sorted(range(len(tasks)), key=lambda index: -expense(ALL_CASES[tasks[index].case]))
        futures = {index: pool.submit(run, tasks[index]) for index in order}
        yield from (futures[index].result() for index in range(len(tasks)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/cross_backend"), help="folder for report.json and report.html")
    parser.add_argument("--case", action="append", help="run only this case (repeatable)")
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument("--no-layers", action="store_true", help="samples only")
    layers.add_argument("--large-layers-once", action="store_true", help="the largest layers whole in one dtype and by one engine alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="tasks that run side by side (default: one a core)")
    parser.add_argument("--record-digests", action="store_true", help="write the digests of the whole layers instead of checking them")
    options = parser.parse_args()
    unknown = [name for name in options.case or () if name not in ALL_CASES]
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(ALL_CASES)}")
    if options.processes < 1:
        parser.error(f"--processes must be at least 1; got {options.processes}")
    runners, absent = find_runners()
    job = Job(runners, time.time(), [*absent])
    job.say(f"engines: {', '.join(f'{runner.name} on {runner.device}' for runner in job.runners)}; contracts: {', '.join(CONTRACTS)}")
    recorded = None if options.record_digests else json.loads(DIGESTS.read_text())
    names = options.case or ALL_CASES
    tasks = [
        Task(name, dtype, 0 if options.no_layers else engines(ALL_CASES[name], dtype, options.large_layers_once), recorded, job.started)
        for name in names
        for dtype in ALL_CASES[name].dtypes
    ]
    for rows, digests in run_all(tasks, min(options.processes, len(tasks))):
        job.rows += rows
        job.digests |= digests
    if options.record_digests:
        DIGESTS.write_text(json.dumps(dict(sorted(job.digests.items())), indent=1) + "\n")
    add_refusals(job)
    write(job.rows, options.output)
    print(table(job.rows))
    print(f"report: {options.output / 'report.json'} and report.html, {time.time() - job.started:.0f} s")
    return 1 if any(row.status == "different" for row in job.rows) else 0


def add_refusals(job: Job) -> None:
    """One row for each operator that a usable engine does not have, so that the table shows every operator on every engine."""
    for runner in job.runners:
        offered = runner.backend.capabilities(runner.engine).operators
        for op in CONTRACTS["ordered-v1"].operators:
            if op not in offered:
                reason = f"operator {op} (supported: {', '.join(offered)})"
                job.add(op=op, backend=runner.name, device=runner.device, status="refused", reason=reason)


if __name__ == "__main__":
    sys.exit(main())
