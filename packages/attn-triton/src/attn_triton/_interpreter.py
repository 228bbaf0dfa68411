"""How kernels run that Triton interprets with numpy: subnormals kept, no warnings about infinities and NaN, plain integer arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from triton.runtime import interpreter

__all__ = ["ieee_mode", "without_overflow_checks"]


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


@contextmanager
def without_overflow_checks() -> Iterator[None]:
    """Integer additions and multiplications as compiled kernels make them: checking each one would be half of the interpreter's time."""
    builder = interpreter.interpreter_builder
    options = builder.options
    builder.options = replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = options


def _flushes() -> bool:
    """Whether this thread reads or writes subnormals as 0; bits are compared, since a float comparison would itself flush."""
    smallest = np.ones(1, np.uint32).view(np.float32)
    return int((smallest * np.float32(1)).view(np.uint32)[0]) != 1
