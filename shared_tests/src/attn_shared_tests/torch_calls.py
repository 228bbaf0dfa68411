"""Calls of torch functions as torch code makes them: data as tensors, results and gradients as tensors, one call of every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec._operators import operator
from attn_spec.testing.asserts import assert_bytes
from attn_spec.testing.runner import Refused, Runner

from attn_shared_tests import problems

Operator = Callable[..., Any]
Results = dict[str, Any]
"""Tensors by name: outputs, and gradients under "d" + name."""

on_gpu = pytest.mark.attn_device("cuda", "rocm")
"""Marks what only a GPU has: streams, graphs, device memory."""


def every_operator(seed: int = 0) -> dict[str, Call]:
    """A small call of every operator with every gradient. Another ``seed`` has other masks, lengths and offsets too, in the same shapes."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"seed": seed, "heads": 4, "kv_heads": 2, "head_dim": 8}
    q, k, scores, v = (problems.normal(rng, shape) for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 4, 5, 7), (2, 2, 7, 8)))
    lengths, text_lengths, kv_lengths, segments = ((6, 2), (3, 1), (3, 7), (1, 4, 2)) if seed else ((3, 7), (2, 3), (6, 4), (3, 0, 4))
    mask = problems.mask_of(lengths, 7)
    qkv = problems.QKV
    return {
        "qk_gemm": Call("joint_attn_qk_gemm", {"q": q, "k": k}, {"scale": 0.3}, {"scores": scores}, ("q", "k")),
        "softmax": problems.softmax((2, 3, 7), seed=seed, gradient=True, dtype="bfloat16"),
        "masked softmax": problems.softmax((2, 3, 7), seed=seed, gradient=True, key_padding_mask=mask),
        "softmax v2": replace(problems.softmax((2, 3, 7), seed=seed, gradient=True), contract="ordered-v2"),
        "av_gemm": Call("joint_attn_av_gemm", {"probs": scores, "v": v}, {}, {"out": q}, ("probs", "v")),
        "joint": problems.joint(seed=seed, text=3, image=4, gradient=True, prompt_mask=problems.mask_of(text_lengths, 3)),
        "attention": problems.attention(**options, wrt=qkv, dtype="bfloat16"),
        "biased": problems.attention(**options, with_sinks=True, bias_shape=(1, 4, 5, 1), wrt=(*qkv, "sinks", "bias")),
        "masked": problems.attention(
            **options, key_padding_mask=mask, window=(3, 1), kv_lengths=np.array(kv_lengths), wrt=qkv, dtype="float16"
        ),
        "decode": problems.attention(**options, queries=1, keys=600, wrt=qkv, dtype="bfloat16"),
        "tensor cores": replace(
            problems.attention(**{**options, "head_dim": 64}, with_sinks=True, wrt=(*qkv, "sinks"), dtype="bfloat16"), contract="sm90-v1"
        ),
        "packed": problems.varlen(segments, seed=seed, trailing=1, with_sinks=True, wrt=(*qkv, "sinks")),
    }


EVERY = every_operator()


def torch_device(backend: Runner) -> str:
    return "cuda" if backend.device == "rocm" else backend.device


def with_function(backend: Runner, call: Call, check: Callable[..., None], *arguments: Any) -> None:
    """``check(operator, device, ...)`` with the public function of ``call``; a refusal of that call ends it."""
    _with_function(backend, call, check, arguments, ())


def with_torch(backend: Runner, call: Call, check: Callable[..., None], *arguments: Any) -> None:
    """The same for what torch adds around the kernels. That is one code for all engines: those that are too slow for layers of models show
    it on the operators of a row or a product, not on attention."""
    fused = call.op in ("attention", "attention_varlen", "joint_attention")
    _with_function(backend, call, check, arguments, ("a readable definition or an interpreter",) if fused and not quick(backend) else ())


def with_kernels(backend: Runner, call: Call, check: Callable[..., None], *arguments: Any) -> None:
    """The same for what kernels promise and readable definitions do not: no wait for the device, capture, seconds for large data."""
    _with_function(backend, call, check, arguments, () if quick(backend) else ("a readable definition or an interpreter",))


def quick(backend: Runner) -> bool:
    return backend.backend.runs_layers(backend.device, backend.engine)


def _with_function(backend: Runner, call: Call, check: Callable[..., None], arguments: tuple[Any, ...], reasons: tuple[str, ...]) -> None:
    def checked(evaluate: Any) -> None:
        problem = call.problem(backend.device)
        if found := reasons or backend.reasons(problem):
            raise Refused(problem, found)
        backend.tally.ran += 1
        check(backend.backend.operators(backend.engine)[call.op], torch_device(backend), *arguments)

    backend.run(checked)


def same(left: Any, right: Any, what: str) -> None:
    from attn_spec.torch import to_numpy

    assert_bytes(to_numpy(left), to_numpy(right), what)


def same_results(found: Results, wanted: Results, what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name in wanted:
        same(found[name], wanted[name], f"{what}: {name}")


class Data:
    """The tensors of a call on a device: ``inputs`` by argument name (those of ``call.wrt`` ask for gradients) and ``cotangents``."""

    def __init__(self, call: Call, device: str) -> None:
        from attn_spec.torch import from_numpy

        self.call = call
        self.inputs = {name: from_numpy(array, device).requires_grad_(name in call.wrt) for name, array in call.arrays.items()}
        self.cotangents = {name: from_numpy(array, device) for name, array in (call.cotangents or {}).items()}

    def outputs(self, function: Operator) -> Results:
        """Outputs by name, with their graph."""
        return outputs_of(function, self.call, self.inputs)

    def gradients(self, outputs: Results) -> Results:
        import torch

        if not self.call.wrt:
            return {}
        wanted, given = [self.inputs[name] for name in self.call.wrt], [outputs[name] for name in self.cotangents]
        gradients = torch.autograd.grad(given, wanted, list(self.cotangents.values()))
        return {f"d{name}": gradient for name, gradient in zip(self.call.wrt, gradients, strict=True)}

    def accumulated(self, outputs: Results) -> Results:
        """The same through ``Tensor.grad``, as a training loop has them; each input is without one before."""
        import torch

        torch.autograd.backward([outputs[name] for name in self.cotangents], list(self.cotangents.values()))
        return {f"d{name}": self.inputs[name].grad for name in self.call.wrt}

    def results(self, function: Operator) -> Results:
        """Outputs and gradients, without a graph."""
        outputs = self.outputs(function)
        return {name: output.detach() for name, output in outputs.items()} | self.gradients(outputs)

    def copy_from(self, other: Data) -> None:
        """Take the values of another call of the same shapes, in place."""
        import torch

        with torch.no_grad():
            for mine, theirs in ((self.inputs, other.inputs), (self.cotangents, other.cotangents)):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name])


def outputs_of(function: Operator, call: Call, inputs: Mapping[str, Any]) -> Results:
    """``function`` with the options and contract of ``call`` on other inputs."""
    spec = operator(call.op)
    keywords = {name: tensor for name, tensor in inputs.items() if name not in spec.inputs}
    if call.contract is not None:
        keywords["contract"] = call.contract
    found = function(*(inputs[name] for name in spec.inputs), **keywords, **call.options)
    return dict(zip(spec.outputs, found if isinstance(found, tuple) else (found,), strict=False))


def without_gradients(call: Call) -> Call:
    return replace(call, wrt=(), cotangents=None)


def tensors(
    device: str, dtype: str = "float32", *, shape: tuple[int, ...] = (2, 4, 6, 8), kv_heads: int = 2, requires_grad: bool = True
) -> list[Any]:
    """q, k, v."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = (shape, (shape[0], kv_heads, *shape[2:]), (shape[0], kv_heads, *shape[2:]))
    made = [torch.randn(size, generator=generator).to(device=device, dtype=getattr(torch, dtype)) for size in shapes]
    return [tensor.requires_grad_(requires_grad) for tensor in made]
