"""Backend base for torch packages: operators by engine and evaluation on numpy data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from attn_spec._backend import Backend, Call
from attn_spec._errors import UnsupportedProblem
from attn_spec._operators import operator
from attn_spec.torch._arrays import from_numpy, to_numpy

__all__ = ["TorchBackend"]


class TorchBackend(Backend):
    """A backend whose operators are torch functions. ``evaluate`` calls the public function and torch.autograd, as a user would."""

    framework: ClassVar[str] = "torch"

    def evaluate(self, call: Call, *, device: str = "cpu", engine: str | None = None) -> dict[str, np.ndarray]:
        spec = operator(call.op)
        torch_device = "cuda" if device == "rocm" else device
        tensors = {name: from_numpy(array, torch_device) for name, array in call.arrays.items()}
        for name in call.wrt:
            tensors[name].requires_grad_()
        options = dict(call.options)
        if call.contract is not None:
            options["contract"] = call.contract
        if isinstance(options.get("out_dtype"), str):
            options["out_dtype"] = getattr(torch, options["out_dtype"])
        functions = self.operators(engine)
        if call.op not in functions:
            problem = call.problem(device)
            raise UnsupportedProblem(self.name, self.reasons(problem, engine), problem)
        positional = [tensors.pop(name) for name in spec.inputs]
        result = functions[call.op](*positional, **tensors, **options)
        results = result if isinstance(result, tuple) else (result,)
        outputs = dict(zip(spec.outputs, results, strict=False))
        found = {name: to_numpy(tensor) for name, tensor in outputs.items()}
        if call.wrt:
            found.update(_gradients(call, outputs, {**dict(zip(spec.inputs, positional, strict=True)), **tensors}, torch_device))
        return found

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        raise NotImplementedError


def _gradients(call: Call, outputs: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], device: str) -> dict[str, np.ndarray]:
    cotangents = call.cotangents or {}
    pairs = [(outputs[name], from_numpy(array, device)) for name, array in cotangents.items()]
    if not pairs:
        raise ValueError(f"{call.op}: gradients need a cotangent for one of {', '.join(outputs)}")
    gradients = torch.autograd.grad([out for out, _ in pairs], [tensors[name] for name in call.wrt], [cotangent for _, cotangent in pairs])
    return {f"d{name}": to_numpy(gradient) for name, gradient in zip(call.wrt, gradients, strict=True)}
