"""Ordered attention and products on one GPU beside fp32 peers, in one process, interleaved, medians.

The ceiling is torch's float32 matrix product with TF32 off. "useful" counts 4*D operations for each visible (head, query, key) pair
forward and 10*D backward, whatever a kernel recomputes. Results of attn_cuda are compared with the host kernels on a sampled head before
anything is timed.

    python benchmarks/attention_gpu.py --output attention.json [--rounds 10] [--cases d128,d64-causal]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attn_cuda
import attn_reference
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One timed call: [batch, heads or kv_heads, queries or keys, head_dim]."""

    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    queries: int = 4096
    keys: int = 4096
    head_dim: int = 128
    causal: bool = False
    window: tuple[int, int] | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def pairs(self) -> int:
        """Visible (head, query, key) pairs, counted exactly; causal is bottom-right, so the block left of the diagonal is dense."""
        total = 0
        for query in range(self.queries):
            position = self.keys - self.queries + query
            last = min(position, self.keys - 1) if self.causal else self.keys - 1
            first = 0
            if self.window is not None:
                first, last = max(0, position - self.window[0]), min(last, position + self.window[1])
            total += max(0, last - first + 1)
        return self.batch * self.heads * total


SHAPES = {
    "d128": Shape(),
    "d128-fp32": Shape(dtype=torch.float32),
    "d128-causal": Shape(causal=True),
    "d64": Shape(head_dim=64),
    "d64-causal": Shape(head_dim=64, causal=True),
    "qwen-image": Shape(heads=24, kv_heads=24, queries=4608, keys=4608),
    "qwen3-8b": Shape(heads=32, kv_heads=8, causal=True),
    "gpt-oss-window": Shape(heads=64, kv_heads=8, head_dim=64, causal=True, window=(127, 0), sinks=True),
    "decode-8k": Shape(heads=32, kv_heads=8, queries=1, keys=8192, causal=True),
    "decode-32k": Shape(heads=32, kv_heads=8, queries=1, keys=32768, causal=True),
    "decode16-32k": Shape(heads=32, kv_heads=8, queries=16, keys=32768, causal=True),
}


def inputs(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Random q, k, v, cotangent and sinks."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    query, key = (shape.batch, shape.heads, shape.queries, shape.head_dim), (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    found = {"q": normal(*query), "k": normal(*key), "v": normal(*key), "dout": normal(*query)}
    if shape.sinks:
        found["sinks"] = torch.linspace(-2, 3, shape.heads, device=device)
    return found


def keywords(shape: Shape, data: dict[str, Tensor]) -> dict[str, Any]:
    return {"causal": shape.causal, "window": shape.window, "sinks": data.get("sinks")}


def check(shape: Shape, data: dict[str, Tensor]) -> None:
    """The last kv head's group, its last 64 queries: bytes of out and lse against the host kernels."""
    group, rows = shape.heads // shape.kv_heads, min(64, shape.queries)
    got, got_lse = attn_cuda.attention(data["q"], data["k"], data["v"], return_lse=True, **keywords(shape, data))
    part = {"q": data["q"][:, -group:, -rows:], "k": data["k"][:, -1:], "v": data["v"][:, -1:]}
    options = keywords(shape, {"sinks": data["sinks"][-group:].cpu()} if shape.sinks else {})
    out, lse = attn_reference.attention(*(tensor.cpu() for tensor in part.values()), return_lse=True, **options)
    if not (torch.equal(got[:, -group:, -rows:].cpu(), out) and torch.equal(got_lse[:, -group:, -rows:].cpu(), lse)):
        raise SystemExit(f"attn_cuda and the host kernels differ on {shape}; nothing was timed")


def calls(shape: Shape, data: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """Forward and backward of attn_cuda, and torch's own attention where it runs the problem."""
    q, k, v = data["q"], data["k"], data["v"]
    found: dict[str, Callable[[], Any]] = {"attn_cuda forward": lambda: attn_cuda.attention(q, k, v, **keywords(shape, data))}
    if shape.queries > 1:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attn_cuda.attention(*leaves, **keywords(shape, data))
        found["attn_cuda backward"] = lambda: torch.autograd.grad(out, leaves, data["dout"], retain_graph=True)
    if shape.dtype == torch.float32 and shape.kv_heads == shape.heads and shape.window is None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        found["torch sdpa forward"] = lambda: sdpa(q, k, v, is_causal=shape.causal)
    return found


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end)


def medians(chosen: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call over interleaved rounds, after two warm-ups."""
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(2):
        for call in chosen.values():
            timed(call)
    for _ in range(rounds):
        for name, call in chosen.items():
            times[name].append(timed(call))
    return {name: statistics.median(samples) for name, samples in times.items()}


def products(rounds: int, device: torch.device) -> tuple[float, list[dict[str, Any]]]:
    """The fp32 ceiling in TFLOP/s, and the joint products beside torch.matmul at a Qwen-Image layer's sizes."""
    square = torch.randn(8192, 8192, device=device)
    ceiling = 2 * 8192**3 / medians({"matmul": lambda: square @ square}, rounds)["matmul"] / 1e9
    q, k = torch.randn(1, 24, 4608, 128, device=device), torch.randn(1, 24, 4608, 128, device=device)
    probs = torch.softmax(torch.randn(1, 24, 4608, 4608, device=device), -1)
    chosen = {
        "attn_cuda qk_gemm": lambda: attn_cuda.joint_attn_qk_gemm(q, k),
        "torch qk": lambda: q @ k.transpose(-1, -2),
        "attn_cuda av_gemm": lambda: attn_cuda.joint_attn_av_gemm(probs, k),
        "torch av": lambda: probs @ k,
    }
    flop = 2 * 24 * 4608**2 * 128
    return ceiling, [
        {
            "case": "qwen-image products, fp32",
            "call": name,
            "median_ms": time,
            "useful_tflops": flop / time / 1e9,
            "of_fp32_gemm": flop / time / 1e9 / ceiling,
        }
        for name, time in medians(chosen, rounds).items()
    ]


def run(name: str, shape: Shape, rounds: int, ceiling: float, device: torch.device) -> list[dict[str, Any]]:
    data = inputs(shape, device)
    check(shape, data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attn_cuda.attention(data["q"], data["k"], data["v"], **keywords(shape, data))
    peak = torch.cuda.max_memory_allocated() - before
    rows = []
    for call, time in medians(calls(shape, data), rounds).items():
        flop = (10 if call.endswith("backward") else 4) * shape.pairs * shape.head_dim
        rows.append(
            {
                "case": name,
                "shape": {field: str(value) for field, value in vars(shape).items()},
                "call": call,
                "median_ms": time,
                "useful_tflops": flop / time / 1e9,
                "of_fp32_gemm": flop / time / 1e9 / ceiling,
                "forward_peak_bytes": peak,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", default=",".join(SHAPES), help="names, comma separated")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_gpu: no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", torch.cuda.current_device())
    ceiling, results = products(options.rounds, device)
    for name in options.cases.split(","):
        results += run(name, SHAPES[name], options.rounds, ceiling, device)
    for row in results:
        rate = f"{row['useful_tflops']:7.2f} TFLOP/s {row['of_fp32_gemm']:6.3f} of fp32 GEMM"
        print(f"{row['case']:28} {row['call']:22} {row['median_ms']:9.4f} ms {rate}")
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "device": torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fingerprint": attn_cuda.backend.BACKEND.fingerprint("cuda"),
        "fp32_gemm_tflops": ceiling,
        "rounds": options.rounds,
        "method": "interleaved rounds, CUDA events, median; bytes of a sampled head checked first",
    }
    options.output.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
