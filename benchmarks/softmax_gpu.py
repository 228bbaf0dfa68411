"""Joint-softmax bandwidth on one GPU: attn_cuda, attn_triton and torch.softmax beside a plain copy, in one process, interleaved, medians.

Bytes of every attn backend are compared before anything is timed; a difference ends the run with exit code 1. Bandwidth counts what
must move: forward one read and one write, backward two reads and one write. Torch's softmax has other bits, and its backward reads the
probabilities instead of the scores.

    python benchmarks/softmax_gpu.py --output softmax.json [--rounds 30] [--cases 110592x4608,24x4608] [--dtypes float32,bfloat16]
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attn_spec
import torch
from torch import Tensor

CASES = "110592x4608,110592x6544,110592x7401,24x4608"
FILL = 0.85
"""Share of the free memory that a case may take; rows are cut to fit."""


def fitted(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of the case that fit: scores, probs, cotangent, gradient and one more result for the comparison."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(rows, int(free * FILL) // (5 * keys * dtype.itemsize)))


def backends() -> tuple[dict[str, str], dict[str, str]]:
    """Import names that run on CUDA here, and the reasons of those that do not."""
    usable, refused = {}, {}
    for name in ("attn_cuda", "attn_triton"):
        try:
            reason = importlib.import_module(f"{name}.backend").BACKEND.unavailable("cuda")
        except ImportError as error:
            reason = f"not importable: {error}"
        (refused if reason else usable)[name] = reason or ""
    return usable, refused


def calls(name: str, scores: Tensor, dprobs: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of one contender as calls without autograd, so that each launches its kernels only."""
    if name == "copy":
        out = torch.empty_like(scores)
        return {"forward": lambda: out.copy_(scores), "backward": lambda: torch.add(scores, dprobs, out=out)}
    if name == "torch.softmax":
        probs = torch.softmax(scores, -1)
        return {
            "forward": lambda: torch.softmax(scores, -1),
            "backward": lambda: torch.ops.aten._softmax_backward_data(dprobs, probs, -1, scores.dtype),
        }
    ops = getattr(torch.ops, name)
    _, row_max, row_sum = ops.joint_attn_softmax(scores, None, scores.dtype)
    return {
        "forward": lambda: ops.joint_attn_softmax(scores, None, scores.dtype)[0],
        "backward": lambda: ops.joint_attn_softmax_backward(dprobs, scores, None, row_max, row_sum),
    }


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality as integers, a slab at a time to bound the memory for the comparison."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.shape == b.shape and all(torch.equal(x, y) for x, y in zip(a.view(kind).split(4096), b.view(kind).split(4096), strict=True))


def timed(call: Callable[[], Tensor], flush: Tensor) -> float:
    """Milliseconds of one call with a cold L2 cache."""
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end)


def run_case(
    rows: int, keys: int, dtype: torch.dtype, names: list[str], rounds: int, device: torch.device, flush: Tensor
) -> list[dict[str, Any]]:
    """Rows of the report for one shape and dtype: medians of interleaved rounds for every contender and direction."""
    taken = fitted(rows, keys, dtype, device)
    generator = torch.Generator(device).manual_seed(keys)
    scores = (torch.randn(taken, keys, generator=generator, device=device) * 3).to(dtype)
    dprobs = torch.randn(taken, keys, generator=generator, device=device).to(dtype)
    found: list[dict[str, Any]] = []
    for direction, tensors in (("forward", 2), ("backward", 3)):
        chosen = {name: calls(name, scores, dprobs)[direction] for name in names}
        ours = [name for name in names if name.startswith("attn_")]
        if ours:
            wanted = chosen[ours[0]]()
            for name in ours[1:]:
                if not same_bytes(chosen[name](), wanted):
                    raise SystemExit(f"{name} and {ours[0]} differ: {direction} {taken}x{keys} {dtype}; nothing was timed")
            del wanted
        times: dict[str, list[float]] = {name: [] for name in chosen}
        for call in chosen.values():
            for _ in range(3):
                timed(call, flush)
        for _ in range(rounds):
            for name, call in chosen.items():
                times[name].append(timed(call, flush))
        copy = statistics.median(times["copy"])
        for name, samples in times.items():
            median = statistics.median(samples)
            found.append(
                {
                    "case": f"{rows}x{keys}",
                    "rows": taken,
                    "keys": keys,
                    "dtype": str(dtype).removeprefix("torch."),
                    "direction": direction,
                    "contender": name,
                    "median_ms": median,
                    "min_ms": min(samples),
                    "terabytes_per_second": tensors * taken * keys * dtype.itemsize / median / 1e9,
                    "of_copy": copy / median,
                    "byte_equal_to": ours[0] if name in ours else None,
                }
            )
            rate = found[-1]["terabytes_per_second"]
            print(f"{rows}x{keys} ({taken} rows) {dtype} {direction} {name}: {median:.4f} ms, {rate:.2f} TB/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cases", default=CASES, help="ROWSxKEYS, comma separated")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("softmax_gpu: no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    usable, refused = backends()
    names = [*usable, "torch.softmax", "copy"]
    flush = torch.empty(512 * 2**20, dtype=torch.uint8, device=device)
    results: list[dict[str, Any]] = []
    for case in options.cases.split(","):
        rows, keys = (int(part) for part in case.split("x"))
        for dtype in options.dtypes.split(","):
            results += run_case(rows, keys, getattr(torch, dtype), names, options.rounds, device, flush)
            torch.cuda.empty_cache()
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "device": torch.cuda.get_device_name(device),
        "capability": ".".join(str(part) for part in torch.cuda.get_device_capability(device)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "attn_spec": attn_spec.__version__,
        "fingerprints": {name: importlib.import_module(f"{name}.backend").BACKEND.fingerprint("cuda") for name in usable},
        "refused": refused,
        "rounds": options.rounds,
        "method": "interleaved rounds, L2 flushed before each call, CUDA events, median",
    }
    options.output.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
