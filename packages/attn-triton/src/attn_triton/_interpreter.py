"""How kernels run that Triton interprets with numpy: subnormals kept, no warnings about infinities and NaN, plain integer arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

__all__ = ["bfloat16_by_shift", "ieee_mode", "patched_once", "without_overflow_checks"]


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


@contextmanager
def patched_once() -> Iterator[None]:
    """One patch of ``triton.language`` for all calls of its own functions, ``tl.sum`` and the like, beside that of the launch.

    The interpreter makes one at each call, and takes none back: a third of the time of small blocks.
    """
    call = interpreter.InterpretedFunction.__call__
    patched: set[str] = set()

    def once(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.fn.__module__ in patched:
            return self.rewrite()(*arguments, **keywords)
        patched.add(self.fn.__module__)
        return call(self, *arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = once
    try:
        yield
    finally:
        interpreter.InterpretedFunction.__call__ = call


@contextmanager
def bfloat16_by_shift() -> Iterator[None]:
    """bfloat16 to float32 is a shift of the bits; the interpreter's conversion between any two formats takes thirty times as long."""
    convert = interpreter._convert_float

    def shifted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return values.astype(np.uint32) << np.uint32(16)
        return convert(values, source, target, rounding)

    interpreter._convert_float = shifted
    try:
        yield
    finally:
        interpreter._convert_float = convert


def _flushes() -> bool:
    """Whether this thread reads or writes subnormals as 0; bits are compared, since a float comparison would itself flush."""
    smallest = np.ones(1, np.uint32).view(np.float32)
    return int((smallest * np.float32(1)).view(np.uint32)[0]) != 1
