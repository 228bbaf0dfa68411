"""Attention of contract sm90-v1 on one Hopper GPU beside its peers, in one process, interleaved, medians of random data.

Peers: torch's scaled_dot_product_attention (cuDNN, flash), FlexAttention, and FlashAttention 3 and 4 where they can be imported (FA4 runs
its deterministic backward). Rates count 4*D operations for each visible pair forward and 10*D backward, whatever a kernel recomputes.
Decode is timed as a CUDA graph, with the bytes of the keys and values that it reads. Before anything is timed, rows of the output are
compared in bytes with the CPU model, out and all gradients of one backend with those of the other, and errors against float64 are taken
beside those of torch's flash attention.

    python benchmarks/sm90_gpu.py --output sm90.json [--rounds 10] [--cases d128,d64-causal] [--peers fa3] [--add FILE]

``--add`` keeps the rows of other cases that FILE, an earlier result, has.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import attn_reference
import measuring
import torch
from attn_spec import UnsupportedProblem, get_op
from measuring import Call, Report, Row, demand_same_bytes, durations, flush_buffer, interleaved, usable
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CONTRACT = "sm90-v1"
FORWARD_FLOP, BACKWARD_FLOP = 4, 10


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One problem, bfloat16; ``queries`` 1 is a decode step."""

    batch: int = 2
    heads: int = 16
    kv_heads: int = 16
    queries: int = 8192
    keys: int = 8192
    head_dim: int = 128
    causal: bool = False
    window: int | None = None  # keys before its own that a query sees

    @property
    def decode(self) -> bool:
        return self.queries == 1

    @property
    def masks(self) -> dict[str, Any]:
        """Options of attn for these masks; a decode step sees all keys."""
        options: dict[str, Any] = {"causal": self.causal and not self.decode}
        return options if self.window is None else {**options, "window": (self.window, 0)}

    def flop(self, direction: str) -> float:
        pairs: float = self.queries * self.keys
        if self.window is not None:
            pairs = sum(min(query + 1, self.window + 1) for query in range(self.queries))
        elif self.masks["causal"]:
            pairs *= 0.5
        return (FORWARD_FLOP if direction == "forward" else BACKWARD_FLOP) * self.batch * self.heads * pairs * self.head_dim

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * self.batch * self.kv_heads * self.keys * self.head_dim

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the cotangent of out."""
        generator = torch.Generator(device="cuda").manual_seed(20261130)

        def draw(heads: int, rows: int) -> Tensor:
            return torch.randn((self.batch, heads, rows, self.head_dim), generator=generator, device="cuda").to(torch.bfloat16)

        return (
            draw(self.heads, self.queries),
            draw(self.kv_heads, self.keys),
            draw(self.kv_heads, self.keys),
            draw(self.heads, self.queries),
        )


PEERS = ("torch cudnn", "torch flash", "flex", "fa3", "fa4 deterministic")
LAYERS = {
    "d128": Layer(),
    "d128-causal": Layer(causal=True),
    "qwen-image-4608": Layer(batch=1, heads=24, kv_heads=24, queries=4608, keys=4608),
    "d128-32/8-causal": Layer(heads=32, kv_heads=8, causal=True),
    "d64": Layer(heads=32, kv_heads=32, head_dim=64),
    "d64-causal": Layer(heads=32, kv_heads=32, head_dim=64, causal=True),
    "gpt-oss-64/8-causal": Layer(batch=1, heads=64, kv_heads=8, head_dim=64, causal=True),
    "gpt-oss-64/8-window": Layer(batch=1, heads=64, kv_heads=8, head_dim=64, causal=True, window=127),
    "decode-b64-4k": Layer(batch=64, heads=32, kv_heads=8, queries=1, keys=4096),
    "decode-b32-4k": Layer(batch=32, heads=32, kv_heads=8, queries=1, keys=4096),
    "decode-b16-8k": Layer(batch=16, heads=32, kv_heads=8, queries=1, keys=8192),
    "decode-b4-8k": Layer(batch=4, heads=32, kv_heads=8, queries=1, keys=8192),
    "decode-b1-8k": Layer(batch=1, heads=32, kv_heads=8, queries=1, keys=8192),
    "decode-b1-32k": Layer(batch=1, heads=32, kv_heads=8, queries=1, keys=32768),
}


def _torch(q: Tensor, k: Tensor, v: Tensor, *, kind: SDPBackend, causal: bool, window: object = None) -> Tensor:
    if window is not None:
        raise RuntimeError("scaled_dot_product_attention has no window without a mask in memory")
    with sdpa_kernel(kind):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _flex(layer: Layer) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    window = layer.keys if layer.window is None else layer.window
    if layer.masks["causal"]:
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= window), None, None, layer.queries, layer.keys, device="cuda")
    torch.compiler.reset()  # every layer is compiled for its own shape; past a limit of shapes the operator would run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=mask, enable_gqa=layer.heads != layer.kv_heads)


def _flash(module: str, **keywords: Any) -> Callable[..., Tensor]:
    """``flash_attn_func`` of a package, which takes [B, S, H, D]."""
    function = importlib.import_module(module).flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **keywords)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


def contenders(layer: Layer, backends: list[str]) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """What makes each contender; making one may fail, which refuses it."""
    causal = layer.masks["causal"]
    span = {} if layer.window is None else {"window_size": (layer.window, 0)}
    found: dict[str, Callable[[], Callable[..., Tensor]]] = {name: partial(_ours, name, layer) for name in backends}
    found |= {
        "torch cudnn": lambda: partial(_torch, kind=SDPBackend.CUDNN_ATTENTION, **layer.masks),
        "torch flash": lambda: partial(_torch, kind=SDPBackend.FLASH_ATTENTION, **layer.masks),
        "flex": partial(_flex, layer),
        "fa3": partial(_flash, "fa3_fwd_interface", causal=causal, num_splits=0 if layer.decode else 1, **span),
        "fa4 deterministic": partial(_flash, "flash_attn.cute", causal=causal, deterministic=True, **span),
    }
    return found


def _ours(name: str, layer: Layer) -> Callable[..., Tensor]:
    return partial(get_op("attention", device="cuda", backend=name, contract=CONTRACT).forward, **layer.masks)


def check(name: str, operator: Callable[..., Any], layer: Layer, data: tuple[Tensor, ...]) -> Row:
    """Bytes of the last rows of one head against the CPU model, and errors against float64 beside torch's flash attention."""
    q, k, v = (tensor[-1:, -1:] for tensor in data[:3])
    rows = slice(max(0, layer.queries - 16), None)
    out = operator(*data[:3])[-1:, -1:, rows]
    wanted = attn_reference.attention(q[:, :, rows].cpu(), k.cpu(), v.cpu(), **layer.masks, contract=CONTRACT)
    demand_same_bytes({"the CPU model": [wanted], name: [out.cpu()]}, "the last rows of a head")
    scores = q[:, :, rows].double() @ k.double().mT / math.sqrt(layer.head_dim)
    if layer.masks["causal"]:
        key = torch.arange(layer.keys, device="cuda")
        before = key[rows, None] - key
        scores = scores.masked_fill((before < 0) | (before > (layer.keys if layer.window is None else layer.window)), -torch.inf)
    exact = torch.softmax(scores, -1) @ v.double()
    found: Row = {}
    outs = {"ours": out}
    if layer.window is None:
        outs["torch flash"] = _torch(q, k, v, kind=SDPBackend.FLASH_ATTENTION, **layer.masks)[:, :, rows]
    for label, tensor in outs.items():
        error = tensor.double() - exact
        found[label] = {"max": float(error.abs().max()), "rms": float(error.square().mean().sqrt())}
    return found


def forward_of(operator: Callable[..., Any], layer: Layer, data: tuple[Tensor, ...]) -> Call:
    """Forward without autograd; a decode step is a graph."""
    q, k, v, _ = data

    def forward() -> Any:
        with torch.no_grad():
            return operator(q, k, v)

    forward()
    if not layer.decode:
        return forward
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


def backward_of(operator: Callable[..., Any], data: tuple[Tensor, ...]) -> Call:
    """Backward over a kept graph. Raises RuntimeError where the operator has none."""
    leaves = [tensor.detach().requires_grad_() for tensor in data[:3]]
    out = operator(*leaves)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, data[3], retain_graph=True)

    backward()
    return backward


def run_case(name: str, layer: Layer, backends: list[str], peers: list[str], report: Report, rounds: int, flush: Tensor) -> None:
    data = layer.tensors()
    ready: dict[str, dict[str, Call]] = {}
    outputs: dict[str, list[Tensor]] = {}
    for contender, make in contenders(layer, backends).items():
        if contender not in (*backends, *peers):
            continue
        try:
            operator = make()
            if contender in backends:
                report.facts.setdefault("errors", {})[f"{name} {contender}"] = check(contender, operator, layer, data)
            ready[contender] = {"forward": forward_of(operator, layer, data)}
            if not layer.decode:
                ready[contender]["backward"] = backward_of(operator, data)
            if contender in backends:
                with torch.no_grad():
                    out = operator(*data[:3])
                outputs[contender] = [out, *(ready[contender]["backward"]() if not layer.decode else ())]
        except (ImportError, RuntimeError, TypeError, UnsupportedProblem) as error:  # what a peer lacks here
            if contender in backends:
                raise
            report.refuse(f"{contender} {name}", f"{type(error).__name__}: {error}".splitlines()[0][:200])
    demand_same_bytes(outputs, f"out and gradients of {name}")
    for direction in ("forward", "backward"):
        calls = {contender: found[direction] for contender, found in ready.items() if direction in found}
        for contender, samples in interleaved(calls, rounds, flush).items():
            row: Row = {"case": name, "contender": contender, "direction": direction, **durations(samples)}
            row["tflops"] = layer.flop(direction) / row["median_ms"] / 1e9
            note = f"{row['tflops']:7.1f} TFLOP/s"
            if layer.decode:
                row["terabytes_per_second"] = layer.cache_bytes / row["median_ms"] / 1e9
                note = f"{row['terabytes_per_second']:5.2f} TB/s"
            report.add(row, note)


def main() -> None:
    parser = measuring.options(__doc__, rounds=10)
    parser.add_argument("--cases", default=",".join(LAYERS), help="names, comma separated")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, comma separated; flex compiles for each case, which takes a while")
    options = parser.parse_args()
    peers = options.peers.split(",")
    device = measuring.cuda_device("sm90_gpu")
    method = "interleaved rounds, L2 flushed before each call, CUDA events, medians; bytes compared with the CPU model before timing"
    report = Report(options.output, method, options.seconds)
    backends = usable("attention", CONTRACT, report)
    flush = flush_buffer(device)
    for name in options.cases.split(","):
        if not report.has_time(name):
            continue
        with report.guarded(name):
            run_case(name, LAYERS[name], backends, peers, report, options.rounds, flush)
        for backend in backends:
            for peer in peers:
                report.compare(backend, peer)
        report.save()
        torch.cuda.empty_cache()
    report.finish(options.add)


if __name__ == "__main__":
    main()
