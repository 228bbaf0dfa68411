"""Training attention in 4 bits on one Hopper GPU, contract nvfp4-sm90-v1, on video shapes.

Forward and backward of attn_triton beside its own unquantized sm90-v1 kernels, and beside the tile configuration of FastVideo's kernel
(qat_small_tiles_kernel.py, with the same quantizer). Every one but the unquantized includes the quantization of Q, K and V. A row "step" is
the sum of the medians of both directions. Before anything is timed the last rows of a head are compared: ours in bytes with the CPU model,
every contender with float64 attention.

    python benchmarks/qat_gpu.py --output qat.json [--rounds 10] [--cases 12x8192]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import attn_reference
import measuring
import qat_small_tiles_kernel as small_tiles
import torch
from attn_spec import QATConfig, get_op
from attn_spec.torch import AttentionInputs
from attn_triton._nvfp4_launch import operands
from measuring import Call, Report, Row, demand_same_bytes, durations, flush_buffer, interleaved, usable
from torch import Tensor

CONTRACT, UNQUANTIZED = "nvfp4-sm90-v1", "sm90-v1"
CASES = {f"12x{tokens}": tokens for tokens in (8192, 16384, 32768)}
HEADS, HEAD_DIM = 12, 128
CONFIG = QATConfig.training()
OURS = {
    "training": CONFIG,
    "fastvideo": QATConfig.fastvideo(),
    "delta of the quantized P": replace(CONFIG, high_precision_delta=False),
    "smooth keys": replace(CONFIG, smooth_k=True),
}
BASE, SMALL = "unquantized", "32x32 tiles"
FLOP = 14
"""Times heads * tokens^2 * D of a step: 4 forward and 10 backward, whatever a kernel recomputes."""


class SmallTiles(torch.autograd.Function):
    """Attention in 4 bits over 32 x 32 tiles, straight through the quantizers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = operands(AttentionInputs(q, k, v), QATConfig.fastvideo(), q.dtype)
        rounded = parts.q.quantized, parts.k.quantized, parts.v.quantized
        out: Tensor
        out, logs = small_tiles.forward(*rounded)
        ctx.save_for_backward(*rounded, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = small_tiles.backward(*ctx.saved_tensors, *gradients)
        return found


def contenders() -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {
        BASE: partial(get_op("attention", device="cuda", backend="attn_triton", contract=UNQUANTIZED), causal=False)
    }
    for name, config in OURS.items():
        found[name] = partial(get_op("qat_attention", device="cuda", backend="attn_triton", contract=CONTRACT, config=config), causal=False)
    return {**found, SMALL: SmallTiles.apply}


def draw(tokens: int) -> list[Tensor]:
    """q, k, v and the cotangent of out, bfloat16."""
    generator = torch.Generator(device="cuda").manual_seed(20261130)
    return [torch.randn((1, HEADS, tokens, HEAD_DIM), generator=generator, device="cuda").to(torch.bfloat16) for _ in range(4)]


def check(functions: dict[str, Callable[..., Tensor]], data: list[Tensor]) -> Row:
    """Bytes of the last rows of a head, and each contender's error against float64 attention of unquantized operands there."""
    q, k, v = (tensor[:, -1:] for tensor in data[:3])
    rows = slice(-max(1, 16 * 8192 // q.shape[2]), None)
    wanted = attn_reference.qat_attention(q[:, :, rows].cpu(), k.cpu(), v.cpu(), config=CONFIG, contract=CONTRACT)
    exact = torch.softmax(q[:, :, rows].double() @ k.double().mT / math.sqrt(HEAD_DIM), -1) @ v.double()
    found: Row = {}
    for name, function in functions.items():
        out = function(*data[:3])[:, -1:, rows]
        if name == "training":
            demand_same_bytes({"the CPU model": [wanted], name: [out.cpu()]}, "the last rows of a head")
        found[name] = float((out.double() - exact).norm() / exact.norm())
        if not found[name] < 0.5:
            raise measuring.Different(f"{name} is {found[name]:.2f} away from attention; nothing was timed")
    return found


def directions(function: Callable[..., Tensor], data: list[Tensor]) -> dict[str, Call]:
    leaves = [tensor.detach().requires_grad_() for tensor in data[:3]]
    out = function(*leaves)

    def forward() -> Any:
        return function(*leaves)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, data[3], retain_graph=True)

    return {"forward": forward, "backward": backward}


def run_case(case: str, report: Report, rounds: int, flush: Tensor) -> None:
    data, functions = draw(CASES[case]), contenders()
    report.facts.setdefault("errors", {})[case] = check(functions, data)
    calls = {name: directions(function, data) for name, function in functions.items()}
    steps = dict.fromkeys(calls, 0.0)
    for direction in ("forward", "backward"):
        for name, samples in interleaved({name: both[direction] for name, both in calls.items()}, rounds, flush).items():
            row = {"case": case, "contender": name, "direction": direction, **durations(samples)}
            report.add(row, "")
            steps[name] += row["median_ms"]
    for name, time in steps.items():
        rate = FLOP * HEADS * CASES[case] ** 2 * HEAD_DIM / time / 1e9
        report.add({"case": case, "contender": name, "direction": "step", "median_ms": time, "tflops": rate}, f"{rate:7.1f} TFLOP/s")


def main() -> None:
    parser = measuring.options(__doc__, rounds=10)
    parser.add_argument("--cases", default=",".join(CASES), help="names, comma separated")
    options = parser.parse_args()
    device = measuring.cuda_device("qat_gpu")
    method = "interleaved rounds, L2 flushed before each call, CUDA events, medians; bytes compared with the CPU model before timing"
    report = Report(options.output, method, options.seconds)
    if not usable("qat_attention", CONTRACT, report, ("attn_triton",)):
        report.finish(options.add)
        return
    flush = flush_buffer(device)
    for case in options.cases.split(","):
        if not report.has_time(case):
            continue
        with report.guarded(case):
            run_case(case, report, options.rounds, flush)
        for name in OURS:
            for peer in (BASE, SMALL):
                report.compare(name, peer)
        report.save()
        torch.cuda.empty_cache()
    report.finish(options.add)


if __name__ == "__main__":
    main()
