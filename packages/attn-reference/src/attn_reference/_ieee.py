"""Subnormals kept, whatever floating-point mode the caller has set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

__all__ = ["keeps_subnormals"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def keeps_subnormals(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Run ``function`` on one CPU thread with flush-to-zero off, and give the caller's mode and thread count back afterwards.

    ``torch.set_flush_denormal`` acts on the calling thread alone, and torch's worker threads keep the mode of the thread that started them,
    so that nobody can clear it later; hence the workers stay out. On a GPU, torch's elementwise operations always keep subnormals.
    """

    @functools.wraps(function)
    def call(*arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        with _subnormals():
            return function(*arguments, **keywords)

    return call


@contextmanager
def _subnormals() -> Iterator[None]:
    threads = torch.get_num_threads()
    flushed = _flushes()
    torch.set_num_threads(1)
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)
        torch.set_num_threads(threads)


def _flushes() -> bool:
    """Whether this thread flushes. Integers in and out: a float comparison would itself read a subnormal as 0."""
    smallest = torch.ones(1, dtype=torch.int32, device="cpu").view(torch.float32)
    return int((smallest * 1.0).view(torch.int32)) != 1
