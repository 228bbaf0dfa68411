"""The operators by the readable PyTorch definition, on any device."""

from __future__ import annotations

import torch
from attn_spec.torch import Operators
from torch import Tensor

from attn_reference._pytorch_kernels import KERNELS
from attn_reference.backend import BACKEND

__all__ = [
    "attention",
    "attention_varlen",
    "joint_attention",
    "joint_attn_av_gemm",
    "joint_attn_qk_gemm",
    "joint_attn_softmax",
    "qat_attention",
    "qat_attention_varlen",
]


class _PyTorchOperators(Operators):
    """The contract's operators, and production attention, which stands outside every contract."""

    def attn(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
        """``torch.nn.functional.scaled_dot_product_attention`` with grouped heads: fast, no stated order.

        Args:
            q: [B, H, S, D]; k: [B, K, T, D]; v: [B, K, T, V]; one dtype; H a multiple of K.
            causal: bottom-right, as in ``attention``.
            scale: None is 1/sqrt(D).

        Returns:
            [B, H, S, V] in the dtype of v.

        Raises:
            TypeError, ValueError: bad dtype, shape, device or scale.
        """
        self._check("attn", {"q": q, "k": k, "v": v}, {"causal": causal, "scale": scale}, None, q, k, v)
        queries, keys = q.shape[2], k.shape[2]
        square = queries == keys
        mask = None
        if causal and not square:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and square, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


FUNCTIONS = _PyTorchOperators(BACKEND, "pytorch", "attn_reference_pytorch", KERNELS).functions()

joint_attn_qk_gemm = FUNCTIONS["joint_attn_qk_gemm"]
joint_attn_softmax = FUNCTIONS["joint_attn_softmax"]
joint_attn_av_gemm = FUNCTIONS["joint_attn_av_gemm"]
joint_attention = FUNCTIONS["joint_attention"]
attention = FUNCTIONS["attention"]
attention_varlen = FUNCTIONS["attention_varlen"]
qat_attention = FUNCTIONS["qat_attention"]
qat_attention_varlen = FUNCTIONS["qat_attention_varlen"]
