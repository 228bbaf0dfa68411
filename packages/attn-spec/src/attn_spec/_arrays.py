"""Numpy arrays in the dtypes of the contracts. numpy has no bfloat16: here it is a one-field record of the 16 bits."""

from __future__ import annotations

import numpy as np

__all__ = ["bfloat16", "dtype_name", "from_float32", "numpy_dtype", "to_float32"]

bfloat16 = np.dtype([("bfloat16", "<u2")])
"""numpy dtype of bfloat16 bits; ``array["bfloat16"]`` is the view as uint16."""


def dtype_name(dtype: np.dtype) -> str:
    """The name of ``dtype`` in contracts and problems, for example ``"bfloat16"``."""
    return "bfloat16" if dtype == bfloat16 else np.dtype(dtype).name


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a dtype name."""
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def to_float32(array: np.ndarray) -> np.ndarray:
    """Exact conversion of float32, bfloat16 or float16 to float32."""
    if array.dtype == bfloat16:
        return (np.ascontiguousarray(array)["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def from_float32(array: np.ndarray, name: str) -> np.ndarray:
    """float32 to a dtype by name, nearest even; overflow gives infinity, NaN stays NaN."""
    values = np.ascontiguousarray(array, dtype=np.float32)
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(np.dtype(name))
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded = np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return np.ascontiguousarray(rounded).view(bfloat16)
