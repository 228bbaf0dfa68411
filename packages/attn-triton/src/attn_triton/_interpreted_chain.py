"""FMA chains in numpy, for kernels that Triton interprets: exact on every version of Triton, with one call for a whole block of a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime.interpreter import TensorHandle

__all__ = ["chain", "chain_of_terms", "fma", "round_sum"]


def chain(acc: Any, a: Any, b: Any, DOT: Any) -> Any:
    """``acc[m, n] = FMA(a[m, k], b[k, n], acc[m, n])`` for k ascending; float32 tensors of the interpreter."""
    return _tensor(acc, _chain(_values(acc), _values(a), _values(b), None))


def chain_of_terms(acc: Any, a: Any, b: Any, masked: Any) -> Any:
    """``chain`` without the terms of masked pairs [M, K], whatever a and b hold there."""
    return _tensor(acc, _chain(_values(acc), _values(a), _values(b), ~_values(masked).astype(bool)))


def fma(a: Any, b: Any, c: Any) -> Any:
    """``RN(a * b + c)`` elementwise; float32 tensors of one shape, b or c may be a number that float32 holds."""
    left, right, addend = (
        _values(value).astype(np.float64) if isinstance(value, tl.core.tensor) else _number(value) for value in (a, b, c)
    )
    return _tensor(a, round_sum(left * right, np.broadcast_to(addend, left.shape).astype(np.float64)).astype(np.float32))


def _number(value: Any) -> np.ndarray:
    return np.asarray(getattr(value, "value", value), dtype=np.float64)


def _values(tensor: Any) -> np.ndarray:
    values: np.ndarray = tensor.handle.data
    return values


def _tensor(like: Any, values: np.ndarray) -> Any:
    return tl.core.tensor(TensorHandle(values, like.dtype), like.type)


def _chain(acc: np.ndarray, a: np.ndarray, b: np.ndarray, terms: np.ndarray | None) -> np.ndarray:
    # A term of zeros changes at most the sign of a zero: steps, and rows and columns beyond the end of a block, are left out.
    steps = np.flatnonzero(a.any(axis=0) | b.any(axis=1))
    rows = a.any(axis=1) if np.isfinite(b).all() else np.ones(a.shape[0], bool)
    columns = b.any(axis=0) if np.isfinite(a).all() else np.ones(b.shape[1], bool)
    part = np.ix_(rows, columns)
    left, right, total = a[rows].astype(np.float64), b[:, columns].astype(np.float64), acc[part].astype(np.float64)
    left = np.ascontiguousarray(left.T)[:, :, None]
    small = not _small_sums_are_exact(a, b)
    product, exact, following = np.empty_like(total), np.empty_like(total), np.empty(total.shape, np.float32)
    bits = exact.view(np.int64)
    for index in steps:
        np.multiply(left[index], right[index], out=product)
        np.add(product, total, out=exact)
        np.copyto(following, exact, casting="same_kind")
        near_tie = (bits & _DROPPED) == _TIE
        if small:
            near_tie |= np.abs(following) <= _SMALLEST_NORMAL
        if near_tie.any():
            following[near_tie] = round_sum(product[near_tie], total[near_tie])
        np.copyto(total, following, where=True if terms is None else terms[rows, index, None])
    result = acc.copy()
    result[part] = total
    return result


_DROPPED, _TIE = np.int64((1 << 29) - 1), np.int64(1 << 28)
"""Bits of a float64 that a normal float32 lacks, and their value half way between two of them. Only from there does rounding the rounded
sum go another way than rounding the sum."""
_SMALLEST_NORMAL = np.float32(2.0**-126)


def _small_sums_are_exact(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether every product is a multiple of 2^-178: then a sum with a float32 is exact in float64 wherever float32 is subnormal."""
    least = [np.min(np.abs(values), where=values != 0, initial=1.0) for values in (a, b)]
    return float(least[0]) * float(least[1]) >= 2.0**-130


def round_sum(product: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """The float32 value nearest to the exact ``product + addend``, in float64; ``product`` is exact, ``addend`` holds float32 values.

    A sum of two float64 rounds twice on its way to float32, which is wrong near ties, unless the first rounding is made one to odd: an
    inexact sum whose last bit is 0 moves one unit towards its exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57, 2008).
    """
    total = product + addend
    # TwoSum (Knuth): total + error is exact; error is NaN where total is infinite or NaN.
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    move = np.where((error > 0) == (total > 0), 1, -1)
    inexact_even = (np.abs(error) > 0) & ((bits & 1) == 0)
    return (bits + move * inexact_even).view(np.float64).astype(np.float32).astype(np.float64)
