"""The kernels of the PyTorch engine: the readable definition, guarded against the caller's floating-point mode."""

from __future__ import annotations

from attn_reference import _attention, _products, _qat_attention, _sm90_attention, _softmax, _softmax_v2
from attn_reference._ieee import keeps_subnormals

__all__ = ["KERNELS", "PyTorchKernels"]


class PyTorchKernels:
    """``attn_spec.torch.Kernels`` by plain torch operations, on any device."""

    softmax_forward = staticmethod(keeps_subnormals(_softmax.softmax_forward))
    softmax_backward = staticmethod(keeps_subnormals(_softmax.softmax_backward))
    softmax_v2_forward = staticmethod(keeps_subnormals(_softmax_v2.softmax_forward))
    softmax_v2_backward = staticmethod(keeps_subnormals(_softmax_v2.softmax_backward))
    qk_gemm_forward = staticmethod(keeps_subnormals(_products.qk_gemm_forward))
    qk_gemm_backward = staticmethod(keeps_subnormals(_products.qk_gemm_backward))
    av_gemm_forward = staticmethod(keeps_subnormals(_products.av_gemm_forward))
    av_gemm_backward = staticmethod(keeps_subnormals(_products.av_gemm_backward))
    attention_forward = staticmethod(keeps_subnormals(_attention.attention_forward))
    attention_backward = staticmethod(keeps_subnormals(_attention.attention_backward))
    attention_sm90_forward = staticmethod(keeps_subnormals(_sm90_attention.attention_forward))
    attention_sm90_states = staticmethod(keeps_subnormals(_sm90_attention.attention_states))
    attention_sm90_backward = staticmethod(keeps_subnormals(_sm90_attention.attention_backward))
    qat_forward = staticmethod(keeps_subnormals(_qat_attention.qat_forward))
    qat_backward = staticmethod(keeps_subnormals(_qat_attention.qat_backward))


KERNELS = PyTorchKernels()
