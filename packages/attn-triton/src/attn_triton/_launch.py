"""The kernels of the engine ``triton``, bound in one object."""

from __future__ import annotations

from attn_triton import (
    _attention_backward_launch,
    _attention_launch,
    _products_launch,
    _qat_backward_launch,
    _qat_launch,
    _sm90_backward_launch,
    _sm90_launch,
    _softmax_launch,
)

__all__ = ["TritonKernels"]


class TritonKernels:
    """``attn_spec.torch.Kernels``. Inputs of any strides are taken; those whose order a kernel cannot read well are copied once."""

    softmax_forward = staticmethod(_softmax_launch.softmax_forward)
    softmax_backward = staticmethod(_softmax_launch.softmax_backward)
    softmax_v2_forward = staticmethod(_softmax_launch.softmax_v2_forward)
    softmax_v2_backward = staticmethod(_softmax_launch.softmax_v2_backward)
    qk_gemm_forward = staticmethod(_products_launch.qk_gemm_forward)
    qk_gemm_backward = staticmethod(_products_launch.qk_gemm_backward)
    av_gemm_forward = staticmethod(_products_launch.av_gemm_forward)
    av_gemm_backward = staticmethod(_products_launch.av_gemm_backward)
    attention_forward = staticmethod(_attention_launch.attention_forward)
    attention_backward = staticmethod(_attention_backward_launch.attention_backward)
    attention_sm90_forward = staticmethod(_sm90_launch.attention_forward)
    attention_sm90_backward = staticmethod(_sm90_backward_launch.attention_backward)
    qat_forward = staticmethod(_qat_launch.qat_forward)
    qat_backward = staticmethod(_qat_backward_launch.qat_backward)
