"""The ``attn.backends`` entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attn_spec import Capabilities, OperatorSupport
from attn_spec.torch import Operators, TorchBackend

from attn_cuda._extension import extension, unavailable
from attn_cuda._launch import CudaKernels

__all__ = ["BACKEND", "joint_attn_softmax"]

_CAPABILITIES = Capabilities(
    devices=("cuda",),
    operators={"joint_attn_softmax": OperatorSupport(features=frozenset({"gradient", "key_padding_mask"}))},
)


class CudaBackend(TorchBackend):
    """CUDA kernels of contract ordered-v1."""

    name: ClassVar[str] = "attn_cuda"
    engines: ClassVar[tuple[str, ...]] = ("cuda",)
    priority: ClassVar[Mapping[str, int]] = {"cuda": 0}

    def capabilities(self, engine: str | None = None) -> Capabilities:
        self.engine(engine)
        return _CAPABILITIES

    def unavailable(self, device: str, engine: str | None = None) -> str | None:
        self.engine(engine)
        reason: str | None = unavailable(device)
        return reason

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        self.engine(engine)
        return _FUNCTIONS

    def fingerprint(self, device: str, engine: str | None = None) -> str:
        module = extension()
        return "not built" if isinstance(module, str) else str(module.FINGERPRINT)


BACKEND = CudaBackend()
_OPERATORS = Operators(BACKEND, "cuda", "attn_cuda", CudaKernels())  # type: ignore[arg-type]
_FUNCTIONS = _OPERATORS.functions()
joint_attn_softmax = _OPERATORS.joint_attn_softmax
