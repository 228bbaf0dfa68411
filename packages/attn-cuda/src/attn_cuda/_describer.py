"""What makes calls one kind, in compiled code where this build and torch have what that takes."""

from __future__ import annotations

import torch
from attn_spec.torch._operation import PLAIN
from attn_spec.torch._remembered import SPOILERS, Describer, python_describer

from attn_cuda._extension import extension

__all__ = ["describer"]


def describer() -> Describer:
    """One that reads tensors through torch's DLPack exchange table; the one of attn_spec without the compiled module or such a table."""
    module, exchange = extension(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if isinstance(module, str) or exchange is None:
        return python_describer()
    return Describer(*module.describer(exchange, tuple(PLAIN), torch.dtype, SPOILERS, torch.is_grad_enabled))
