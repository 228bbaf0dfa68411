"""The operators by the compiled host kernels: the bits of ``attn_reference.pytorch``, fast, on the CPU."""

from __future__ import annotations

from attn_spec._errors import BackendUnavailable
from attn_spec.torch import Operators

from attn_reference._host_kernels import KERNELS, unavailable
from attn_reference.backend import BACKEND

__all__ = ["attention", "attention_varlen", "joint_attention", "joint_attn_av_gemm", "joint_attn_qk_gemm", "joint_attn_softmax"]

_reason = unavailable()
if _reason is not None:
    raise BackendUnavailable("attn_reference.host", _reason)

FUNCTIONS = Operators(BACKEND, "host", "attn_reference_host", KERNELS).functions()

joint_attn_qk_gemm = FUNCTIONS["joint_attn_qk_gemm"]
joint_attn_softmax = FUNCTIONS["joint_attn_softmax"]
joint_attn_av_gemm = FUNCTIONS["joint_attn_av_gemm"]
joint_attention = FUNCTIONS["joint_attention"]
attention = FUNCTIONS["attention"]
attention_varlen = FUNCTIONS["attention_varlen"]
