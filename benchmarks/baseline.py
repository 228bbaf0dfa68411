"""Attention that keeps its scores in memory, one thread an output, and the measured latency of a chain of FMAs (baseline.cu)."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cu")


def compiled(folder: Path, architecture: str) -> Path:
    """The shared library of baseline.cu for one architecture ("sm_90"). Raises RuntimeError without nvcc or when it fails."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise RuntimeError("nvcc is not on PATH")
    library = folder / "baseline.so"
    command = [nvcc, "-O3", "-std=c++17", f"-arch={architecture}", "-shared", "-Xcompiler", "-fPIC", str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed: {done.stderr.strip()}")
    return library


@cache
def _library(device: int) -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability(device)
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(compiled(Path(folder), f"sm_{major}{minor}")))


def _stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _demand(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: CUDA error {code}")


def product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """left [items, rows, depth] times right [items, depth, columns], float32, any strides: one thread an output."""
    items, rows, depth = left.shape
    columns = right.shape[2]
    if left.dtype != torch.float32 or right.dtype != torch.float32 or right.shape[:2] != (items, depth):
        raise ValueError(f"product: float32 [items, rows, depth] and [items, depth, columns]; got {left.shape} and {right.shape}")
    out = left.new_empty(items, rows, columns)
    sizes = (ctypes.c_int64 * 4)(items, rows, columns, depth)
    strides = (ctypes.c_int64 * 6)(*left.stride(), right.stride(0), right.stride(2), right.stride(1))
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (left, right, out)]
    library = _library(left.device.index)
    _demand(library.baseline_product(_stream(left.device), sizes, strides, ctypes.c_float(scale), *pointers), "baseline_product")
    return out


Product = Callable[..., Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, product: Product = product) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, V] in the dtype of v, and the probabilities [B*H, S, T] that stay in memory. Not causal, no grouped heads."""
    left, keys, values = (tensor.flatten(0, 1).float() for tensor in (q, k, v))
    probs = torch.softmax(product(left, keys.mT, 1.0 / math.sqrt(q.shape[-1])), -1)
    return product(probs, values).unflatten(0, q.shape[:2]).to(v.dtype), probs


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, probs: Tensor, product: Product = product) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the kept probabilities."""
    left, keys, values, upstream = (tensor.flatten(0, 1).float() for tensor in (q, k, v, dout))
    scale = 1.0 / math.sqrt(q.shape[-1])
    dprobs = product(upstream, values.mT)
    dscores = torch.ops.aten._softmax_backward_data(dprobs, probs, -1, torch.float32)
    gradients = product(dscores, keys, scale), product(dscores.mT, left, scale), product(probs.mT, upstream)
    dq, dk, dv = (gradient.unflatten(0, tensor.shape[:2]).to(tensor.dtype) for gradient, tensor in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


@dataclass(frozen=True)
class Latency:
    """Of one dependent FMA, measured: nanoseconds, clocks, and the clock of the multiprocessors that follows."""

    nanoseconds: float
    clocks: float
    megahertz: float


def chain_latency(device: torch.device, length: int = 1 << 22) -> Latency:
    """Time of one warp whose threads each run a chain of ``length`` dependent FMAs, over the length."""
    out = torch.empty(32, device=device)
    clocks = torch.zeros(1, dtype=torch.int64, device=device)
    library = _library(device.index)
    milliseconds = math.inf
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        arguments = (ctypes.c_int64(length), ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(clocks.data_ptr()))
        _demand(library.baseline_chain(_stream(device), *arguments), "baseline_chain")
        end.record()
        end.synchronize()
        milliseconds = min(milliseconds, start.elapsed_time(end))
    cycles = int(clocks.item())
    return Latency(milliseconds * 1e6 / length, cycles / length, cycles / milliseconds / 1e3)
