"""Where the cycles of attn_cuda's kernels of contract sm90-v1 go: Nsight Compute on each, and the time of each gradient kernel alone.

The kernel of cuDNN that torch's scaled_dot_product_attention runs stands beside the forward ones.

    python benchmarks/sm90_profile.py --output profile.json [--rounds 10]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import measuring
import ncu
import torch
from attn_cuda._sm90_launch import Sm90Kernels
from attn_spec.torch import AttentionInputs
from measuring import Call, Report, Row, durations, flush_buffer, interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel

PRODUCTS = {"forward": 2, "dq": 3, "dk and dv": 4, "backward": 7}
"""Matrix products that the kernels execute; each is 2 D operations for a pair."""
SHAPES = (("d128", 16, 128, False), ("d128-causal", 16, 128, True), ("d64", 32, 64, False), ("d64-causal", 32, 64, True))
"""Name, heads, head dim, causal."""
NEEDS = {"dq": frozenset("q"), "dk and dv": frozenset("kv"), "backward": frozenset("qkv")}
Inputs = tuple[AttentionInputs, torch.Tensor]


def problem(heads: int, head_dim: int, causal: bool, batch: int = 1) -> Inputs:
    """8192 queries and keys, and a cotangent."""
    generator = torch.Generator(device="cuda").manual_seed(20261130)
    draws = [torch.randn((batch, heads, 8192, head_dim), generator=generator, device="cuda").to(torch.bfloat16) for _ in range(4)]
    return AttentionInputs(q=draws[0], k=draws[1], v=draws[2], causal=causal, scale=head_dim**-0.5), draws[3]


def profiled_calls() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Forward, backward and cuDNN's forward at D 128 and 64, full and causal; then decode."""
    for name, heads, head_dim, causal in SHAPES:
        yield name, partial(whole_call, heads, head_dim, causal)
    yield "decode-b32-4k", decode_call


def whole_call(heads: int, head_dim: int, causal: bool) -> Call:
    kernels, (inputs, dout) = Sm90Kernels(), problem(heads, head_dim, causal)

    def call() -> None:
        out, lse = kernels.attention_sm90_forward(inputs)
        kernels.attention_sm90_backward(inputs, dout, None, out, lse, NEEDS["backward"])
        cudnn(inputs)

    return call


def decode_call() -> Call:
    q, k, v = (torch.randn((32, heads, rows, 128), device="cuda").to(torch.bfloat16) for heads, rows in ((32, 1), (8, 4096), (8, 4096)))
    return partial(Sm90Kernels().attention_sm90_forward, AttentionInputs(q=q, k=k, v=v, causal=True, scale=128**-0.5))


def cudnn(inputs: AttentionInputs) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        return torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.causal)


def time_alone(report: Report, rounds: int) -> None:
    """Each gradient kernel alone and both together, two batch items of 8192 queries, by what it executes."""
    kernels, flush = Sm90Kernels(), flush_buffer(measuring.cuda_device("sm90_profile"))
    for name, heads, head_dim, causal in SHAPES[:3]:
        inputs, dout = problem(heads, head_dim, causal, batch=2)
        out, lse = kernels.attention_sm90_forward(inputs)
        calls = {what: partial(kernels.attention_sm90_backward, inputs, dout, None, out, lse, needs) for what, needs in NEEDS.items()}
        for what, samples in interleaved(calls, rounds, flush).items():
            row: Row = {"case": name, "contender": "attn_cuda", "direction": what, **durations(samples)}
            pairs = 2 * heads * 8192 * 8192 * (0.5 if causal else 1)
            row["executed_tflops"] = PRODUCTS[what] * 2 * pairs * head_dim / row["median_ms"] / 1e9
            report.add(row, f"{row['executed_tflops']:.0f} TFLOP/s of its own products")


def main() -> None:
    if ncu.FLAG in sys.argv:
        ncu.run(profiled_calls(), sys.argv)
        return
    options = measuring.options(__doc__, rounds=10).parse_args()
    measuring.cuda_device("sm90_profile")
    report = Report(options.output, "ncu at base clock; times: interleaved rounds, L2 flushed before each call, medians", options.seconds)
    with report.guarded("alone"):
        time_alone(report, options.rounds)
    with report.guarded("profile"):
        report.facts["kernels"] = ncu.profile(__file__)
    report.finish(options.add)


if __name__ == "__main__":
    main()
