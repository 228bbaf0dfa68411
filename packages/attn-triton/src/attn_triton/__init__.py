"""attn-triton: the attn operators as Triton kernels, with the bits of the contract that a call names, ordered-v1 by default.

Importing this package starts no GPU driver. ``TRITON_INTERPRET=1`` in the environment of the first import runs the kernels on the CPU.
"""

from attn_triton.backend import BACKEND

__all__ = [
    "__version__",
    "attention",
    "attention_varlen",
    "joint_attention",
    "joint_attn_av_gemm",
    "joint_attn_qk_gemm",
    "joint_attn_softmax",
    "qat_attention",
    "qat_attention_varlen",
]

__version__ = "0.1.0"

_FUNCTIONS = BACKEND.operators()
joint_attn_qk_gemm = _FUNCTIONS["joint_attn_qk_gemm"]
joint_attn_softmax = _FUNCTIONS["joint_attn_softmax"]
joint_attn_av_gemm = _FUNCTIONS["joint_attn_av_gemm"]
joint_attention = _FUNCTIONS["joint_attention"]
attention = _FUNCTIONS["attention"]
attention_varlen = _FUNCTIONS["attention_varlen"]
qat_attention = _FUNCTIONS["qat_attention"]
qat_attention_varlen = _FUNCTIONS["qat_attention_varlen"]
