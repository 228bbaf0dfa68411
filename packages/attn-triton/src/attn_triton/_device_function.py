"""The decorator of functions that kernels call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton

__all__ = ["device_function"]


def device_function(function: Callable[..., Any]) -> Any:
    """``triton.jit`` for a function that only kernels call.

    At each call of such a function the interpreter patches ``triton.language`` again, which would be most of its time. The kernel that is
    running has patched it already, so here the rewritten function is called directly.
    """
    compiled = triton.jit(function)
    if isinstance(compiled, triton.JITFunction):
        return compiled

    @functools.wraps(function)
    def interpreted(*arguments: Any, **keywords: Any) -> Any:
        return compiled.rewrite()(*arguments, **keywords)

    return interpreted
