"""Q, K and V of 4-bit attention: smoothed, then rounded to NVFP4 (docs/contracts/nvfp4-v1.md section 2, steps 2 and 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_spec import QATConfig
from torch import Tensor

from attn_reference._chain import ordered_sum
from attn_reference.nvfp4 import rounded

__all__ = ["Operand", "operands"]


@dataclass(frozen=True)
class Operand:
    """float32 rows of Q, K or V: before and after quantization, and the mean that smoothing took away ([heads, 1, D])."""

    original: Tensor
    quantized: Tensor
    mean: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, config: QATConfig, *, quantize: bool, smooth: bool = False, transposed: bool = False) -> Operand:
        """From [heads, tokens, D]; ``transposed`` puts the blocks along the tokens."""
        mean = _mean(x) if smooth else None
        original = x if mean is None else x - mean
        if not quantize:
            return cls(original, original, mean)
        if transposed:
            return cls(original, rounded(original.transpose(-1, -2), outer=config.qkv_outer).transpose(-1, -2), mean)
        return cls(original, rounded(original, outer=config.qkv_outer), mean)

    def backward(self, config: QATConfig) -> Tensor:
        """What the products of the backward read."""
        return self.quantized if config.quantized_backward else self.original


def operands(q: Tensor, k: Tensor, v: Tensor, config: QATConfig) -> tuple[Operand, Operand, Operand]:
    """From q [H, S, D], k and v [K, logical keys, D] of one batch item, any float dtype."""
    return (
        Operand.of(q.float(), config, quantize=config.quantize_q, smooth=config.smooth_q),
        Operand.of(k.float(), config, quantize=config.quantize_k, smooth=config.smooth_k),
        Operand.of(v.float(), config, quantize=config.quantize_v, transposed=config.v_axis == "keys"),
    )


def _mean(x: Tensor) -> Tensor:
    """[heads, tokens, D] to [heads, 1, D]: rounded sums over tokens ascending, then one division; 0 of no token."""
    total = ordered_sum(x, x.new_zeros(x.shape[0], 1, x.shape[2])) if x.shape[1] != 1 else x + 0.0
    return total / torch.full((), float(max(1, x.shape[1])), device=x.device)
