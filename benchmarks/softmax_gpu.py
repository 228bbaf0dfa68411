"""Joint-softmax bandwidth on one GPU: every attn backend and contract beside torch.softmax, QuACK, Liger and a plain copy.

One process, interleaved rounds, medians, a cold L2 cache. Before anything is timed, the bytes of the attn backends are compared with each
other on all rows and with the host kernels on the first and last rows; one that differs is not timed, and the run ends with exit code 1. A
peer whose result is not near torch's is refused. Bandwidth counts what must move: forward one read and one write, backward two reads and
one write.

    python benchmarks/softmax_gpu.py --output softmax.json [--rounds 20] [--cases 110592x4608,24x4608] [--dtypes float32,bfloat16]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import measuring
import torch
from attn_spec import get_op
from attn_spec._contract import CONTRACTS
from measuring import Call, Report, demand_same_bytes, durations, flush_buffer, interleaved, usable
from torch import Tensor

OPERATOR = "joint_attn_softmax"
CASES = "110592x4608,110592x6544,110592x7401,24x4608"
FILL = 0.85
"""Share of the free memory that a case may take; rows are cut to fit."""
CHECKED = 32
"""Rows at each end that the host kernels compute too."""
NEAR = 2.0**-7
"""Largest difference of a peer's probabilities and gradients from torch's; scores have a deviation of 3, cotangents of 1."""


@dataclass(frozen=True)
class Contender:
    """A differentiable softmax over the last axis of [rows, keys]. Those of one contract have the same bytes."""

    name: str
    softmax: Callable[[Tensor], Tensor]
    contract: str | None = None


def ours(report: Report) -> list[Contender]:
    """Every attn backend under every contract that covers the operator."""
    found = []
    for contract, stated in CONTRACTS.items():
        if OPERATOR not in stated.operators:
            continue
        for name in usable(OPERATOR, contract, report):
            op = get_op(OPERATOR, device="cuda", backend=name, contract=contract)
            found.append(Contender(f"{name} {contract}", partial(op, contract=contract), contract))
    return found


def peers(report: Report) -> list[Contender]:
    """torch, and QuACK and Liger where they are installed."""
    found = [Contender("torch.softmax", lambda x: torch.softmax(x, -1))]
    try:
        from quack.softmax import softmax
    except ImportError as error:
        report.refuse("quack", f"not importable: {error}")
    else:
        found.append(Contender("quack", softmax))
    try:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction
    except ImportError as error:
        report.refuse("liger", f"not importable: {error}")
    else:
        found.append(Contender("liger", LigerSoftmaxFunction.apply))
    return found


def fitted(rows: int, keys: int, dtype: torch.dtype, device: torch.device, contenders: int) -> int:
    """Rows of the case that fit: inputs, results to compare with and in flight (11), and what each contender keeps for its backward."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(rows, int(free * FILL) // ((11 + contenders) * keys * dtype.itemsize)))


@dataclass(frozen=True)
class Prepared:
    """One contender on one case: both directions as calls that only launch kernels, and one result of each."""

    calls: dict[str, Call]
    results: dict[str, Tensor]


def prepared(contender: Contender, scores: Tensor, dprobs: Tensor) -> Prepared:
    leaf = scores.detach().requires_grad_()
    probs = contender.softmax(leaf)

    def forward() -> Tensor:
        with torch.no_grad():
            return contender.softmax(scores)

    def backward() -> Tensor:
        return torch.autograd.grad(probs, leaf, dprobs, retain_graph=True)[0]

    return Prepared({"forward": forward, "backward": backward}, {"forward": probs.detach(), "backward": backward()})


def copies(scores: Tensor, dprobs: Tensor) -> dict[str, Call]:
    """Plain kernels that move the bytes of each direction."""
    out = torch.empty_like(scores)
    return {"forward": lambda: out.copy_(scores), "backward": lambda: torch.add(scores, dprobs, out=out)}


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference over the first rows; NaN when there is one."""
    return float((found[:1024].float() - wanted[:1024].float()).abs().max())


def ends(tensor: Tensor) -> Tensor:
    """The first and the last rows, on the host."""
    return torch.cat([tensor[:CHECKED], tensor[-CHECKED:]]).cpu()


def check_against_host(contract: str, scores: Tensor, dprobs: Tensor, results: dict[str, Tensor], what: str) -> None:
    import attn_reference

    leaf = ends(scores).requires_grad_()
    probs = attn_reference.joint_attn_softmax(leaf, contract=contract)
    (dscores,) = torch.autograd.grad(probs, leaf, ends(dprobs))
    found = {"the GPU": [ends(results["forward"]), ends(results["backward"])], "the host kernels": [probs.detach(), dscores]}
    demand_same_bytes(found, what)


def checked(contenders: list[Contender], scores: Tensor, dprobs: Tensor, what: str, report: Report) -> dict[str, dict[str, Call]]:
    """Calls of the contenders that run the case and are right on it. Results are freed one by one, so few are held at once."""
    found: dict[str, dict[str, Call]] = {}
    first: dict[str, dict[str, Tensor]] = {}
    wanted = prepared(Contender("torch", lambda x: torch.softmax(x, -1)), scores, dprobs).results
    for contender in contenders:
        label = f"{contender.name} {what}"
        with report.guarded(label):
            if contender.contract is None:
                reason, calls = peer(contender, scores, dprobs, wanted)
                if reason is not None:
                    report.refuse(label, reason)
                    continue
            else:
                ready = prepared(contender, scores, dprobs)
                if contender.contract in first:
                    for direction, tensor in ready.results.items():
                        demand_same_bytes(
                            {"the first": [first[contender.contract][direction]], contender.name: [tensor]}, f"{what} {direction}"
                        )
                else:
                    check_against_host(contender.contract, scores, dprobs, ready.results, what)
                    first[contender.contract] = ready.results
                calls = ready.calls
            found[contender.name] = calls
    return found


def peer(contender: Contender, scores: Tensor, dprobs: Tensor, wanted: dict[str, Tensor]) -> tuple[str | None, dict[str, Call]]:
    """Why a peer is refused on the case, or None, and its calls."""
    try:
        ready = prepared(contender, scores, dprobs)
    except Exception as error:  # a peer may raise anything on a shape that it does not run
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", {}
    worst = max(distance(ready.results[direction], wanted[direction]) for direction in wanted)
    return (None if worst <= NEAR else f"its result is {worst:.3g} away from torch's"), ready.calls


def run_case(rows: int, keys: int, dtype: torch.dtype, contenders: list[Contender], report: Report, rounds: int, flush: Tensor) -> None:
    case, kind = f"{rows}x{keys}", str(dtype).removeprefix("torch.")
    device = flush.device
    taken = fitted(rows, keys, dtype, device, len(contenders))
    generator = torch.Generator(device).manual_seed(keys)
    scores = (torch.randn(taken, keys, generator=generator, device=device) * 3).to(dtype)
    dprobs = torch.randn(taken, keys, generator=generator, device=device).to(dtype)
    ready = checked(contenders, scores, dprobs, f"{case} {kind}", report)
    ready["copy"] = copies(scores, dprobs)
    for direction, tensors in (("forward", 2), ("backward", 3)):
        times = interleaved({name: calls[direction] for name, calls in ready.items()}, rounds, flush)
        copy = statistics.median(times["copy"])
        for name, samples in times.items():
            row: dict[str, Any] = {"case": case, "rows": taken, "keys": keys, "dtype": kind, "direction": direction, "contender": name}
            row |= durations(samples)
            row["terabytes_per_second"] = tensors * taken * keys * dtype.itemsize / row["median_ms"] / 1e9
            row["of_copy"] = copy / row["median_ms"]
            report.add(row, f"{row['terabytes_per_second']:6.2f} TB/s {row['of_copy']:5.2f} of copy, {kind}")
    for name in sorted(ready.keys() - {"copy", "torch.softmax"}):
        report.compare(name, "torch.softmax", dtype=kind)
    for contract in {contender.contract for contender in contenders if contender.contract}:
        report.compare(f"attn_triton {contract}", f"attn_cuda {contract}", dtype=kind)


def main() -> None:
    parser = measuring.options(__doc__, rounds=20)
    parser.add_argument("--cases", default=CASES, help="ROWSxKEYS, comma separated")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    device = measuring.cuda_device("softmax_gpu")
    method = "interleaved rounds, L2 flushed before each call, CUDA events, medians; bytes compared before timing"
    report = Report(options.output, method, options.seconds)
    contenders = [*ours(report), *peers(report)]
    flush = flush_buffer(device)
    for dtype in options.dtypes.split(","):
        for case in options.cases.split(","):
            if report.has_time(f"{case} {dtype}"):
                rows, keys = (int(part) for part in case.split("x"))
                with report.guarded(f"{case} {dtype}"):
                    run_case(rows, keys, getattr(torch, dtype), contenders, report, options.rounds, flush)
                report.save()
                torch.cuda.empty_cache()
    report.finish(options.add)


if __name__ == "__main__":
    main()
