"""The default engine of a call: ``host`` for CPU tensors where it is compiled, else ``pytorch``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from attn_reference import pytorch
from attn_reference.backend import BACKEND

__all__ = ["attention", "attention_varlen", "joint_attention", "joint_attn_av_gemm", "joint_attn_qk_gemm", "joint_attn_softmax"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_HOST = importlib.import_module("attn_reference.host") if BACKEND.unavailable("cpu", "host") is None else None


def _by_device(definition: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """``definition``, or the operator of that name in ``attn_reference.host``, by the device of the first tensor."""

    if _HOST is None:
        return definition
    compiled: Callable[_Parameters, _Result] = getattr(_HOST, definition.__name__)

    @functools.wraps(definition)
    def operator(*arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        tensors = (value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor))
        first = next(tensors, None)
        return (compiled if first is not None and first.device.type == "cpu" else definition)(*arguments, **keywords)

    operator.__module__, operator.__qualname__ = __name__, definition.__name__  # where pickle finds it
    return operator


joint_attn_qk_gemm = _by_device(pytorch.joint_attn_qk_gemm)
joint_attn_softmax = _by_device(pytorch.joint_attn_softmax)
joint_attn_av_gemm = _by_device(pytorch.joint_attn_av_gemm)
joint_attention = _by_device(pytorch.joint_attention)
attention = _by_device(pytorch.attention)
attention_varlen = _by_device(pytorch.attention_varlen)
