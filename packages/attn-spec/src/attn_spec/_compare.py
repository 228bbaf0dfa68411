"""Comparison of arrays as contracts mean it: bytes as integers, +0 is not -0, and NaN matches NaN of any sign and payload."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from attn_spec._arrays import bfloat16, dtype_name, to_float32

__all__ = ["Difference", "difference", "digest"]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Difference:
    """Outcome of one comparison. ``first`` is the first differing index, ``bits`` the two bit patterns there (candidate, reference)."""

    equal: bool
    mismatched: int = 0
    max_ulp: int = 0
    first: tuple[int, ...] | None = None
    bits: tuple[str, str] | None = None
    reason: str = ""

    def text(self) -> str:
        """One line for a person."""
        if self.equal:
            return "equal bytes"
        if self.first is None or self.bits is None:
            return self.reason
        where = ", ".join(str(index) for index in self.first)
        seen = f"{self.bits[0]} against {self.bits[1]}"
        return f"{self.mismatched} elements differ, by up to {self.max_ulp} ulp; first at [{where}]: {seen}"


def difference(candidate: np.ndarray, reference: np.ndarray) -> Difference:
    """Compare two arrays: shape, dtype, then every element's bits. NaN positions must agree both ways; infinities compare as numbers."""
    names = dtype_name(candidate.dtype), dtype_name(reference.dtype)
    if names[0] != names[1]:
        return Difference(False, reason=f"dtype {names[0]} against {names[1]}")
    if candidate.shape != reference.shape:
        return Difference(False, reason=f"shape {list(candidate.shape)} against {list(reference.shape)}")
    left, right = _bits(candidate), _bits(reference)
    differs = left != right
    if not differs.any():
        return Difference(True)
    first = tuple(int(index) for index in np.unravel_index(int(np.argmax(differs)), differs.shape))
    width = 2 * left.dtype.itemsize
    bits = (f"0x{int(left[first]):0{width}x}", f"0x{int(right[first]):0{width}x}")
    return Difference(False, int(differs.sum()), _max_ulp(left[differs], right[differs]), first, bits)


def digest(array: np.ndarray) -> str:
    """sha256 of dtype, shape and canonical bytes (every NaN is one NaN), so that two machines can compare a large result by one line."""
    head = f"{dtype_name(array.dtype)}{list(array.shape)}".encode()
    return hashlib.sha256(head + _bits(array).tobytes()).hexdigest()


def _bits(array: np.ndarray) -> np.ndarray:
    """Unsigned view with one bit pattern for every NaN."""
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if contiguous.dtype == bool:
        return contiguous.view(np.uint8)
    bits = contiguous["bfloat16"] if contiguous.dtype == bfloat16 else contiguous.view(_UNSIGNED[contiguous.dtype.itemsize])
    if contiguous.dtype == bfloat16 or contiguous.dtype.kind == "f":
        values = to_float32(contiguous) if contiguous.dtype.itemsize == 2 else contiguous
        nan = np.isnan(values)
        if nan.any():
            bits = np.where(nan, np.array(-1).astype(bits.dtype), bits)
    return bits


def _max_ulp(left: np.ndarray, right: np.ndarray) -> int:
    """Largest distance in units in the last place, counting through zero; 2**63 - 1 where only one side is NaN."""
    if left.dtype == np.uint8:
        return 1
    nan = np.array(-1).astype(left.dtype)
    if ((left == nan) != (right == nan)).any():
        return 2**63 - 1
    ordered = [_ordered(bits) for bits in (left, right)]
    return max(abs(int(a) - int(b)) for a, b in zip(*_extremes(ordered[0], ordered[1]), strict=True))


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Sign-magnitude bits to integers that are ordered as the floats are (both zeros at 0)."""
    top = 1 << (8 * bits.dtype.itemsize - 1)
    magnitude = (bits & bits.dtype.type(top - 1)).astype(np.int64)
    return np.where(bits & bits.dtype.type(top), -magnitude, magnitude)


def _extremes(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance = np.abs(left.astype(np.float64) - right.astype(np.float64))
    index = int(np.argmax(distance))
    return left[index : index + 1], right[index : index + 1]
