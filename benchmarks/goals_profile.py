"""Nsight Compute on the kernels of the goals that are missed, under the ordered contracts and in Triton under sm90-v1.

python benchmarks/goals_profile.py --output goals-profile.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import attention_gpu
import measuring
import ncu
import sm90_gpu
import softmax_gpu
import torch
from attention_shapes import SHAPES, Shape, inputs
from attn_spec import get_op
from latency_gpu import DECODE, without_autograd
from measuring import GPU_BACKENDS, Call, Report

Named = Iterator[tuple[str, Callable[[], Call]]]


def softmax_calls(device: torch.device) -> Named:
    """Both contracts, backends, dtypes and directions over long rows and over few of them; torch's softmax beside them."""
    contenders = [softmax_gpu.Contender("torch", partial(torch.softmax, dim=-1))]
    for contract in ("ordered-v1", "ordered-v2"):
        for backend in GPU_BACKENDS:
            op = get_op(softmax_gpu.OPERATOR, device="cuda", backend=backend, contract=contract)
            contenders.append(softmax_gpu.Contender(f"{backend} {contract}", partial(op, contract=contract), contract))
    for rows, keys in ((110592, 4608), (110592, 6544), (110592, 7401), (24, 4608)):
        for dtype in (torch.float32, torch.bfloat16):
            for contender in contenders:
                for direction in ("forward", "backward"):
                    name = f"softmax {rows}x{keys} {dtype} {direction}, {contender.name}".replace("torch.", "")
                    yield name, partial(softmax_call, contender, (rows, keys), dtype, direction, device)


def softmax_call(
    contender: softmax_gpu.Contender, shape: tuple[int, int], dtype: torch.dtype, direction: str, device: torch.device
) -> Call:
    scores, dprobs = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return softmax_gpu.prepared(contender, scores, dprobs).calls[direction]


def attention_calls(device: torch.device) -> Named:
    """ordered-v1: whole layers."""
    cases = {
        "attn_cuda": ("d128", "d128-fp32", "qwen-image", "d64-causal", "gpt-oss-window", "varlen"),
        "attn_triton": ("d128", "gpt-oss-window", "varlen"),
    }
    for backend, names in cases.items():
        for name in names:
            for direction in ("forward", "backward"):
                yield f"{name} {direction}, {backend}", partial(attention_call, backend, name, direction, device)


def attention_call(backend: str, name: str, direction: str, device: torch.device) -> Call:
    data = inputs(SHAPES[name], device)
    return attention_gpu.prepared(data, get_op(data.shape.operator, device="cuda", backend=backend)).calls[direction]


def product_calls(device: torch.device) -> Named:
    for name in ("joint_attn_qk_gemm", "joint_attn_av_gemm"):
        for backend in GPU_BACKENDS:
            for direction in ("forward", "backward"):
                yield f"{name} {direction}, {backend}", partial(product_call, backend, name, direction, device)


def product_call(backend: str, name: str, direction: str, device: torch.device) -> Call:
    q, k = (torch.randn(1, 24, 4608, 128, device=device) for _ in range(2))
    left = q if name == "joint_attn_qk_gemm" else torch.softmax(torch.randn(1, 24, 4608, 4608, device=device), -1)
    return attention_gpu.product_calls(get_op(name, device="cuda", backend=backend), left, k).calls[direction]


def decode_calls(device: torch.device) -> Named:
    """ordered-v1 at 32768 keys; a step and the window of gpt-oss under sm90-v1."""
    for backend in GPU_BACKENDS:
        for name, shape in DECODE.items():
            if shape.keys == 32768:
                yield f"{name}, {backend}", partial(decode_call, backend, shape, device)
        for name in ("decode-b32-4k", "gpt-oss-64/8-window"):
            yield f"{name}, {backend} {sm90_gpu.CONTRACT}", partial(tensor_core_call, backend, sm90_gpu.LAYERS[name])


def decode_call(backend: str, shape: Shape, device: torch.device) -> Call:
    data = inputs(shape, device)
    return without_autograd(data.call, get_op("attention", device="cuda", backend=backend), *data.arguments)


def tensor_core_call(backend: str, layer: sm90_gpu.Layer) -> Call:
    operator = get_op("attention", device="cuda", backend=backend, contract=sm90_gpu.CONTRACT).forward
    return without_autograd(operator, *layer.tensors()[:3], **layer.masks)


def main() -> None:
    device = measuring.cuda_device("goals_profile")
    if ncu.FLAG in sys.argv:
        ncu.run((call for calls in (decode_calls, product_calls, attention_calls, softmax_calls) for call in calls(device)), sys.argv)
        return
    parser = measuring.options(__doc__, rounds=1)
    parser.add_argument("--calls", default="", help="a pattern of names; default: all")
    options = parser.parse_args()
    report = Report(options.output, "Nsight Compute at base clock, one call each")
    with report.guarded("profile"):
        found = ncu.profile(__file__, options.calls)
        if options.add is not None:
            before, new = json.loads(options.add.read_text())["environment"], {row["case"] for row in found}
            found += [row for row in before.pop("kernels") if row["case"] not in new]
            report.facts["earlier"] = before
        report.facts["kernels"] = found
    report.finish()


if __name__ == "__main__":
    main()
