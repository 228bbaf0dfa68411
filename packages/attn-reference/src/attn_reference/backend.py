"""The entry-point object ``BACKEND``: engines ``host`` (compiled, CPU) and ``pytorch`` (the readable definition, any device)."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from attn_spec import Capabilities, OperatorSupport
from attn_spec.torch import TorchBackend

from attn_reference import _host_kernels

__all__ = ["BACKEND"]

_OPERATORS = {
    "joint_attn_qk_gemm": OperatorSupport(frozenset({"gradient"})),
    "joint_attn_softmax": OperatorSupport(frozenset({"key_padding_mask", "gradient"})),
    "joint_attn_av_gemm": OperatorSupport(frozenset({"gradient"})),
    "joint_attention": OperatorSupport(frozenset({"prompt_mask", "gradient"})),
    "attention": OperatorSupport(
        frozenset(
            {
                "causal",
                "window",
                "key_padding_mask",
                "kv_lengths",
                "q_start",
                "k_start",
                "sinks",
                "bias",
                "dropout",
                "return_lse",
                "gradient",
            }
        )
    ),
    "attention_varlen": OperatorSupport(
        frozenset({"causal", "window", "seqlens_q", "seqlens_k", "sinks", "dropout", "return_lse", "gradient"})
    ),
}
_CONTRACTS = ("ordered-v1", "ordered-v2", "sm90-v1")
_PRODUCTION = {"attn": OperatorSupport(frozenset({"causal", "gradient"}))}
_QAT_FEATURES = frozenset({"causal", "sinks", "return_lse", "gradient"})
_QAT = {
    "qat_attention": OperatorSupport(_QAT_FEATURES | {"key_padding_mask"}),
    "qat_attention_varlen": OperatorSupport(_QAT_FEATURES | {"seqlens_q", "seqlens_k"}),
}
_QAT_CONTRACTS = ("nvfp4-ordered-v1", "nvfp4-sm90-v1")


class _Reference(TorchBackend):
    """The reference: one set of bits, two implementations."""

    name: ClassVar[str] = "attn_reference"
    engines: ClassVar[tuple[str, ...]] = ("host", "pytorch")
    priority: ClassVar[Mapping[str, int]] = {"cpu": 0, "rocm": 1, "cuda": 2}

    def capabilities(self, engine: str | None = None) -> Capabilities:
        if self.engine(engine) == "host":
            return Capabilities(devices=("cpu",), operators=_OPERATORS, contracts=_CONTRACTS)
        operators = {**_OPERATORS, **_QAT, **_PRODUCTION}
        return Capabilities(devices=("cpu", "cuda", "rocm"), operators=operators, contracts=(*_CONTRACTS, *_QAT_CONTRACTS))

    def unavailable(self, device: str, engine: str | None = None) -> str | None:
        if device not in self.capabilities(engine).devices:
            return f"the {self.engine(engine)} engine does not run on {device}"
        if self.engine(engine) == "host":
            return _host_kernels.unavailable()
        if device == "cpu":
            return None
        built = "rocm" if torch.version.hip is not None else "cuda" if torch.version.cuda is not None else "cpu"
        if device != built:
            return f"this torch ({torch.__version__}) is built for {built}"
        return None if torch.cuda.is_available() else f"torch sees no {device} device"

    def runs_layers(self, device: str, engine: str | None = None) -> bool:
        return self.engine(engine) == "host"

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        functions: Mapping[str, Callable[..., Any]] = importlib.import_module(f"attn_reference.{self.engine(engine)}").FUNCTIONS
        return functions

    def fingerprint(self, device: str, engine: str | None = None) -> str:
        if self.engine(engine) == "host":
            return _host_kernels.fingerprint()
        digest = hashlib.sha256(f"torch {torch.__version__} {device}".encode())
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return digest.hexdigest()


BACKEND = _Reference()
