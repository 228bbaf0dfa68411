"""What segments cost: the forward pass of sm90-v1 with the contract's segments of 1024 keys, and built with one segment for all keys.

One segment gives other bits for more than 1024 keys, and no key split that keeps them: it stands for a kernel without this invariance.
The two builds cannot share a process, so processes of both alternate; each prints the median of its calls.

    python benchmarks/segments_gpu.py --prepare build/one_segment      # changed copies of attn_triton and attn_cuda; needs nvcc
    python benchmarks/segments_gpu.py --folder build/one_segment --output segments.json [--rounds 3]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = {  # batch, heads, keys and queries, head dim, causal
    "d128": (2, 16, 8192, 128, False),
    "d128-causal": (2, 16, 8192, 128, True),
    "d64": (2, 32, 8192, 64, False),
    "d64-causal": (2, 32, 8192, 64, True),
}
BACKENDS = ("attn_cuda", "attn_triton")
BUILDS = ("segments", "one segment")


def package(name: str) -> Path:
    """Folder of an installed package."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed")
    return Path(spec.origin).parent


def change(file: Path, old: str, new: str) -> None:
    """Replace the one place of ``old``. Raises ValueError when it is not there once."""
    text = file.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file} has {old!r} {text.count(old)} times, not once")
    file.write_text(text.replace(old, new))


def prepare(folder: Path) -> None:
    """Copies of both packages whose segment holds 2^20 keys."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package("attn_triton"), folder / "attn_triton", ignore=ignored)
    change(folder / "attn_triton/_sm90_forward_kernel.py", "SEGMENT_KEYS = 1024", "SEGMENT_KEYS = 1 << 20")
    shutil.copytree(package("attn_spec"), folder / "headers/attn_spec", ignore=ignored)
    change(folder / "headers/attn_spec/include/attn/sm90.h", "kSegment = 1024;", "kSegment = 1 << 20;")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    options = ["-C", "cmake.define.ATTN_CUDA=ON", "-C", "cmake.define.ATTN_CUDA_ARCHITECTURES=90a-real"]
    environment = os.environ | {"PYTHONPATH": str(folder / "headers")}
    subprocess.run([sys.executable, *command, *options, str(ROOT / "packages/attn-cuda")], check=True, env=environment)
    for wheel in folder.glob("attn_cuda-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def measure() -> dict[str, float]:
    """Median milliseconds of 15 calls by "case backend", in this process's build."""
    import measuring
    import torch

    flush = measuring.flush_buffer(torch.device("cuda"))
    found: dict[str, float] = {}
    for case, (batch, heads, size, head_dim, causal) in CASES.items():
        generator = torch.Generator(device="cuda").manual_seed(0)
        q, k, v = (torch.randn(batch, heads, size, head_dim, device="cuda", generator=generator).bfloat16() for _ in range(3))
        options = {"causal": causal, "contract": "sm90-v1"}
        calls = {name: partial(importlib.import_module(name).attention, q, k, v, **options) for name in BACKENDS}
        with torch.no_grad():
            measuring.demand_same_bytes({name: [call()] for name, call in calls.items()}, case)
            times = measuring.interleaved(calls, 15, flush)
        found |= {f"{case} {name}": statistics.median(samples) for name, samples in times.items()}
    return found


def run(build: str, folder: Path) -> dict[str, float]:
    """``measure`` in a process of its own, of one build."""
    paths = [str(folder)] if build == "one segment" else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((*paths, os.environ.get("PYTHONPATH", "")))}
    text = subprocess.run([sys.executable, __file__, "--measure"], check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(text.splitlines()[-1])
    return result


def compare(folder: Path, output: Path, rounds: int) -> None:
    import measuring

    method = f"median over {rounds} processes a build, alternating, of medians of 15 calls, cold L2 cache; bytes compared"
    report = measuring.Report(output, method)
    runs = [{build: run(build, folder) for build in BUILDS} for _ in range(rounds)]
    for key in runs[0]["segments"]:
        case, backend = key.split()
        for build in BUILDS:
            samples = [found[build][key] for found in runs]
            row = {"case": case, "contender": f"{backend}, {build}", "direction": "forward", **measuring.durations(samples)}
            report.add(row, "")
    for backend in BACKENDS:
        report.compare(f"{backend}, segments", f"{backend}, one segment")
    report.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
    elif options.prepare is not None:
        prepare(options.prepare)
    elif options.folder is not None and options.output is not None:
        compare(options.folder.resolve(), options.output, options.rounds)
    else:
        parser.error("--prepare FOLDER, or --folder FOLDER and --output FILE")


if __name__ == "__main__":
    main()
