"""NVFP4 on numpy arrays: ``quantize``, ``dequantize`` and the packed format, as docs/contracts/nvfp4-v1.md section 1 states them.

The format is NVIDIA's: E2M1 values in blocks of 16 with one E4M3 scale, and an optional binary32 scale above them; the conversions are
those of PTX's ``cvt.rn.satfinite`` to ``e2m1x2`` and ``e4m3x2`` (https://docs.nvidia.com/cuda/parallel-thread-execution/).
``include/attn/nvfp4.h`` is the same arithmetic in C++, ``attn_reference.nvfp4`` in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attn_spec._arrays import bfloat16, dtype_name, to_float32
from attn_spec._operators import DTYPES
from attn_spec._qat import LARGEST, Outer, check_outer

__all__ = ["BLOCK", "CODES", "NVFP4", "TILE_ROWS", "decode_e4m3", "dequantize", "encode_e2m1", "encode_e4m3", "quantize"]

BLOCK = 16
TILE_ROWS = 32
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each E2M1 code."""

_F32 = np.float32
_LARGEST = _F32(LARGEST)
_LEAST_MAGNITUDE = _F32(1e-8)
_NAN_SCALE = 0x7F


@dataclass(frozen=True)
class NVFP4:
    """Packed values of an array [..., N], n = ceil(N / 16) blocks.

    Attributes:
        codes: uint8 [..., 8 n], two E2M1 codes a byte, the earlier value in the low half; codes past N are 0.
        scales: uint8 [..., n], E4M3 bits of the block scales, in the order of the blocks.
        outer: float32, broadcasts to [..., 1]: the decoding scale above the block scales.
        length: N.
    """

    codes: np.ndarray
    scales: np.ndarray
    outer: np.ndarray
    length: int


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """float32 (no NaN) to E2M1 codes as uint8: nearest, ties to the even code, beyond 6 saturates, the sign of a zero is kept."""
    magnitude = np.abs(values)
    code = np.zeros(values.shape, np.uint8)
    for tie, passes in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True, False, True, False, True, False), strict=True):
        code += magnitude >= _F32(tie) if passes else magnitude > _F32(tie)
    return code | (np.signbit(values).astype(np.uint8) << 3)


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 (>= 0 or NaN) to E4M3 bits as uint8: nearest even, beyond 448 saturates, NaN is 0x7F."""
    bits = values.view(np.uint32)
    normal = (bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20
    normal = np.minimum(normal, np.uint32(0x7E + 960)) - np.uint32(960)  # 120 * 8: the exponent bias moves from 127 to 7
    small = np.where(values < _F32(2.0**-6), values, _F32(0))
    subnormal = (small * _F32(512) + _F32(2.0**23)).view(np.uint32) & np.uint32(0xF)
    code = np.where(values < _F32(2.0**-6), subnormal, normal).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(_NAN_SCALE), code)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """E4M3 bits to float32, exactly."""
    exponent, mantissa = (codes.astype(np.int32) >> 3) & 15, (codes & 7).astype(_F32)
    magnitude = np.where(exponent == 0, mantissa * _F32(2.0**-9), np.ldexp(_F32(1) + mantissa * _F32(0.125), exponent - 7))
    magnitude = np.where((codes & 0x7F) == _NAN_SCALE, _F32(np.nan), magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(_F32)


def quantize(x: np.ndarray, *, outer: Outer = "none") -> NVFP4:
    """Quantize along the last axis.

    Args:
        x: float32, float16 or ``attn_spec.bfloat16``, [..., N]; ``outer="tile"`` needs two axes.
        outer: "none"; "row" (from the largest magnitude along the last axis) or "tile" (of 32 rows of the axis before it); or a
            number: values are multiplied by it before the block scales are rounded.

    Raises:
        TypeError, ValueError: another dtype, too few axes, another ``outer``.
    """
    check_outer("quantize: outer", outer)
    if dtype_name(x.dtype) not in DTYPES:
        raise TypeError(f"quantize: x has dtype {x.dtype}; supported: {', '.join(DTYPES)}")
    if x.ndim < (2 if outer == "tile" else 1):
        raise ValueError(f"quantize: x must have {'2 axes' if outer == 'tile' else '1 axis'} or more; got shape {list(x.shape)}")
    values = to_float32(x) if x.dtype == bfloat16 else np.ascontiguousarray(x, _F32)
    length = values.shape[-1]
    blocks = -(-length // BLOCK)
    padded = np.zeros((*values.shape[:-1], blocks * BLOCK), _F32)
    padded[..., :length] = values
    with np.errstate(all="ignore"):
        encoding, decoding = _outer_scales(values, outer)
        grouped = padded.reshape(*values.shape[:-1], blocks, BLOCK)
        largest = np.abs(grouped).max(axis=-1, initial=0)  # NaN propagates
        scaled = (largest / _F32(6)) * encoding
        scales = encode_e4m3(np.where(np.isfinite(largest), scaled, _F32(np.nan)).astype(_F32))
        inverse = _F32(1) / (decode_e4m3(scales) * decoding)
        live = ((scales != 0) & (scales != _NAN_SCALE))[..., None]
        codes = np.where(live, encode_e2m1(np.where(live, grouped * inverse[..., None], _F32(0))), np.uint8(0))
    codes = codes.reshape(padded.shape)
    return NVFP4(codes[..., 0::2] | (codes[..., 1::2] << 4), scales, decoding, length)


def dequantize(packed: NVFP4) -> np.ndarray:
    """float32 [..., N]: ``RN((code * scale) * outer)``, the inner product exact; a block of scale 0 is +0, one of scale NaN is NaN."""
    codes = np.stack([packed.codes & 15, packed.codes >> 4], axis=-1).reshape(*packed.scales.shape, BLOCK)
    scales = decode_e4m3(packed.scales)[..., None]
    with np.errstate(invalid="ignore"):
        values = np.where(scales == 0, _F32(0), (CODES[codes] * scales) * np.asarray(packed.outer, _F32)[..., None])
    return values.reshape(*packed.codes.shape[:-1], packed.codes.shape[-1] * 2)[..., : packed.length].astype(_F32)


def _outer_scales(values: np.ndarray, outer: Outer) -> tuple[np.ndarray, np.ndarray]:
    """Encoding and decoding scale, float32, each broadcasting to [..., 1]."""
    if outer == "none":
        return np.ones((), _F32), np.ones((), _F32)
    if not isinstance(outer, str):
        return np.asarray(outer, _F32), np.asarray(_F32(1) / _F32(outer))
    rows = np.abs(values).max(axis=-1, initial=0)[..., None]
    if outer == "tile":
        rows = _per_tile(rows)
    largest = np.maximum(rows, _LEAST_MAGNITUDE)
    encoding = np.where(np.isfinite(largest), _LARGEST / largest, _F32(np.nan)).astype(_F32)
    return encoding, _F32(1) / encoding


def _per_tile(rows: np.ndarray) -> np.ndarray:
    """[..., R, 1] to the largest of each 32 rows, at each of its rows."""
    count = rows.shape[-2]
    tiles = -(-count // TILE_ROWS)
    padded = np.zeros((*rows.shape[:-2], tiles * TILE_ROWS, 1), _F32)
    padded[..., :count, :] = rows
    largest = padded.reshape(*rows.shape[:-2], tiles, TILE_ROWS).max(axis=-1, initial=0)
    return np.repeat(largest, TILE_ROWS, axis=-1)[..., :count, None]
