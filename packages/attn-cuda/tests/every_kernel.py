"""Every kernel of attn_cuda once on small problems, forward and backward, for compute-sanitizer (sanitize.py beside this runs the tools).

    python packages/attn-cuda/tests/every_kernel.py [--part 2/8] [--kernels launched.json] [--list]

``--part I/N`` takes every N-th problem, beginning with the I-th. ``--kernels`` writes the names of the kernels that were launched.
Sizes are the smallest that reach each kernel and each tail: a second block of rows, a last tile or wave that is not full.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attn_cuda
import torch
from attn_cuda.backend import BACKEND
from attn_spec import Problem
from attn_spec._contract import CONTRACTS
from attn_spec.torch import _operation
from torch import Tensor

DEVICE = "cuda"
FLOATS = torch.float32
DTYPES = (FLOATS, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Work:
    """A named call that launches kernels."""

    name: str
    run: Callable[[], None]


def leaf(*shape: int, dtype: torch.dtype = FLOATS) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def backward(results: Tensor | tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    outputs = [results] if isinstance(results, Tensor) else list(results)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])


def kept(batch: int, keys: int) -> Tensor:
    """A padding mask that keeps and drops keys in every tile."""
    return torch.arange(keys, device=DEVICE).expand(batch, keys) % 7 != 3


def softmax(rows: int, keys: int, dtype: torch.dtype, masked: bool, contract: str) -> None:
    scores = leaf(2, rows, keys, dtype=dtype)
    mask = kept(2, keys) if masked else None
    backward(attn_cuda.joint_attn_softmax(scores, key_padding_mask=mask, contract=contract), [scores])


def softmax_of_floats(keys: int, dtype: torch.dtype, contract: str) -> None:
    """Float32 probabilities and cotangents of half-precision scores."""
    scores = leaf(2, 3, keys, dtype=dtype)
    backward(BACKEND.operators()["joint_attn_softmax.forward_fp32"](scores, contract=contract), [scores])


def contracts(operator: str) -> list[str]:
    """The contracts under which attn_cuda runs ``operator``."""
    stated = [name for name, contract in CONTRACTS.items() if operator in contract.operators]
    asked = {name: Problem(op=operator, dtype="float32", device=DEVICE, contract=name) for name in stated}
    return [name for name, problem in asked.items() if not BACKEND.capabilities().reasons(problem)]


def softmax_problems() -> Iterator[Work]:
    """Rows of one warp and of a block, of odd and even length, in shared memory and beyond it, and of more tiles than a block holds."""
    sizes = ((5, 70), (5, 1000), (3, 1300), (3, 1301), (1, 31000))
    for contract in contracts("joint_attn_softmax"):
        for dtype in DTYPES:
            for rows, keys in sizes:
                for masked in (False, True):
                    name = f"softmax {contract} {dtype} {rows}x{keys}{' masked' if masked else ''}"
                    yield Work(name, partial(softmax, rows, keys, dtype, masked, contract))
            if dtype != FLOATS:
                yield Work(f"softmax {contract} {dtype} to floats", partial(softmax_of_floats, 1300, dtype, contract))
        yield Work(f"softmax {contract} more tiles than a chunk", partial(softmax, 1, 262500, torch.bfloat16, False, contract))


def products(dtype: torch.dtype, width: int, floats: bool) -> None:
    """Both products of grouped heads, with results in the dtype or in float32."""
    q, k, v = leaf(1, 4, 70, width, dtype=dtype), leaf(1, 2, 200, width, dtype=dtype), leaf(1, 2, 200, width, dtype=dtype)
    scores = attn_cuda.joint_attn_qk_gemm(q, k, out_dtype=FLOATS if floats else dtype)
    backward(scores, [q, k])
    probs = torch.softmax(scores.detach(), -1).requires_grad_()
    operator = BACKEND.operators()["joint_attn_av_gemm.forward_fp32" if floats else "joint_attn_av_gemm"]
    backward(operator(probs, v), [probs, v])


def strided_products(dtype: torch.dtype) -> None:
    """Columns that are not contiguous."""
    q, k = leaf(1, 2, 40, 70, dtype=dtype), leaf(1, 2, 40, 140, dtype=dtype)
    scores = attn_cuda.joint_attn_qk_gemm(q.mT, k.mT)
    backward(scores, [q, k])
    probs, v = torch.softmax(scores.detach(), -1).mT.contiguous().requires_grad_(), leaf(1, 2, 40, 140, dtype=dtype)
    backward(attn_cuda.joint_attn_av_gemm(probs.mT, v.mT), [probs, v])


def product_problems() -> Iterator[Work]:
    for dtype in DTYPES[:2]:
        for floats in (False, True):
            for width in (72, 37):
                yield Work(f"products {dtype} width {width}{' to floats' if floats else ''}", partial(products, dtype, width, floats))
        yield Work(f"products {dtype} strided", partial(strided_products, dtype))


@dataclass(frozen=True)
class Sizes:
    """Of one attention problem: heads, kv heads, queries, keys, head dim of q and k, and of v."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int


def tensors(sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    q = leaf(1, sizes.heads, sizes.queries, sizes.head_dim, dtype=dtype)
    k = leaf(1, sizes.kv_heads, sizes.keys, sizes.head_dim, dtype=dtype)
    return [q, k, leaf(1, sizes.kv_heads, sizes.keys, sizes.value_dim, dtype=dtype)]


def attention(sizes: Sizes, dtype: torch.dtype, differentiable: tuple[str, ...] = (), **options: Any) -> None:
    """Forward, and backward through the output and LSE to q, k, v and the options named in ``differentiable``."""
    inputs = tensors(sizes, dtype)
    made = {name: option() if callable(option) else option for name, option in options.items()}
    results = attn_cuda.attention(*inputs, return_lse=True, **made)
    backward(results, [*inputs, *(made[name] for name in differentiable)])


def decode(sizes: Sizes, dtype: torch.dtype, masked: bool = False) -> None:
    with torch.no_grad():
        attn_cuda.attention(*tensors(sizes, dtype), key_padding_mask=kept(1, sizes.keys) if masked else None)


def joint(dtype: torch.dtype, width: int) -> None:
    parts = [leaf(1, 2, length, width, dtype=dtype) for length in (20, 20, 20, 50, 50, 50)]
    backward(attn_cuda.joint_attention(*parts, prompt_mask=kept(1, 20)), parts)


def packed(dtype: torch.dtype, width: int) -> None:
    """Segments of many lengths, one of them empty, with unused rows between and behind them."""
    arrays = [leaf(150, heads, width, dtype=dtype) for heads in (4, 2, 2)]
    offsets, used = torch.tensor([0, 33, 33, 140], device=DEVICE), torch.tensor([30, 0, 107], device=DEVICE)
    q, k, v = arrays
    backward(attn_cuda.attention_varlen(q, k, v, offsets, offsets, seqlens_q=used, seqlens_k=used), arrays)


def attention_problems() -> Iterator[Work]:
    """Each width of the kernels with and without rows of 16 bytes; every option; decode in few and many rows, in one wave and two."""
    for dtype in DTYPES[:2]:
        for head_dim, value_dim in ((40, 40), (64, 128), (128, 64), (250, 256), (37, 130)):
            sizes = Sizes(2, 1, 70, 300, head_dim, value_dim)
            yield Work(f"attention {dtype} {head_dim}/{value_dim}", partial(attention, sizes, dtype))
        for width in (64, 128, 192):
            sizes = Sizes(2, 1, 20, 300, width, width)
            masks: dict[str, Any] = {"causal": False, "key_padding_mask": lambda: kept(1, 300), "window": (90, 20)}
            yield Work(f"attention {dtype} {width} mask, window", partial(attention, sizes, dtype, **masks))
            few = Sizes(4, 2, 1, 1500, width, width)
            yield Work(f"decode {dtype} {width}", partial(decode, few, dtype))
            many = Sizes(8, 2, 6, 700, width, width)
            yield Work(f"decode {dtype} {width} many rows", partial(decode, many, dtype, True))
            yield Work(f"packed {dtype} {width}", partial(packed, dtype, width))
        yield Work(f"joint {dtype}", partial(joint, dtype, 64))
    for dtype in DTYPES:
        for heads in (4, 64):
            yield Work(f"decode {dtype} {heads} heads", partial(decode, Sizes(heads, heads // 4, 8, 600, 64, 128), dtype))
    small = Sizes(2, 1, 20, 300, 64, 64)
    yield Work("attention sinks", partial(attention, small, FLOATS, ("sinks",), sinks=lambda: leaf(2)))
    for shape in ((1, 2, 20, 300), (1, 1, 20, 1), (1, 2, 1, 300), (1, 1, 1, 1)):
        yield Work(f"attention bias {shape}", partial(attention, small, FLOATS, ("bias",), bias=partial(leaf, *shape)))
    lengths: dict[str, Any] = {"kv_lengths": lambda: torch.tensor([290], device=DEVICE), "k_start": 100, "q_start": 350}
    yield Work("attention lengths and starts", partial(attention, small, torch.bfloat16, **lengths))
    yield Work("attention without keys", partial(attention, Sizes(2, 1, 20, 0, 64, 64), FLOATS))
    yield Work("attention of one head in many rows", partial(attention, Sizes(1, 1, 140, 140, 64, 64), torch.bfloat16))
    yield Work("decode in two waves", partial(decode, Sizes(1, 1, 1, 17000, 40, 40), torch.bfloat16))


SM90 = "sm90-v1"


def tensor_core_packed(dtype: torch.dtype, width: int) -> None:
    arrays = [leaf(400, heads, width, dtype=dtype) for heads in (4, 2, 2)]
    offsets, used = torch.tensor([3, 36, 36, 390], device=DEVICE), torch.tensor([30, 0, 350], device=DEVICE)
    q, k, v = arrays
    backward(attn_cuda.attention_varlen(q, k, v, offsets, offsets, seqlens_q=used, seqlens_k=used, contract=SM90), arrays)


def tensor_core_joint(dtype: torch.dtype, width: int, text: int) -> None:
    parts = [leaf(2, heads, length, width, dtype=dtype) for length in (text, 150) for heads in (4, 2, 2)]
    backward(attn_cuda.joint_attention(*parts, prompt_mask=kept(2, text), contract=SM90), parts)


def tensor_core_problems() -> Iterator[Work]:
    """Contract sm90-v1 where the device has it: each width and dtype with every kind of mask, segments that are merged, and sinks."""
    if BACKEND.reasons(Problem(op="attention", dtype="bfloat16", device=DEVICE, contract=SM90, head_dim=64, value_dim=64)):
        return
    for dtype in DTYPES[1:]:
        for width in (64, 128):
            name = f"{SM90} {dtype} {width}"
            sizes = Sizes(4, 2, 333, 401, width, width)
            options: dict[str, Any] = {"contract": SM90, "sinks": lambda: leaf(4)}
            yield Work(f"{name} full", partial(attention, sizes, dtype, ("sinks",), causal=False, **options))
            yield Work(f"{name} window", partial(attention, sizes, dtype, ("sinks",), window=(150, 0), **options))
            lengths: dict[str, Any] = {"kv_lengths": lambda: torch.tensor([1450], device=DEVICE), "k_start": 100, "q_start": 1400}
            yield Work(f"{name} segments", partial(attention, Sizes(2, 1, 5, 1500, width, width), dtype, contract=SM90, **lengths))
            many = Sizes(140, 140, 3, 9, width, width)
            yield Work(f"{name} more blocks than processors", partial(attention, many, dtype, contract=SM90))
            yield Work(f"{name} packed", partial(tensor_core_packed, dtype, width))
            for text in (0, 70, 1100):
                yield Work(f"{name} joint, {text} text rows", partial(tensor_core_joint, dtype, width, text))


def problems() -> list[Work]:
    """All of them, in a fixed order."""
    return [*softmax_problems(), *product_problems(), *attention_problems(), *tensor_core_problems()]


def as_without_a_profiler() -> AbstractContextManager[object]:
    """Calls take the ways that they take where no profiler must see them."""
    others = tuple(watcher for watcher in _operation.WATCHERS if watcher is not torch._C._autograd._profiler_enabled)
    return patch.object(_operation, "WATCHERS", others)


def launched(run: Callable[[], int]) -> tuple[int, list[str]]:
    """What ``run`` returns, and the names of the attn_cuda kernels that it launches, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded, as_without_a_profiler():
        count = run()
        torch.cuda.synchronize()
    return count, sorted({event.name for event in recorded.events() if "attn_cuda::" in event.name})


def run_all(chosen: list[Work]) -> None:
    for problem in chosen:
        torch.manual_seed(0)
        problem.run()
        torch.cuda.synchronize()


def run_part(part: int, parts: int) -> int:
    """Runs the part-th of so many parts and returns its number of problems."""
    reason = BACKEND.unavailable("cuda")  # probes the device, which is a kernel too
    if reason is not None:
        raise SystemExit(f"every_kernel: {reason}")
    chosen = problems()[part - 1 :: parts]
    run_all(chosen)
    return len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="I/N: every N-th problem from the I-th")
    parser.add_argument("--kernels", type=Path, help="write the names of the launched kernels there, as JSON")
    parser.add_argument("--list", action="store_true", help="print the problems and stop")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--part {options.part}: I must lie in 1..N")
    if options.list:
        print("\n".join(problem.name for problem in problems()[part - 1 :: parts]))
        return
    if options.kernels is None:
        count = run_part(part, parts)
    else:
        count, names = launched(partial(run_part, part, parts))
        options.kernels.write_text(json.dumps(names, indent=1) + "\n")
    print(f"{count} problems ran")


if __name__ == "__main__":
    main()
