"""What the GPU benchmarks share: timed calls, interleaved rounds, peak memory, byte comparison, a time limit, and the result file.

A result file holds ``environment`` (what ran, where, how), ``results`` (rows with ``case``, ``contender``, ``direction``, ``median_ms`` and
more), ``ratios`` between rows, ``refused`` (what was asked for and does not run here, with the reason), ``failed`` (errors and differing
bytes) and ``not_run`` (cases that the time limit left out).
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from attn_spec import get_op
from torch import Tensor

Call = Callable[[], Any]
Row = dict[str, Any]

GPU_BACKENDS = ("attn_cuda", "attn_triton")
FLUSH_BYTES = 2 << 30
"""Zeroed before each timed call: empties the L2 cache, and keeps the GPU busy (0.5 ms on an H200) while the host enqueues the call."""
_PACKAGES = ("attn-spec", "triton", "quack-kernels", "liger-kernel", "numpy")


def flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)


def timed(call: Call, flush: Tensor) -> float:
    """Milliseconds of one call on the GPU, with a cold L2 cache and without the host's time to enqueue it."""
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end)


def interleaved(calls: Mapping[str, Call], rounds: int, flush: Tensor, warm_ups: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; every round runs all calls once."""
    for _ in range(warm_ups):
        for call in calls.values():
            timed(call, flush)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, flush))
    return times


def durations(samples: list[float]) -> Row:
    return {"median_ms": statistics.median(samples), "min_ms": min(samples), "rounds": len(samples)}


@dataclass(frozen=True)
class Memory:
    """Bytes beyond what was allocated before a call: at the peak without the results, of the results, and kept besides the results."""

    peak_bytes: int
    result_bytes: int
    kept_bytes: int


def memory(call: Call) -> Memory:
    """Memory of one call that returns a tensor or tensors; what it keeps besides them is what a later backward needs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    tensors = [results] if isinstance(results, Tensor) else list(results)
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    size = sum(map(rounded_up, storages.values()))
    return Memory(peak - size, size, after - size)


def rounded_up(size: int, block: int = 512) -> int:
    """Bytes that torch's allocator counts for ``size``."""
    return (size + block - 1) // block * block


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality as integers, a slab at a time to bound the memory for the comparison."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(torch.equal(x, y) for x, y in zip(a.contiguous().view(kind).split(4096), b.contiguous().view(kind).split(4096), strict=True))


class Different(AssertionError):
    """Results that must have the same bytes do not; the case is not timed."""


def demand_same_bytes(outputs: Mapping[str, Iterable[Tensor]], what: str) -> None:
    """Raise ``Different`` when two contenders' tensors differ in a bit."""
    (first, wanted), *others = ((name, list(tensors)) for name, tensors in outputs.items())
    for name, found in others:
        if len(found) != len(wanted) or not all(map(same_bytes, found, wanted)):
            raise Different(f"{name} and {first} differ on {what}; nothing was timed")


def ratio(results: Iterable[Row], case: str, direction: str, contender: str, beside: str, **more: Any) -> float | None:
    """How many times faster ``contender`` is than ``beside`` on one case, or None where one of them has no row."""
    chosen = {"case": case, "direction": direction, **more}
    found = {row["contender"]: row["median_ms"] for row in results if all(row.get(name) == value for name, value in chosen.items())}
    return found[beside] / found[contender] if contender in found and beside in found else None


@dataclass
class Report:
    """A result file in the making; ``save`` after every case keeps what a run that is cut short has."""

    path: Path
    method: str
    seconds: float | None = None
    results: list[Row] = field(default_factory=list)
    ratios: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def has_time(self, case: str) -> bool:
        """Whether ``case`` may start; one that may not is recorded."""
        if self.seconds is not None and self.elapsed() > self.seconds:
            self.not_run.append(case)
            return False
        return True

    def refuse(self, what: str, reason: str) -> None:
        self.refused[what] = reason
        self.say(f"refused: {what}: {reason}")

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Keep an error as the failure of ``what``, so that the rest still runs; ``finish`` reports it."""
        try:
            yield
        except Exception as error:  # whatever it is, it must not cost the other cases
            self.failed[what] = f"{type(error).__name__}: {error}"
            self.say(f"FAILED: {what}: {self.failed[what]}")

    def finish(self, add: Path | None = None) -> None:
        """Save, with what the file ``add`` has of other cases, and exit with 1 when something failed."""
        if add is not None:
            self.keep_others(add)
        self.save()
        if self.failed:
            raise SystemExit(f"failed: {', '.join(self.failed)}")

    def elapsed(self) -> float:
        return round(time.monotonic() - self.started, 1)

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():5.1f} s] {text}", flush=True)

    def add(self, row: Row, note: str) -> None:
        self.results.append(row)
        self.say(f"{row['case']:24} {row['contender']:22} {row['direction']:9} {row['median_ms']:9.4f} ms {note}")

    def compare(self, contender: str, beside: str, **more: Any) -> None:
        """A ratio for every case and direction in which both have a row; it stands in the file once, however often this is called."""
        for case, direction in dict.fromkeys((row["case"], row["direction"]) for row in self.results):
            found = ratio(self.results, case, direction, contender, beside, **more)
            if found is not None:
                key = {"case": case, "direction": direction, "contender": contender, "beside": beside, **more}
                self.ratios = [row for row in self.ratios if {name: row[name] for name in row if name != "times_faster"} != key]
                self.ratios.append({**key, "times_faster": found})

    def keep_others(self, path: Path) -> None:
        """Take what the file at ``path`` has of cases that this run has no row of; its environment becomes the fact "earlier"."""
        before = json.loads(path.read_text())
        new = {row["case"] for row in self.results}
        self.results = [row for row in before["results"] if row["case"] not in new] + self.results
        self.ratios = [row for row in before["ratios"] if row["case"] not in new] + self.ratios
        self.refused = {what: why for what, why in before["refused"].items() if not any(case in what for case in new)} | self.refused
        self.facts["earlier"] = before["environment"]

    def save(self) -> None:
        document = {
            "environment": {**environment(), "method": self.method, "wall_seconds": self.elapsed(), **self.facts},
            "results": self.results,
            "ratios": self.ratios,
            "refused": self.refused,
            "failed": self.failed,
            "not_run": self.not_run,
        }
        write(self.path, document)


def write(path: Path, document: Mapping[str, Any]) -> None:
    """JSON that is whole at any time: written beside its place, then moved there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def environment() -> dict[str, Any]:
    """Date, command, versions, device with driver, and the builds of the attn backends."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        facts["device"] = torch.cuda.get_device_name(device)
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["driver"] = _driver()
        facts["fingerprints"] = {name: _fingerprint(name) for name in GPU_BACKENDS}
    return facts


def usable(operator: str, contract: str, report: Report, names: Iterable[str] = GPU_BACKENDS) -> list[str]:
    """The backends among ``names`` that run ``operator`` under ``contract`` here; the others are refused with their reasons."""
    found = []
    for name in names:
        try:
            get_op(operator, device="cuda", backend=name, contract=contract)
        except (LookupError, RuntimeError) as error:  # not installed, not usable here, or without the operator or the contract
            report.refuse(f"{name} {operator} {contract}", str(error))
        else:
            found.append(name)
    return found


def options(document: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the result file")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, help="start no further case after this time")
    parser.add_argument("--add", type=Path, help="an earlier result file, whose rows of other cases are kept")
    return parser


def cuda_device(program: str) -> torch.device:
    """The current CUDA device; ends the program without one."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{program}: no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def _fingerprint(name: str) -> str:
    try:
        return str(importlib.import_module(f"{name}.backend").BACKEND.fingerprint("cuda"))
    except ImportError as error:
        return f"not importable: {error}"
