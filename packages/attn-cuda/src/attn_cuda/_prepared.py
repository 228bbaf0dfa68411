"""Calls that are prepared once a kind: what Python does for one is looking it up, allocating the results and the launch."""

from __future__ import annotations

from typing import Any

from attn_cuda._arrays import Launch
from attn_cuda._attention_launch import prepare_attention
from attn_cuda._products_launch import over_keys, over_width
from attn_cuda._sm90_launch import prepare_sm90
from attn_cuda._softmax_launch import prepare_softmax

__all__ = ["prepare"]

_SOFTMAX = {"joint_attn_softmax": "softmax_forward", "joint_attn_softmax_v2": "softmax_v2_forward"}


def prepare(operation: str, arguments: tuple[Any, ...], wanted: int) -> Launch | None:
    """``attn_spec.torch.Kernels.prepare``; None for calls that go the long way."""
    if operation in _SOFTMAX:
        return prepare_softmax(_SOFTMAX[operation], arguments)
    if operation == "joint_attn_qk_gemm":
        return over_width(*arguments)
    if operation == "joint_attn_av_gemm":
        probs, v, out_dtype = arguments
        return over_keys(probs, v, 1.0, out_dtype)
    if operation == "attention_sm90":
        return prepare_sm90(arguments, wanted)
    return prepare_attention(arguments, wanted) if operation == "attention" else None
