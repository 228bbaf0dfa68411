"""The entry-point object: identity, capabilities and evaluation on numpy data under ``jit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from attn_spec import Backend, Call, Capabilities, Problem, UnsupportedProblem
from attn_spec._errors import BackendUnavailable
from attn_spec._operators import operator
from attn_spec._sm90 import CONTRACT as SM90

from attn_jax_rocm_sink._arrays import from_numpy, to_numpy
from attn_jax_rocm_sink._attention import NAME, attention, forward_fp32
from attn_jax_rocm_sink._engines import ENGINES

__all__ = ["BACKEND", "JaxBackend"]


class JaxBackend(Backend):
    """JAX over XLA FFI. Served only when asked for by name: it takes jax.Array, not torch.Tensor."""

    name: ClassVar[str] = NAME
    framework: ClassVar[str] = "jax"
    engines: ClassVar[tuple[str, ...]] = tuple(name for name, engine in ENGINES.items() if engine.exact)
    priority: ClassVar[Mapping[str, int]] = {}

    def capabilities(self, engine: str | None = None) -> Capabilities:
        return ENGINES[self.engine(engine)].capabilities

    def unavailable(self, device: str, engine: str | None = None) -> str | None:
        chosen = ENGINES[self.engine(engine)]
        if device not in chosen.capabilities.devices:
            return f"engine {chosen.name} runs on {', '.join(chosen.capabilities.devices)}, not on {device}"
        return chosen.unavailable()

    def reasons(self, problem: Problem, engine: str | None = None) -> tuple[str, ...]:
        """Every reason why ``problem`` is refused, by the engine and the state of this machine."""
        found = super().reasons(problem, engine)
        return found or (ENGINES[self.engine(engine)].sm90_reasons(problem) if problem.contract == SM90 else ())

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        chosen = self.engine(engine)
        return {"attention": partial(attention, engine=chosen), "attention.forward_fp32": partial(forward_fp32, engine=chosen)}

    def evaluate(self, call: Call, *, device: str = "cpu", engine: str | None = None) -> dict[str, np.ndarray]:
        """Run one call under ``jit``, gradients by ``jax.vjp`` inside the same jit."""
        spec = operator(call.op)
        function = self.operators(engine).get(call.op)
        if function is None:
            problem = call.problem(device)
            raise UnsupportedProblem(self.name, list(self.reasons(problem, engine)), problem)
        reason = self.unavailable(device, engine)
        if reason is not None:
            raise BackendUnavailable(self.name, reason)
        options = dict(call.options) | ({} if call.contract is None else {"contract": call.contract})
        call.problem(device)  # numpy data is checked as it is: JAX would narrow 64-bit arrays silently

        def outputs(arrays: dict[str, Any]) -> dict[str, Any]:
            result = function(**arrays, **options)
            return dict(zip(spec.outputs, result if isinstance(result, tuple) else (result,), strict=False))

        def run(arrays: dict[str, Any], cotangents: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            if not call.wrt:
                return outputs(arrays), {}
            wanted = {name: arrays[name] for name in call.wrt}
            found, pullback = jax.vjp(lambda moving: outputs({**arrays, **moving}), wanted)
            zeros = {name: jnp.zeros(value.shape, value.dtype) for name, value in found.items()}
            return found, pullback({**zeros, **cotangents})[0]

        arrays = {name: from_numpy(array) for name, array in call.arrays.items()}
        cotangents = {name: from_numpy(array) for name, array in (call.cotangents or {}).items()}
        if call.wrt and not cotangents:
            raise ValueError(f"{call.op}: gradients need a cotangent for one of {', '.join(spec.outputs)}")
        with jax.default_device(jax.local_devices(backend=device)[0]):
            found, gradients = jax.jit(run)(arrays, cotangents)
        return {name: to_numpy(value) for name, value in found.items()} | {f"d{name}": to_numpy(value) for name, value in gradients.items()}

    def fingerprint(self, device: str, engine: str | None = None) -> str:
        reason = self.unavailable(device, engine)
        if reason is not None:
            raise BackendUnavailable(self.name, reason)
        return ENGINES[self.engine(engine)].fingerprint()


BACKEND = JaxBackend()
