"""Ordered attention and products on one GPU, forward and backward, in one process, interleaved, medians, with peak memory.

The ceiling is torch's float32 matrix product with TF32 off. A useful rate counts 4*D operations for each visible (head, query, key) pair
forward and 10*D backward, whatever a kernel recomputes. Before anything is timed, the bytes of the attn backends are compared with each
other, and with the host kernels on the last rows of a head; a case in which they differ is not timed, and the run ends with exit code 1.
Beside them, of other arithmetic: torch's scaled_dot_product_attention by backend, and attention that keeps its scores in memory with one
thread an output (baseline.cu).

    python benchmarks/attention_gpu.py --output attention.json [--rounds 10] [--cases products,d128,d64-causal] [--contenders attn_cuda]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import baseline
import measuring
import torch
from attention_shapes import SHAPES, Inputs, Shape, inputs
from attn_spec import UnsupportedProblem, get_op
from measuring import Call, Different, Memory, Report, Row, demand_same_bytes, durations, flush_buffer, interleaved, memory, usable
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PEER_CASES = ("d128", "d128-fp32", "d128-causal")
"""Cases that torch's attention runs too, for orientation."""
MATERIALISED_CASE = "d128"
SLOW_ROUNDS = 3
NEAR = 2.0**-6
"""Largest difference of the materialised output from the ordered one, over the largest output."""


@dataclass(frozen=True)
class Prepared:
    """One contender on one problem: calls and memory by direction, and the results by name."""

    calls: dict[str, Call]
    memory: dict[str, Memory]
    results: dict[str, Tensor]


def prepared(data: Inputs, operator: Callable[..., Any]) -> Prepared:
    """Forward without autograd, and backward over a kept graph."""
    leaves = [tensor.detach().requires_grad_() for tensor in data.arguments]
    outputs = data.call(operator, *leaves)

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return data.call(operator, *data.arguments)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, data.cotangents(), retain_graph=True)

    results = data.joined(outputs, gradients())
    used = {"forward": memory(lambda: data.call(operator, *leaves)), "backward": memory(gradients)}
    return Prepared({"forward": run, "backward": gradients}, used, results)


def materialised(data: Inputs) -> Prepared:
    """Scores and probabilities in memory, one thread an output."""
    forward = partial(baseline.forward, data.q, data.k, data.v)
    out, probs = forward()
    backward = partial(baseline.backward, data.dout, data.q, data.k, data.v, probs)
    calls: dict[str, Call] = {"forward": forward, "backward": backward}
    used = {"forward": memory(lambda: forward()[0]), "backward": memory(backward)}
    kept = Memory(used["forward"].peak_bytes, used["forward"].result_bytes, probs.untyped_storage().nbytes())
    return Prepared(calls, {**used, "forward": kept}, {"out": out})


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, kind: SDPBackend, causal: bool, **others: Any) -> Tensor:
    if any(value is not None for value in others.values()):
        raise ValueError(f"torch's attention has no {', '.join(others)}")
    with sdpa_kernel(kind):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def ours(name: str, data: Inputs, backends: list[str], report: Report) -> dict[str, Prepared]:
    """The attn backends that run the problem, after the comparison of their bytes."""
    operator, found = data.shape.operator, {}
    for backend in usable(operator, "ordered-v1", report, backends):
        with report.guarded(f"{backend} {name}"):
            try:
                found[backend] = prepared(data, get_op(operator, device="cuda", backend=backend))
            except UnsupportedProblem as error:
                report.refuse(f"{backend} {name}", "; ".join(error.reasons))
    for quantity in ("out", "dq", "dk", "dv") if found else ():
        demand_same_bytes({backend: [ready.results[quantity]] for backend, ready in found.items()}, f"{name} {quantity}")
    for backend, ready in list(found.items())[:1]:
        sample = data.sample()
        for quantity, wanted in sample.host():
            part = sample.part_of(ready.results[quantity]).cpu()
            demand_same_bytes({"the host kernels": [wanted], backend: [part]}, f"{name} {quantity}")
    return found


def others(name: str, data: Inputs, wanted: Tensor | None, report: Report) -> dict[str, Prepared]:
    """Contenders of other arithmetic."""
    found: dict[str, Prepared] = {}
    if name in PEER_CASES:
        for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            label = f"torch {kind.name.split('_')[0].lower()}"
            try:
                found[label] = prepared(data, partial(torch_attention, kind=kind))
            except RuntimeError as error:  # what a backend says of a problem that it does not run
                report.refuse(f"{label} {name}", str(error).splitlines()[0])
    if name == MATERIALISED_CASE:
        try:
            ready = materialised(data)
        except RuntimeError as error:
            report.refuse(f"materialised {name}", str(error).splitlines()[0])
        else:
            if wanted is not None and not float((ready.results["out"] - wanted).abs().max() / wanted.abs().max()) <= NEAR:
                raise Different(f"the materialised baseline is wrong on {name}; nothing was timed")
            found["materialised"] = ready
    return found


def run_case(name: str, shape: Shape, backends: list[str], report: Report, ceiling: float, rounds: int, flush: Tensor) -> None:
    data = inputs(shape, flush.device)
    ready = ours(name, data, backends, report)
    wanted = next((one.results["out"] for one in ready.values()), None)
    ready |= others(name, data, wanted, report)
    for direction in ("forward", "backward"):
        quick = {contender: one.calls[direction] for contender, one in ready.items() if contender != "materialised"}
        times = interleaved(quick, rounds, flush)
        if "materialised" in ready:
            times |= interleaved({"materialised": ready["materialised"].calls[direction]}, SLOW_ROUNDS, flush, 1)
        for contender, samples in times.items():
            used = ready[contender].memory[direction]
            row: Row = {"case": name, "shape": shape.facts(), "contender": contender, "direction": direction, **durations(samples)}
            row |= rates(shape.flop(direction), row["median_ms"], ceiling)
            row |= {"peak_bytes": used.peak_bytes, "kept_bytes": used.kept_bytes}
            memory_note = f"{used.peak_bytes / 2**20:8.1f} MiB beyond inputs and results"
            report.add(row, f"{row['useful_tflops']:6.2f} TFLOP/s {row['of_fp32_gemm']:5.2f} of fp32 GEMM {memory_note}")
    report.compare("attn_cuda", "materialised")


def rates(flop: int, milliseconds: float, ceiling: float) -> Row:
    rate = flop / milliseconds / 1e9
    return {"useful_tflops": rate, "of_fp32_gemm": rate / ceiling}


def fp32_gemm(flush: Tensor, rounds: int) -> float:
    """TFLOP/s of torch's float32 product of two 8192 x 8192 matrices, TF32 off."""
    square = torch.randn(8192, 8192, device=flush.device)
    return 2 * 8192**3 / statistics.median(interleaved({"product": lambda: square @ square}, rounds, flush)["product"]) / 1e9


def torch_qk(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def product_calls(operator: Callable[..., Tensor], left: Tensor, right: Tensor) -> Prepared:
    a, b = (tensor.detach().requires_grad_() for tensor in (left, right))
    out = operator(a, b)
    cotangent = torch.randn_like(out)

    def forward() -> Tensor:
        with torch.no_grad():
            return operator(left, right)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (a, b), cotangent, retain_graph=True)

    used = {"forward": memory(forward), "backward": memory(backward)}
    return Prepared({"forward": forward, "backward": backward}, used, {"out": out.detach()})


def run_products(backends: list[str], report: Report, ceiling: float, rounds: int, flush: Tensor) -> None:
    """The joint products in float32 beside torch.matmul at a Qwen-Image layer's sizes: [1, 24, 4608, 128] and [1, 24, 4608, 4608]."""
    q, k = (torch.randn(1, 24, 4608, 128, device=flush.device) for _ in range(2))
    probs = torch.softmax(torch.randn(1, 24, 4608, 4608, device=flush.device), -1)
    flop = 2 * 24 * 4608**2 * 128
    for operator, plain, left, right in (("joint_attn_qk_gemm", torch_qk, q, k), ("joint_attn_av_gemm", torch.matmul, probs, k)):
        names = usable(operator, "ordered-v1", report, backends)
        ready: dict[str, Prepared] = {}
        for name in names:
            with report.guarded(f"{name} {operator}"):
                ready[name] = product_calls(get_op(operator, device="cuda", backend=name), left, right)
        if ready:
            demand_same_bytes({name: [one.results["out"]] for name, one in ready.items()}, operator)
        ready["torch.matmul"] = product_calls(plain, left, right)
        for direction, products in (("forward", 1), ("backward", 2)):
            for contender, samples in interleaved({name: one.calls[direction] for name, one in ready.items()}, rounds, flush).items():
                row: Row = {"case": operator, "contender": contender, "direction": direction, **durations(samples)}
                row |= rates(products * flop, row["median_ms"], ceiling)
                row["peak_bytes"] = ready[contender].memory[direction].peak_bytes
                report.add(row, f"{row['useful_tflops']:6.2f} TFLOP/s {row['of_fp32_gemm']:5.2f} of fp32 GEMM")


def main() -> None:
    parser = measuring.options(__doc__, rounds=10)
    parser.add_argument("--cases", default=",".join(("products", *SHAPES)), help="names, comma separated")
    parser.add_argument("--contenders", default=",".join(measuring.GPU_BACKENDS), help="attn backends, comma separated")
    options = parser.parse_args()
    device = measuring.cuda_device("attention_gpu")
    method = "interleaved rounds, L2 flushed before each call, CUDA events, medians; bytes compared before timing"
    report = Report(options.output, method, options.seconds)
    backends = options.contenders.split(",")
    flush = flush_buffer(device)
    ceiling = fp32_gemm(flush, options.rounds)
    report.facts["fp32_gemm_tflops"] = ceiling
    report.say(f"fp32 GEMM: {ceiling:.1f} TFLOP/s")
    for name in options.cases.split(","):
        if not report.has_time(name):
            continue
        with report.guarded(name):
            if name == "products":
                run_products(backends, report, ceiling, options.rounds, flush)
            else:
                run_case(name, SHAPES[name], backends, report, ceiling, options.rounds, flush)
        report.compare("attn_triton", "attn_cuda")
        report.save()
        torch.cuda.empty_cache()
    report.finish(options.add)


if __name__ == "__main__":
    main()
