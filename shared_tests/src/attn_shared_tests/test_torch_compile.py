"""torch.library's own checks of the registrations, and compiled graphs: one graph, changing shapes, the bytes of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.runner import Runner

from attn_shared_tests import problems
from attn_shared_tests.torch_calls import EVERY, Data, Operator, outputs_of, quick, same, same_results, with_torch

pytestmark = pytest.mark.attn_framework("torch")
QKV = problems.QKV


def attention_of(size: int) -> Call:
    """With every keyword that has a tensor; the loss reads LSE too."""
    queries = size // 2 + 1
    return problems.attention(
        queries=queries,
        keys=size,
        with_sinks=True,
        bias_shape=(1, 4, queries, 1),
        key_padding_mask=problems.mask_of((size // 2, size), size),
        kv_lengths=np.array([size - 1, size]),
        q_start=np.array([1, 2]),
        window=(9, None),
        wrt=(*QKV, "sinks", "bias"),
    )


def products_of(size: int) -> Call:
    data = problems.attention(queries=size, keys=size + 2)
    scores = problems.normal(np.random.default_rng(1), (2, 4, size, size + 2))
    return Call("joint_attn_qk_gemm", {name: data.arrays[name] for name in "qk"}, {}, {"scores": scores}, ("q", "k"))


SIZED: dict[str, Callable[[int], Call]] = {
    "softmax": lambda size: problems.softmax(
        (2, 3, size), gradient=True, dtype="bfloat16", key_padding_mask=problems.mask_of((1, size), size)
    ),
    "qk_gemm": products_of,
    "joint": lambda size: problems.joint(
        text=size // 2, image=size, gradient=True, prompt_mask=problems.mask_of((1, size // 2), size // 2)
    ),
    "attention": attention_of,
    "packed": lambda size: problems.varlen((size // 2, 0, size), trailing=1, with_sinks=True, wrt=(*QKV, "sinks")),
}
"""Calls by size."""


def check_opcheck(function: Operator, device: str, call: Call, namespace: str) -> None:
    """Schema, fake kernel, autograd registration and traced graph hold under torch's own checks, for both directions."""
    import torch

    operators = getattr(torch.ops, namespace)
    for name, arguments in registered_calls(Data(call, device)).items():
        torch.library.opcheck(getattr(operators, name).default, arguments)


def registered_calls(data: Data) -> dict[str, tuple[Any, ...]]:
    """Arguments of the registered operators for a call, forward and backward."""
    import torch

    call, inputs = data.call, data.inputs
    leaf = {name: tensor.detach() for name, tensor in inputs.items()}
    cotangent = next(iter(data.cotangents.values()))
    if call.op == "joint_attn_softmax":
        scores, mask = inputs["scores"], inputs.get("key_padding_mask")
        rows = scores.detach().float().amax(dim=-1), torch.ones(scores.shape[:-1], device=scores.device)
        name = call.op if call.contract is None else f"{call.op}_v2"
        return {name: (scores, mask, scores.dtype), f"{name}_backward": (cotangent, leaf["scores"], mask, *rows)}
    if call.op == "joint_attn_qk_gemm":
        return {
            call.op: (inputs["q"], inputs["k"], 0.3, torch.float32),
            f"{call.op}_backward": (cotangent, leaf["q"], leaf["k"], 0.3, True, False),
        }
    if call.op == "joint_attn_av_gemm":
        return {
            call.op: (inputs["probs"], inputs["v"], torch.float32),
            f"{call.op}_backward": (cotangent, leaf["probs"], leaf["v"], False, True),
        }
    names = ("kv_lengths", "q_start", "k_start", "sinks", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k")

    def arguments(tensors: dict[str, Any]) -> tuple[Any, ...]:
        integers = {name: tensor.long() if name not in ("sinks", "bias") else tensor for name, tensor in tensors.items() if name in names}
        given = (tensors["q"], tensors["k"], tensors["v"], None, tensors.get("key_padding_mask"), *map(integers.get, names), None)
        return (*given, call.options.get("causal", True), 0.25, 3, -1, 0.0)

    states = data.cotangents["lse"], torch.zeros_like(data.cotangents["lse"]), torch.ones_like(data.cotangents["lse"])
    needs = tuple(name in call.wrt for name in (*QKV, "sinks", "bias"))
    return {
        "attention": (*arguments(inputs), data.cotangents["out"].dtype),
        "attention_backward": (data.cotangents["out"], *states, *arguments(leaf), *needs),
    }


def check_compile(function: Operator, device: str, sized: Callable[[int], Call], compiler: str = "aot_eager") -> None:
    """One graph under torch.compile with changing shapes, bytes as in eager mode."""
    import torch

    names, first = list(sized(40).arrays), sized(40)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *inputs: tuple(outputs_of(function, first, dict(zip(names, inputs, strict=True))).values()),
        fullgraph=True,
        dynamic=True,
        backend=compiler,
    )
    for size in (40, 17, 4):
        call = sized(size)
        eager, graph = Data(call, device), Data(call, device)
        outputs = dict(zip(eager.outputs(function), compiled(*graph.inputs.values()), strict=True))
        found = {name: output.detach() for name, output in outputs.items()} | graph.gradients(outputs)
        same_results(found, eager.results(function), f"size {size}")


def check_inductor(function: Operator, device: str, sized: Callable[[int], Call]) -> None:
    """Code of Inductor around the operator, doubling before and halving behind, which rounds nothing: the bytes of eager mode."""

    def between(*inputs: Any, **keywords: Any) -> Any:
        found = function(*(tensor * 2 for tensor in inputs), **keywords)
        return tuple(tensor / 2 for tensor in found) if isinstance(found, tuple) else found / 2

    check_compile(between, device, sized, "inductor")


def check_compiled_empty(attention: Operator, device: str) -> None:
    """A graph made for full batches takes empty ones, and queries or keys that are none."""
    import torch

    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, return_lse=True), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, queries, keys in ((3, 5, 7), (0, 5, 7), (3, 0, 7), (3, 5, 0)):
        shapes = ((batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8))
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
        results = []
        for function in (compiled, lambda q, k, v: attention(q, k, v, return_lse=True)):
            out, lse = function(*leaves)
            results.append((out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        for name, found, wanted in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            same(found, wanted, f"{name} of {shapes}")


@pytest.mark.parametrize("name", ("masked softmax", "softmax v2", "qk_gemm", "av_gemm", "biased", "packed"))
def test_registration_passes_opcheck(backend: Runner, name: str) -> None:
    call = EVERY[name]
    with_torch(backend, call, check_opcheck, call, namespace_of(backend))


def namespace_of(backend: Runner) -> str:
    """Where the engine's operators are registered: under the backend's name, or one for each engine where there are several."""
    several = len(backend.backend.engines) > 1
    return f"{backend.backend.name}_{backend.engine}" if several else backend.backend.name


@pytest.mark.parametrize("name", SIZED)
def test_compiled_graphs_keep_the_bytes(backend: Runner, name: str) -> None:
    with_torch(backend, SIZED[name](40), check_compile, SIZED[name])


def test_code_of_inductor_keeps_the_bytes(backend: Runner) -> None:
    """On a CPU it needs a C++ compiler, as building this project does."""
    sized = SIZED["attention" if quick(backend) else "softmax"]
    with_torch(backend, sized(40), check_inductor, sized)


def test_compiled_graphs_take_empty_batches(backend: Runner) -> None:
    with_torch(backend, EVERY["attention"], check_compiled_empty)
