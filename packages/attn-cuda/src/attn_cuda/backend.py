"""The ``attn.backends`` entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attn_spec import Capabilities, OperatorSupport, Problem
from attn_spec._sm90 import CONTRACT as SM90
from attn_spec.torch import Operators, TorchBackend

from attn_cuda._attention_launch import MAX_HEAD_DIM, AttentionKernels
from attn_cuda._describer import describer
from attn_cuda._extension import extension, unavailable
from attn_cuda._joint_launch import JointKernels
from attn_cuda._prepared import prepare
from attn_cuda._products_launch import ProductKernels
from attn_cuda._sm90_launch import Sm90Kernels, sm90_reasons
from attn_cuda._softmax_launch import SoftmaxKernels

__all__ = [
    "BACKEND",
    "attention",
    "attention_varlen",
    "joint_attention",
    "joint_attn_av_gemm",
    "joint_attn_qk_gemm",
    "joint_attn_softmax",
]

_ANY = {"causal", "window", "sinks", "return_lse", "gradient"}
_CAPABILITIES = Capabilities(
    devices=("cuda",),
    contracts=("ordered-v1", "ordered-v2", SM90),
    operators={
        "joint_attn_qk_gemm": OperatorSupport(frozenset({"gradient"})),
        "joint_attn_softmax": OperatorSupport(frozenset({"gradient", "key_padding_mask"})),
        "joint_attn_av_gemm": OperatorSupport(frozenset({"gradient"})),
        "joint_attention": OperatorSupport(frozenset({"gradient", "prompt_mask"}), max_head_dim=MAX_HEAD_DIM),
        "attention": OperatorSupport(
            frozenset({*_ANY, "key_padding_mask", "kv_lengths", "q_start", "k_start", "bias"}), max_head_dim=MAX_HEAD_DIM
        ),
        "attention_varlen": OperatorSupport(frozenset({*_ANY, "seqlens_q", "seqlens_k"}), max_head_dim=MAX_HEAD_DIM),
    },
)


class _CudaKernels(SoftmaxKernels, ProductKernels, AttentionKernels, Sm90Kernels, JointKernels):
    """Every kernel of the ``cuda`` engine."""

    prepare = staticmethod(prepare)
    describer = staticmethod(describer)


class CudaBackend(TorchBackend):
    """CUDA kernels of the ordered contracts, and of sm90-v1 on Hopper."""

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

    def reasons(self, problem: Problem, engine: str | None = None) -> tuple[str, ...]:
        """Every reason why ``problem`` is refused; contract sm90-v1 asks more of the head dim and the device than the others."""
        found = super().reasons(problem, engine)
        return found if problem.contract != SM90 else (*found, *sm90_reasons(problem))

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        self.engine(engine)
        return _FUNCTIONS

    def fingerprint(self, device: str, engine: str | None = None) -> str:
        module = extension()
        return "not built" if isinstance(module, str) else str(module.FINGERPRINT)


BACKEND = CudaBackend()
_OPERATORS = Operators(BACKEND, "cuda", "attn_cuda", _CudaKernels())
_FUNCTIONS = _OPERATORS.functions()
joint_attn_qk_gemm = _OPERATORS.joint_attn_qk_gemm
joint_attn_softmax = _OPERATORS.joint_attn_softmax
joint_attn_av_gemm = _OPERATORS.joint_attn_av_gemm
joint_attention = _OPERATORS.joint_attention
attention = _OPERATORS.attention
attention_varlen = _OPERATORS.attention_varlen
