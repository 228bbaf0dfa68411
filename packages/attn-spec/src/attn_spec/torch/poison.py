"""Memory that torch hands out uninitialised holds NaN, so that an element which no kernel writes shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

__all__ = ["poisoned_memory"]


@contextmanager
def poisoned_memory(mode: Literal["warn", "error"]) -> Iterator[None]:
    """Torch fills it in its deterministic mode alone: ``mode`` says what an operator without a deterministic form does there."""
    settings: Any = torch.utils.deterministic
    earlier, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(mode)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(earlier)
