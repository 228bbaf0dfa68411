"""The backend object: devices, operators, availability and the fingerprint of the kernels that run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy
import torch
import triton
from attn_spec import Capabilities, OperatorSupport, Problem
from attn_spec import _sm90 as sm90
from attn_spec.torch import Kernels, Operators, TorchBackend

from attn_triton import (
    _attention_backward_launch,
    _launch,
    _pairs_launch,
    _products_launch,
    _qat_configuration,
    _sm90_configuration,
    _softmax_launch,
)
from attn_triton._problem import MAX_HEAD_DIM
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["BACKEND", "TritonBackend"]

_OLDEST_CAPABILITY = (8, 0)
_LAUNCHES = (_softmax_launch, _products_launch, _pairs_launch, _attention_backward_launch)
_ANY = frozenset({"causal", "window", "sinks", "return_lse", "gradient"})
_QAT = _ANY - {"window"}
_TENSOR_CORES = (sm90.CONTRACT, "nvfp4-sm90-v1")
_CAPABILITIES = Capabilities(
    devices=("cuda", "rocm", "cpu"),
    contracts=("ordered-v1", "ordered-v2", "nvfp4-ordered-v1", *_TENSOR_CORES),
    operators={
        "joint_attn_qk_gemm": OperatorSupport(frozenset({"gradient"})),
        "joint_attn_softmax": OperatorSupport(frozenset({"gradient", "key_padding_mask"})),
        "joint_attn_av_gemm": OperatorSupport(frozenset({"gradient"})),
        "joint_attention": OperatorSupport(frozenset({"gradient", "prompt_mask"}), max_head_dim=MAX_HEAD_DIM),
        "attention": OperatorSupport(_ANY | {"key_padding_mask", "kv_lengths", "q_start", "k_start", "bias"}, max_head_dim=MAX_HEAD_DIM),
        "attention_varlen": OperatorSupport(_ANY | {"seqlens_q", "seqlens_k"}, max_head_dim=MAX_HEAD_DIM),
        "qat_attention": OperatorSupport(_QAT | {"key_padding_mask"}),
        "qat_attention_varlen": OperatorSupport(_QAT | {"seqlens_q", "seqlens_k"}),
    },
)


class TritonBackend(TorchBackend):
    """Kernels in Triton. NVIDIA GPUs from compute capability 8.0, AMD GPUs, and CPU tensors under Triton's interpreter; the contracts of
    tensor cores on compute capability 9.0 alone."""

    name: ClassVar[str] = "attn_triton"
    engines: ClassVar[tuple[str, ...]] = ("triton",)
    priority: ClassVar[Mapping[str, int]] = {"cuda": 1, "rocm": 0}

    def capabilities(self, engine: str | None = None) -> Capabilities:
        self.engine(engine)
        return _CAPABILITIES

    def unavailable(self, device: str, engine: str | None = None) -> str | None:
        self.engine(engine)
        reason: str | None = _state(device)
        return reason

    def reasons(self, problem: Problem, engine: str | None = None) -> tuple[str, ...]:
        """Every reason why ``problem`` is refused; the contracts of tensor cores ask more of the head dim and the device."""
        found = super().reasons(problem, engine)
        return found if problem.contract not in _TENSOR_CORES else (*found, *_tensor_core_reasons(problem))

    def runs_layers(self, device: str, engine: str | None = None) -> bool:
        return device != "cpu"

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        self.engine(engine)
        return self._functions

    @cached_property
    def _functions(self) -> Mapping[str, Callable[..., Any]]:
        return Operators(self, "triton", self.name, cast(Kernels, _launch.TritonKernels())).functions()

    def fingerprint(self, device: str, engine: str | None = None) -> str:
        """sha256 over the package's sources, the version of Triton, the target and the launch options."""
        self.engine(engine)
        digest = hashlib.sha256()
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        configs = [repr(part.CONFIGS.get(device)) for part in _LAUNCHES]
        configs += map(repr, (_sm90_configuration.CONFIGS, _qat_configuration.FORWARD, _qat_configuration.BACKWARD))
        digest.update("\0".join((triton.__version__, _target(device), *configs)).encode())
        return f"sha256:{digest.hexdigest()}"


def _tensor_core_reasons(problem: Problem) -> tuple[str, ...]:
    """Why the kernels of a contract of tensor cores do not run ``problem``."""
    found = []
    if (
        problem.contract == sm90.CONTRACT
        and problem.head_dim == problem.value_dim
        and problem.head_dim not in _sm90_configuration.HEAD_DIMS
    ):
        widths = ", ".join(map(str, _sm90_configuration.HEAD_DIMS))
        found.append(f"head_dim={problem.head_dim} with contract {problem.contract} (supported: {widths}; others: ordered-v1)")
    device = _tensor_core_device(problem.device, problem.contract)
    return tuple(found) if device is None else (*found, device)


@torch.compiler.assume_constant_result
def _tensor_core_device(device: str, contract: str) -> str | None:
    """Why a contract of tensor cores does not run on ``device``, or None."""
    needs = f"contract {contract} needs an NVIDIA GPU of compute capability 9.0; attn_reference has its bits on the CPU"
    if device != "cuda":
        return f"device {device} ({needs})"
    if INTERPRETED:
        return f"Triton's interpreter ({needs})"
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_capability()
    return None if found[0] == 9 else f"compute capability {'.'.join(map(str, found))} ({needs})"


@torch.compiler.assume_constant_result
def _state(device: str) -> str | None:
    """Why the kernels cannot run on ``device``; a constant of the process, so that compiled graphs do not trace into the driver."""
    return _no_interpreter() if device == "cpu" else _no_gpu(device)


def _no_interpreter() -> str | None:
    if not INTERPRETED:
        return "CPU tensors run only under Triton's interpreter; set TRITON_INTERPRET=1 before the first import of attn_triton"
    if _version(triton.__version__) < (3, 7) and _version(numpy.__version__) >= (2, 4):
        return f"Triton {triton.__version__} cannot interpret loops under numpy {numpy.__version__}; use numpy < 2.4 or triton >= 3.7.1"
    return None


@cache
def _no_gpu(device: str) -> str | None:
    built, wanted = ("rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"), device
    if built != wanted:
        return f"PyTorch {torch.__version__} is built for {built}, not for {wanted}"
    if not torch.cuda.is_available():
        return f"no usable {device} device (torch.cuda.is_available() is False)"
    if INTERPRETED:
        return None
    if device == "cuda" and torch.cuda.get_device_capability() < _OLDEST_CAPABILITY:
        found, oldest = (".".join(map(str, pair)) for pair in (torch.cuda.get_device_capability(), _OLDEST_CAPABILITY))
        return f"compute capability {found} (supported: {oldest} and newer)"
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # the driver may lack its library, a C compiler or a writable cache; each is a reason
        return f"Triton's driver failed to start: {type(error).__name__}: {error}"
    return None


def _target(device: str) -> str:
    if INTERPRETED or device == "cpu":
        return f"interpreter, numpy {numpy.__version__}"
    reason = _no_gpu(device)
    return f"none: {reason}" if reason else str(triton.runtime.driver.active.get_current_target())


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


BACKEND = TritonBackend()
