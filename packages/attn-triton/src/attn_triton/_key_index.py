"""The logical keys of a ``key_padding_mask``: which stored position each one has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KeyIndex", "key_index"]


@dataclass(frozen=True)
class KeyIndex:
    """Logical keys of ``key_padding_mask``.

    ``keep`` [B, T] uint8; ``index`` [B, T] int32, the stored position of each logical key; ``counts`` [B] int32, how many there are.
    """

    keep: Tensor
    index: Tensor
    counts: Tensor


def key_index(mask: Tensor) -> KeyIndex:
    """The logical keys of a bool mask [B, T], built on its device without a host synchronisation.

    Kept keys come first, in order, dropped ones after them: a permutation, so that no two writes of the scatter meet.
    """
    kept = torch.cumsum(mask, dim=1, dtype=torch.int64)
    counts = kept[:, -1:]
    stored = torch.arange(mask.shape[1], device=mask.device, dtype=torch.int64).expand(mask.shape)
    place = torch.where(mask, kept - 1, counts + (stored - kept))
    index = torch.empty(mask.shape, dtype=torch.int32, device=mask.device).scatter_(1, place, stored.to(torch.int32))
    return KeyIndex(mask.to(torch.uint8).contiguous(), index, counts.squeeze(1).to(torch.int32))
