"""The floating-point mode of kernels that Triton interprets with numpy: subnormals kept, no warnings about infinities and NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["ieee_mode"]


@contextmanager
def ieee_mode() -> Iterator[None]:
    """Flush-to-zero off for the calling thread, which is the one that interprets; the caller's mode comes back afterwards."""
    flushes = _flushes()
    if flushes:
        torch.set_flush_denormal(False)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def _flushes() -> bool:
    """Whether this thread reads or writes subnormals as 0; bits are compared, since a float comparison would itself flush."""
    smallest = np.ones(1, np.uint32).view(np.float32)
    return int((smallest * np.float32(1)).view(np.uint32)[0]) != 1
