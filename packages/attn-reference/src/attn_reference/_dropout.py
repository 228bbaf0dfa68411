"""Dropout decisions: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011) in int64 arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["keep_scale", "kept_pairs", "philox_word"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def kept_pairs(probability: float, seed: Tensor, batch: int | Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """bool, True where a pair survives: Philox word >= floor(p * 2^32). The indices are int64 and broadcast to the result."""
    return philox_word(seed, torch.as_tensor(batch, device=head.device), head, query, key) >= math.floor(probability * 2**32)


def keep_scale(probability: float, device: torch.device) -> Tensor:
    """1 / (1 - p), computed in binary64 and rounded to binary32; 0 for p = 1."""
    return torch.tensor(0.0 if probability == 1.0 else 1.0 / (1.0 - probability), dtype=torch.float32, device=device)


def philox_word(seed: Tensor, *counter: Tensor) -> Tensor:
    """Word 0 for the int64 scalar ``seed`` (its 64 bits are the key, low word first) and four int64 counter words below 2^32."""
    c0, c1, c2, c3 = counter
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        # An int64 product wraps to the 64 bits of the unsigned one; the shift is arithmetic, hence the mask.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ keys[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ keys[1],
            first & _WORD,
        )
        keys = [(key + step) & _WORD for key, step in zip(keys, _WEYL, strict=True)]
    return c0
