"""Speed of the host kernels beside torch on this CPU: medians in seconds and ratios, torch's time over ours, as JSON.

    python benchmarks/host_speed.py [--repeats 7] [--attention-heads 24]

Both sides run interleaved in one process on ``torch.get_num_threads()`` threads. Products: [24, 512, 128] x [24, 128, 4608] and two more;
softmax: 4096 x 4608; attention: one layer of S = T = 4608 with heads of 128, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from attn_reference._host_kernels import KERNELS, HostKernels, fingerprint
from attn_spec._environment import environment
from attn_spec.torch import AttentionInputs
from torch import Tensor


def medians(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Median wall seconds of each function, after one unmeasured call, interleaved."""
    seconds: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for found, function in zip(seconds, functions, strict=True):
            begin = time.perf_counter()
            function()
            if repeat:
                found.append(time.perf_counter() - begin)
    return [statistics.median(found) for found in seconds]


def beside(repeats: int, ours: Callable[[], Any], torchs: Callable[[], Any], operations: float = 0.0) -> dict[str, float]:
    host, peer = medians(repeats, ours, torchs)
    rates = {"host_gflops": operations / host / 1e9, "torch_gflops": operations / peer / 1e9} if operations else {}
    return {"host_seconds": host, "torch_seconds": peer, "ratio": peer / host, **rates}


def products(repeats: int) -> dict[str, Any]:
    q, k = torch.randn(1, 24, 512, 128), torch.randn(1, 24, 4608, 128)
    operations = 2.0 * 24 * 512 * 4608 * 128
    scores = KERNELS.qk_gemm_forward(q, k, 0.1, torch.float32)
    return {
        "joint_attn_qk_gemm": beside(repeats, lambda: KERNELS.qk_gemm_forward(q, k, 1.0, torch.float32), lambda: q @ k.mT, operations),
        "joint_attn_av_gemm": beside(repeats, lambda: KERNELS.av_gemm_forward(scores, k, torch.float32), lambda: scores @ k, operations),
        "joint_attn_qk_gemm dk": beside(
            repeats, lambda: KERNELS.qk_gemm_backward(scores, q, k, 1.0, (False, True)), lambda: scores.mT @ q, operations
        ),
    }


def softmax(repeats: int, dtype: torch.dtype) -> dict[str, Any]:
    scores = torch.randn(4096, 4608).to(dtype)
    probs, row_max, row_sum = KERNELS.softmax_forward(scores, None, dtype)
    cotangent = torch.randn(4096, 4608).to(dtype)

    def backward() -> Tensor:
        return torch.ops.aten._softmax_backward_data(cotangent, probs, -1, dtype)

    return {
        "forward": beside(repeats, lambda: KERNELS.softmax_forward(scores, None, dtype), lambda: scores.softmax(-1)),
        "backward": beside(repeats, lambda: KERNELS.softmax_backward(cotangent, scores, None, row_max, row_sum), backward),
    }


def attention(repeats: int, heads: int, dtype: torch.dtype, causal: bool) -> dict[str, float]:
    q, k, v, dout = (torch.randn(1, heads, 4608, 128).to(dtype) for _ in range(4))
    inputs = AttentionInputs(q=q, k=k, v=v, causal=causal, scale=128**-0.5)
    _, _, row_max, row_sum = KERNELS.attention_forward(inputs, dtype)
    forward, backward = medians(
        repeats,
        lambda: KERNELS.attention_forward(inputs, dtype),
        lambda: KERNELS.attention_backward(inputs, dout, None, row_max, row_sum, frozenset("qkv")),
    )
    product = 2.0 * heads * 4608 * 4608 * 128 * (0.5 if causal else 1.0)
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_gflops": 2 * product / forward / 1e9,
        "backward_gflops": 5 * product / backward / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--attention-heads", type=int, default=24)
    options = parser.parse_args()
    heads = options.attention_heads
    report = {
        "environment": environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "threads": torch.get_num_threads(),
        "variants": HostKernels.variants(),
        "fingerprint": fingerprint(),
        "products": products(options.repeats),
        "softmax": {str(dtype): softmax(options.repeats, dtype) for dtype in (torch.float32, torch.bfloat16)},
        "attention": {
            f"{dtype} causal={causal} heads={heads}": attention(max(1, options.repeats // 3), heads, dtype, causal)
            for dtype, causal in ((torch.float32, False), (torch.bfloat16, True))
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
