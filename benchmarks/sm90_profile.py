"""Where the cycles of attn_cuda's kernels of contract sm90-v1 go: Nsight Compute on each, and the time of each gradient kernel alone.

ncu holds the GPU at its base clock, so its cycles compare kernels whatever the power limit makes of their clocks. The kernel of cuDNN that
torch's scaled_dot_product_attention runs stands beside the forward ones.

    python benchmarks/sm90_profile.py --output profile.json [--rounds 10]

ncu must be on the PATH and may need the right to read performance counters.
"""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import measuring
import torch
from attn_cuda._sm90_launch import Sm90Kernels
from attn_spec.torch import AttentionInputs
from measuring import Report, Row, durations, flush_buffer, interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel

PRODUCTS = {"forward": 2, "dq": 3, "dk and dv": 4, "backward": 7}
"""Matrix products that the kernels execute; each is 2 D operations for a pair."""
NEEDS = {"dq": frozenset("q"), "dk and dv": frozenset("kv"), "backward": frozenset("qkv")}
METRICS = {
    "cycles": "gpc__cycles_elapsed.max",
    "nanoseconds": "gpu__time_duration.sum",
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponential_pipe": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared_memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "device_memory": "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
PROFILED = "attention_|gradients_|sdpa"
PROFILED_CASES = [*(case for case in ("d128", "d128-causal", "d64", "d64-causal") for _ in range(4)), *["decode-b32-4k"] * 2]
"""Of the kernels in the order of profiled_calls: forward, dk and dv, dq, cuDNN's forward; a decode step is two."""
OWN = re.compile(r"\w+_kernel<[^(]*>")
Inputs = tuple[AttentionInputs, torch.Tensor]


def problem(heads: int, head_dim: int, causal: bool, batch: int = 1) -> Inputs:
    """8192 queries and keys, and a cotangent."""
    generator = torch.Generator(device="cuda").manual_seed(20261130)
    draws = [torch.randn((batch, heads, 8192, head_dim), generator=generator, device="cuda").to(torch.bfloat16) for _ in range(4)]
    return AttentionInputs(q=draws[0], k=draws[1], v=draws[2], causal=causal, scale=head_dim**-0.5), draws[3]


def profiled_calls() -> Iterator[Callable[[], object]]:
    """Forward and backward at D 128 and 64, full and causal, cuDNN beside them; then decode."""
    kernels = Sm90Kernels()
    for heads, head_dim in ((16, 128), (32, 64)):
        for causal in (False, True):
            inputs, dout = problem(heads, head_dim, causal)
            out, lse = kernels.attention_sm90_forward(inputs)
            yield partial(kernels.attention_sm90_backward, inputs, dout, None, out, lse, NEEDS["backward"])
            yield partial(torch.nn.functional.scaled_dot_product_attention, inputs.q, inputs.k, inputs.v, is_causal=causal)
    q, k, v = (torch.randn((32, heads, rows, 128), device="cuda").to(torch.bfloat16) for heads, rows in ((32, 1), (8, 4096), (8, 4096)))
    yield partial(kernels.attention_sm90_forward, AttentionInputs(q=q, k=k, v=v, causal=True, scale=128**-0.5))


def run_profiled() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        for call in profiled_calls():
            call()
    torch.cuda.synchronize()


def profile() -> list[Row]:
    """A row for each kernel: METRICS, pipes in percent, and the warps that wait, by reason, for each one that issues an instruction."""
    command = ["ncu", "--kernel-name", f"regex:{PROFILED}", "--section", "WarpStateStats", "--section", "LaunchStats"]
    command += ["--metrics", ",".join(METRICS.values()), "--csv", "--page", "raw", sys.executable, __file__, "--profiled"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    head, _, *lines = csv.reader(io.StringIO("".join(line for line in text.splitlines(True) if line.startswith('"'))))
    rows = []
    for case, line in zip(PROFILED_CASES, lines, strict=True):
        cells = dict(zip(head, line, strict=True))
        own = OWN.search(cells["Kernel Name"].replace("(int)", "").replace("attn::", ""))
        row: Row = {"case": case, "kernel": own[0] if own else "cuDNN", "grid": cells["Grid Size"]}
        row |= {name: float(cells[metric].replace(",", "")) for name, metric in METRICS.items()}
        stalls = {found[1]: float(cells[name]) for name in head if (found := STALL.fullmatch(name))}
        row["stalls"] = {name: value for name, value in sorted(stalls.items(), key=lambda item: -item[1]) if value >= 0.05}
        rows.append(row)
    return rows


def time_alone(report: Report, rounds: int) -> None:
    """Each gradient kernel alone and both together, two batch items of 8192 queries, by what it executes."""
    kernels, flush = Sm90Kernels(), flush_buffer(measuring.cuda_device("sm90_profile"))
    for name, heads, head_dim, causal in (("d128", 16, 128, False), ("d128-causal", 16, 128, True), ("d64", 32, 64, False)):
        inputs, dout = problem(heads, head_dim, causal, batch=2)
        out, lse = kernels.attention_sm90_forward(inputs)
        calls = {what: partial(kernels.attention_sm90_backward, inputs, dout, None, out, lse, needs) for what, needs in NEEDS.items()}
        for what, samples in interleaved(calls, rounds, flush).items():
            row: Row = {"case": name, "contender": "attn_cuda", "direction": what, **durations(samples)}
            pairs = 2 * heads * 8192 * 8192 * (0.5 if causal else 1)
            row["executed_tflops"] = PRODUCTS[what] * 2 * pairs * head_dim / row["median_ms"] / 1e9
            report.add(row, f"{row['executed_tflops']:.0f} TFLOP/s of its own products")


def main() -> None:
    if "--profiled" in sys.argv:
        run_profiled()
        return
    options = measuring.options(__doc__, rounds=10).parse_args()
    measuring.cuda_device("sm90_profile")
    report = Report(options.output, "ncu at base clock; times: interleaved rounds, L2 flushed before each call, medians", options.seconds)
    with report.guarded("alone"):
        time_alone(report, options.rounds)
    with report.guarded("profile"):
        report.facts["kernels"] = profile()
    report.finish()


if __name__ == "__main__":
    main()
