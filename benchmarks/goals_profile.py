"""Nsight Compute on the kernels of the goals that are missed, under the ordered contracts and in Triton under sm90-v1.

python benchmarks/goals_profile.py --output goals-profile.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import attention_gpu
import measuring
import ncu
import sm90_gpu
import softmax_gpu
import torch
from attention_shapes import SHAPES, inputs
from attn_spec import get_op
from latency_gpu import DECODE, without_autograd
from measuring import GPU_BACKENDS, Report

Named = Iterator[tuple[str, Callable[[], object]]]


def softmax_calls(device: torch.device) -> Named:
    """Both contracts, backends, dtypes and directions over long rows and over few of them; torch's softmax beside them."""
    contenders = [softmax_gpu.Contender("torch", partial(torch.softmax, dim=-1))]
    for contract in ("ordered-v1", "ordered-v2"):
        for backend in GPU_BACKENDS:
            op = get_op(softmax_gpu.OPERATOR, device="cuda", backend=backend, contract=contract)
            contenders.append(softmax_gpu.Contender(f"{backend} {contract}", partial(op, contract=contract), contract))
    for rows, keys in ((110592, 4608), (110592, 6544), (110592, 7401), (24, 4608)):
        for dtype in (torch.float32, torch.bfloat16):
            scores, dprobs = (torch.randn((rows, keys), device=device).to(dtype) for _ in range(2))
            for contender in contenders:
                ready = softmax_gpu.prepared(contender, scores, dprobs)
                for direction, call in ready.calls.items():
                    yield f"softmax {rows}x{keys} {dtype} {direction}, {contender.name}".replace("torch.", ""), call


def attention_calls(device: torch.device) -> Named:
    """ordered-v1: whole layers and the products of the joint layer."""
    cases = {
        "attn_cuda": ("d128", "d128-fp32", "qwen-image", "d64-causal", "gpt-oss-window", "varlen"),
        "attn_triton": ("d128", "gpt-oss-window", "varlen"),
    }
    for backend, names in cases.items():
        for name in names:
            data = inputs(SHAPES[name], device)
            ready = attention_gpu.prepared(data, get_op(data.shape.operator, device="cuda", backend=backend))
            for direction, call in ready.calls.items():
                yield f"{name} {direction}, {backend}", call


def product_calls(device: torch.device) -> Named:
    q, k = (torch.randn(1, 24, 4608, 128, device=device) for _ in range(2))
    probs = torch.softmax(torch.randn(1, 24, 4608, 4608, device=device), -1)
    for name, left, right in (("joint_attn_qk_gemm", q, k), ("joint_attn_av_gemm", probs, k)):
        for backend in GPU_BACKENDS:
            ready = attention_gpu.product_calls(get_op(name, device="cuda", backend=backend), left, right)
            for direction, call in ready.calls.items():
                yield f"{name} {direction}, {backend}", call


def decode_calls(device: torch.device) -> Named:
    """ordered-v1 at 32768 keys; a step and the window of gpt-oss under sm90-v1."""
    for backend in GPU_BACKENDS:
        operator = get_op("attention", device="cuda", backend=backend)
        for name, shape in DECODE.items():
            if shape.keys == 32768:
                data = inputs(shape, device)
                yield f"{name}, {backend}", without_autograd(data.call, operator, *data.arguments)
        for name in ("decode-b32-4k", "gpt-oss-64/8-window"):
            layer = sm90_gpu.LAYERS[name]
            operator = get_op("attention", device="cuda", backend=backend, contract=sm90_gpu.CONTRACT).forward
            yield f"{name}, {backend} {sm90_gpu.CONTRACT}", without_autograd(operator, *layer.tensors()[:3], **layer.masks)


def main() -> None:
    device = measuring.cuda_device("goals_profile")
    if ncu.FLAG in sys.argv:
        ncu.run(call for calls in (decode_calls, product_calls, attention_calls, softmax_calls) for call in calls(device))
        return
    options = measuring.options(__doc__, rounds=1).parse_args()
    report = Report(options.output, "Nsight Compute at base clock, one call each")
    with report.guarded("profile"):
        report.facts["kernels"] = ncu.profile(__file__)
    report.finish()


if __name__ == "__main__":
    main()
