"""compute-sanitizer over every kernel of attn_cuda: the four tools on every part of every_kernel.py, in parallel, within a time limit.

    python packages/attn-cuda/tests/sanitize.py --output FILE [--tools racecheck] [--parts 16] [--jobs 12] [--seconds 300] [--add FILE]

Each part runs once without a tool, which records the kernels that it launches; together the parts must launch every kernel of the compiled
module but those that only a device with less shared memory chooses. Parts go round the visible GPUs. Where one run has too little time,
``--add`` takes the parts that ended clean in an earlier run of the same build from its result file. Exits 1 on an error, a part that did
not end, or a kernel left out.

racecheck does not follow the order between the reads of what a bulk copy brought and the next copy to that place: racecheck_control.cu is
such a ring by itself. Where the tool reports that one too, which is free of races, its reports of the kernel with such a ring are counted
as false ones.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WORK = Path(__file__).with_name("every_kernel.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OWN_KERNELS = ("--kernel-name", "kns=attn_cuda")
"""initcheck must see the writes of torch's kernels too; the other tools check attn_cuda's alone."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\))")
LESS_SHARED_MEMORY = re.compile(r"::(?:(?:attention_forward|query_sums|key_sums)_kernel<\d+, [24]>|bias_sums_kernel<16>)")
FIRST_PORT = 49152
CONTROL = Path(__file__).with_name("racecheck_control.cu")
AS_THE_KERNEL, RACE_OF_RING = "one lane arrives for its warp", "readers arrive before they read"
CONTROLS = {AS_THE_KERNEL: "0", "every reader arrives": "1", RACE_OF_RING: "2"}
RACE = re.compile(r"Error: Race reported between \w+ access at (?:void )?(.*?)\+0x")
READS_BULK_COPIES = re.compile(r"attn_cuda::hopper::<unnamed>::key_gradients_kernel<")


@dataclass(frozen=True)
class Outcome:
    """Of one tool on one part: errors (None: the part did not end), how many of them are races that READS_BULK_COPIES names, the tool's
    last lines where there were any, and the time it took."""

    tool: str
    part: str
    errors: int | None
    seconds: float
    text: str = ""
    in_rings: int = 0


def demangled(names: Iterable[str]) -> list[str]:
    """C++ names as the profiler prints them."""
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)
    found = []
    for name in names:
        status = ctypes.c_int()
        text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
        found.append(ctypes.string_at(text).decode() if status.value == 0 else name)
        free(text)
    return found


def module_kernels(listing: str) -> list[str]:
    """Kernels that ``cuobjdump -res-usage`` lists, whatever the architecture."""
    return sorted(set(demangled(dict.fromkeys(re.findall(r"Function (\w+):", listing)))))


def left_out(kernels: Iterable[str], launched: Iterable[str]) -> tuple[list[str], list[str]]:
    """Kernels that no part launched: those that should have been, and those of devices with less shared memory."""
    missing = sorted(set(kernels) - set(launched))
    return [name for name in missing if not LESS_SHARED_MEMORY.search(name)], [name for name in missing if LESS_SHARED_MEMORY.search(name)]


def summarised(output: str) -> int | None:
    """Errors that a tool counted, warnings of racecheck included; None without a summary."""
    found = SUMMARY.findall(output)
    return sum(int(count) for count in found[-1] if count) if found else None


def run(command: Sequence[str], deadline: float, **environment: str) -> tuple[int | None, str, float]:
    """Exit code (None: stopped at the deadline), output and seconds of one process and its children."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env={**os.environ, **environment}
    )
    try:
        output, _ = process.communicate(timeout=max(0.0, deadline - begin))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return code, output, round(time.monotonic() - begin, 1)


def plain(part: str, folder: Path, device: str, deadline: float) -> tuple[Outcome, list[str]]:
    """One part without a tool, and the kernels that it launched."""
    names = folder / f"{part.replace('/', '-')}.json"
    code, output, seconds = run([sys.executable, str(WORK), "--part", part, "--kernels", str(names)], deadline, CUDA_VISIBLE_DEVICES=device)
    ended = code == 0 and names.exists()
    return Outcome("none", part, 0 if ended else None, seconds, "" if ended else tail(output)), json.loads(
        names.read_text()
    ) if ended else []


def checked(sanitizer: str, tool: str, part: str, port: int, device: str, deadline: float) -> Outcome:
    """One tool on one part."""
    filters = () if tool == "initcheck" else OWN_KERNELS
    options = ("--launch-timeout", "300", "--port", str(port), "--error-exitcode", "9")
    command = [sanitizer, "--tool", tool, *filters, *options, sys.executable, str(WORK), "--part", part]
    code, output, seconds = run(command, deadline, PYTORCH_NO_CUDA_MEMORY_CACHING="1", CUDA_VISIBLE_DEVICES=device)
    errors = None if code is None else summarised(output)
    ended = code == 0 and errors == 0 and "problems ran" in output
    if code is None:
        return Outcome(tool, part, None, seconds, f"stopped after {seconds} s")
    in_rings = sum(READS_BULK_COPIES.match(kernel) is not None for kernel in RACE.findall(output))
    return Outcome(tool, part, errors if errors or ended else None, seconds, "" if ended else reports(output), in_rings)


def control_reports(sanitizer: str, folder: Path, deadline: float) -> dict[str, int | None]:
    """What racecheck counts on each ring of racecheck_control.cu."""
    import attn_spec
    import torch

    program, sources = folder / "control", Path(__file__).parents[1] / "csrc"
    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    include = ["-I", str(sources), "-I", str(Path(attn_spec.__file__).parent / "include")]
    subprocess.run([tool_path("nvcc"), "-std=c++17", "-O3", f"-arch={target}", *include, str(CONTROL), "-o", str(program)], check=True)
    found = {}
    for name, way in CONTROLS.items():
        code, output, _ = run([sanitizer, "--tool", "racecheck", "--error-exitcode", "9", str(program), way], deadline)
        found[name] = summarised(output) if code in (0, 9) and "no error" in output else None
    return found


def parts_of(tool: str, parts: int) -> list[str]:
    """The parts of one tool: fewer for the quick tools, whose start costs more than their work."""
    count = parts if tool == "racecheck" else max(1, parts // 4)
    return [f"{number + 1}/{count}" for number in range(count)]


def earlier(document: dict[str, Any], fingerprint: str) -> list[Outcome]:
    """What ended clean in an earlier run. Raises ValueError when that was of another build."""
    found = document["environment"]["fingerprint"]
    if found != fingerprint:
        raise ValueError(f"the earlier run was of build {found}, and this is {fingerprint}")
    return [Outcome(**row) for row in document["runs"] if row["tool"] != "none" and row["errors"] == 0]


def reports(output: str, lines: int = 12) -> str:
    """The first lines that a tool printed, or the last ones of the program."""
    found = re.search("^=========(?! COMPUTE-SANITIZER)", output, re.MULTILINE)
    return "\n".join(output[found.start() :].splitlines()[:lines]) if found else tail(output)


def tail(output: str, lines: int = 30) -> str:
    return "\n".join(output.splitlines()[-lines:])


def tool_path(name: str) -> str:
    """Path of a tool of the CUDA toolkit."""
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if found is None:
        raise SystemExit(f"sanitize: {name} is not on PATH")
    return found


def version(sanitizer: str) -> str:
    """What compute-sanitizer says of itself, without its first line of names."""
    output = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    return output.strip().splitlines()[-1]


def report(
    outcomes: list[Outcome], kernels: list[str], launched: set[str], tools: Sequence[str], controls: Mapping[str, int | None]
) -> dict[str, Any]:
    """The result file's text: a total and the parts of each tool, what racecheck says of its controls, and which kernels were covered."""
    totals = {}
    missing, other_devices = left_out(kernels, launched)
    misled = bool(controls.get(AS_THE_KERNEL) and controls.get(RACE_OF_RING))
    for tool in tools:
        rows = [outcome for outcome in outcomes if outcome.tool == tool]
        unended = [outcome.part for outcome in rows if outcome.errors is None]
        totals[tool] = {
            "errors": sum((outcome.errors or 0) - outcome.in_rings * misled for outcome in rows),
            "false_reports": sum(outcome.in_rings * misled for outcome in rows),
            "parts": len(rows),
            "parts_without_result": unended,
            "seconds": round(sum(outcome.seconds for outcome in rows), 1),
        }
    return {
        "tools": totals,
        "controls": dict(controls),
        "kernels": {
            "in_module": len(kernels),
            "launched": len(launched & set(kernels)),
            "not_launched": missing,
            "for_devices_with_less_shared_memory": other_devices,
        },
        "runs": [asdict(outcome) for outcome in outcomes],
    }


def succeeded(document: dict[str, Any]) -> bool:
    """Every tool ended on every part without an error, and no kernel was left out."""
    clean = all(total["errors"] == 0 and total["parts"] and not total["parts_without_result"] for total in document["tools"].values())
    return clean and document["kernels"]["launched"] > 0 and not document["kernels"]["not_launched"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma separated")
    parser.add_argument("--parts", type=int, default=16, help="of racecheck, the slowest tool; the others take a quarter as many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it: what has not ended then is stopped and stands as such")
    parser.add_argument("--add", type=Path, help="result file of an earlier run of the same build and as many parts")
    options = parser.parse_args()
    tools = options.tools.split(",")
    sanitizer, deadline = tool_path("compute-sanitizer"), time.monotonic() + options.seconds

    import torch
    from attn_cuda._extension import extension
    from attn_spec._environment import environment

    module = extension()
    if isinstance(module, str) or not torch.cuda.is_available():
        raise SystemExit(f"sanitize: {module if isinstance(module, str) else 'no CUDA device'}")
    listing = subprocess.run(
        [tool_path("cuobjdump"), "-res-usage", str(module.__file__)], capture_output=True, text=True, check=True
    ).stdout
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        unchecked = list(
            pool.map(
                lambda part, device: plain(part, Path(folder), device, deadline), parts_of("none", options.parts), itertools.cycle(devices)
            )
        )
        taken = [] if options.add is None else earlier(json.loads(options.add.read_text()), module.FINGERPRINT)
        ended = {(outcome.tool, outcome.part) for outcome in taken}
        every = [(tool, part) for tool in sorted(tools, key=lambda tool: tool != "racecheck") for part in parts_of(tool, options.parts)]
        work = [item for item in every if item not in ended]
        places = zip(work, itertools.count(FIRST_PORT, 16), itertools.cycle(devices), strict=False)
        running = [pool.submit(checked, sanitizer, *item, port, device, deadline) for item, port, device in places]
        outcomes = [*(outcome for outcome, _ in unchecked), *(outcome for outcome in taken if (outcome.tool, outcome.part) in every)]
        controls = control_reports(sanitizer, Path(folder), deadline) if "racecheck" in tools else {}
        for future in running:
            outcome = future.result()
            outcomes.append(outcome)
            print(f"{outcome.tool:10} {outcome.part:6} {outcome.errors} errors, {outcome.seconds:6.1f} s {outcome.text}", flush=True)
    document = {
        "environment": {**environment(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "fingerprint": module.FINGERPRINT},
        "sanitizer": version(sanitizer),
        "command": " ".join(["python", *sys.argv]),
        **report(outcomes, module_kernels(listing), {name for _, names in unchecked for name in names}, tools, controls),
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: document[name] for name in ("tools", "controls", "kernels")}, indent=1))
    if not succeeded(document):
        raise SystemExit("sanitize: see the errors, parts and kernels above")


if __name__ == "__main__":
    main()
