"""Decode latency beside its bound, and the host's time for an eager call, on one GPU.

The chain of an output over T keys is T dependent FMAs in a stated order: no kernel is faster than T times the latency of one FMA, which is
measured here by one warp (baseline.cu). Decode rows carry the bound and how many times it they take; with a working profiler, also the
time of each kernel. Bytes are compared with the host kernels before anything is timed. An eager call's time is what the host spends until
the call returns, medians over batches of calls between synchronisations.

    python benchmarks/latency_gpu.py --output latency.json [--rounds 20] [--cases decode-1x8192,overhead]
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import baseline
import measuring
import torch
from attention_shapes import Shape, inputs
from attn_spec import UnsupportedProblem, get_op
from measuring import Call, Report, Row, demand_same_bytes, durations, flush_buffer, interleaved, usable
from torch.profiler import ProfilerActivity, profile

QUERIES, KEYS = (1, 4, 16), (8192, 16384, 32768)
DECODE = {
    f"decode-{queries}x{keys}": Shape(heads=32, kv_heads=8, queries=queries, keys=keys, causal=True) for keys in KEYS for queries in QUERIES
}
BATCH, BATCHES = 50, 20
"""Calls between synchronisations, few enough that the queue of launches does not fill, and how many such batches."""


def kernel_microseconds(call: Call) -> dict[str, float]:
    """Time of each kernel of one call by its short name, or {} where the profiler sees none."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            name = short_name(event.name)
            found[name] = found.get(name, 0.0) + event.device_time
    return found


def short_name(kernel: str) -> str:
    """``attn_cuda::(anonymous namespace)::tile_kernel<1, true>(...)`` to ``tile_kernel<1, true>``."""
    found = re.search(r"(\w+)(<[^()]*>)?\(", kernel.replace("(anonymous namespace)", ""))
    return found.group(1) + (found.group(2) or "") if found else kernel


def run_decode(name: str, shape: Shape, latency: baseline.Latency | None, report: Report, rounds: int, flush: torch.Tensor) -> None:
    data = inputs(shape, flush.device)
    sample = data.sample()
    wanted = dict(sample.host())["out"]
    calls: dict[str, Call] = {}
    for backend in usable("attention", "ordered-v1", report):
        operator = get_op("attention", device="cuda", backend=backend)
        with report.guarded(f"{backend} {name}"):
            try:
                with torch.no_grad():
                    (out,) = data.call(operator, *data.arguments)
            except UnsupportedProblem as error:
                report.refuse(f"{backend} {name}", "; ".join(error.reasons))
                continue
            demand_same_bytes({"the host kernels": [wanted], backend: [sample.part_of(out).cpu()]}, name)
            calls[backend] = without_autograd(data.call, operator, *data.arguments)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if shape.queries == 1:  # the only size at which torch's top-left causal mask would not differ
        calls["torch sdpa"] = partial(sdpa, data.q, data.k, data.v, enable_gqa=True)
    for contender, samples in interleaved(calls, rounds, flush, warm_ups=4).items():
        row: Row = {"case": name, "shape": shape.facts(), "contender": contender, "direction": "forward", **durations(samples)}
        row["kernels_us"] = kernel_microseconds(calls[contender])
        note = ""
        if latency is not None:
            row["bound_ms"] = shape.keys * latency.nanoseconds / 1e6
            row["of_bound"] = row["median_ms"] / row["bound_ms"]
            note = f"{row['of_bound']:5.2f} x the chain of {row['bound_ms']:.4f} ms"
        report.add(row, note)


def without_autograd(call: Callable[..., Any], *arguments: Any, **options: Any) -> Call:
    def run() -> Any:
        with torch.no_grad():
            return call(*arguments, **options)

    return run


def eager_microseconds(call: Call, synchronize: Callable[[], None]) -> list[float]:
    """Host microseconds a call until it returns, one figure a batch."""
    found = []
    for _ in range(BATCHES + 1):
        synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        found.append((time.perf_counter() - begin) / BATCH * 1e6)
    synchronize()
    return found[1:]


def small_calls(device: torch.device, report: Report) -> dict[tuple[str, str], Call]:
    """(operator, contender) on small inputs, for which the host decides: no gradients, and with a graph for them."""
    q, k, v = (torch.randn(1, 8, 16, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    scores = torch.randn(1, 8, 16, 300, device=device)
    calls: dict[tuple[str, str], Call] = {}
    arguments: dict[str, tuple[torch.Tensor, ...]] = {
        "joint_attn_softmax": (scores,),
        "joint_attn_qk_gemm": (q, k),
        "attention": (q, k, v),
    }
    for operator, tensors in arguments.items():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        for backend in usable(operator, "ordered-v1", report):
            op = get_op(operator, device="cuda", backend=backend).forward
            calls[operator, backend] = partial(op, *tensors)
            calls[f"{operator}, recorded", backend] = partial(op, *leaves)
    calls["joint_attn_softmax", "torch"] = partial(torch.softmax, scores, -1)
    calls["joint_attn_qk_gemm", "torch"] = partial(torch.matmul, q, k.mT)
    calls["attention", "torch"] = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    return calls


def run_overhead(device: torch.device, report: Report) -> None:
    for (operator, contender), call in small_calls(device, report).items():
        samples = eager_microseconds(call, torch.cuda.synchronize)
        row: Row = {
            "case": f"overhead {operator}",
            "contender": contender,
            "direction": "eager",
            **durations([one / 1e3 for one in samples]),
        }
        row["host_us"] = statistics.median(samples)
        report.add(row, f"{row['host_us']:6.1f} us of the host a call")


def main() -> None:
    parser = measuring.options(__doc__, rounds=20)
    parser.add_argument("--cases", default=",".join(("overhead", *DECODE)), help="names, comma separated")
    options = parser.parse_args()
    device = measuring.cuda_device("latency_gpu")
    method = (
        "decode: interleaved rounds, L2 flushed before each call, CUDA events, medians; bytes compared before timing; calls: host clock"
    )
    report = Report(options.output, method, options.seconds)
    flush = flush_buffer(device)
    latency = None
    try:
        latency = baseline.chain_latency(device)
    except RuntimeError as error:
        report.refuse("latency of a chain", str(error).splitlines()[0])
    else:
        report.facts |= {"fma_nanoseconds": latency.nanoseconds, "fma_clocks": latency.clocks, "sm_megahertz": latency.megahertz}
        report.say(f"a dependent FMA: {latency.clocks:.2f} clocks, {latency.nanoseconds:.3f} ns, {latency.megahertz:.0f} MHz")
    # calls before decode steps, whose profiler may slow later launches
    for name in sorted(options.cases.split(","), key=lambda name: name != "overhead"):
        if not report.has_time(name):
            continue
        with report.guarded(name):
            if name == "overhead":
                run_overhead(device, report)
            else:
                run_decode(name, DECODE[name], latency, report, options.rounds, flush)
        report.compare("attn_triton", "attn_cuda")
        report.save()
    report.finish(options.add)


if __name__ == "__main__":
    main()
