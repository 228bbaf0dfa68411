"""NVFP4 on tensors: the quantizer of docs/contracts/nvfp4-v1.md section 1 in plain torch operations, on any device.

The bytes are those of ``attn_spec.nvfp4`` (numpy) and ``attn/nvfp4.h`` (C++).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from attn_spec._qat import LARGEST, Outer, check_outer
from attn_spec.nvfp4 import BLOCK, CODES, TILE_ROWS
from torch import Tensor

from attn_reference._ieee import keeps_subnormals

__all__ = ["NVFP4", "dequantize", "fake_quantize", "quantize"]

_NAN_SCALE = 0x7F
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NVFP4:
    """Packed values of a tensor [..., N], n = ceil(N / 16) blocks, as ``attn_spec.nvfp4.NVFP4``.

    ``codes`` uint8 [..., 8 n], the earlier value in the low half; ``scales`` uint8 [..., n], E4M3 bits; ``outer`` float32, the decoding
    scale above them, broadcasts to [..., 1]; ``length`` is N.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor
    length: int


@keeps_subnormals
def quantize(x: Tensor, *, outer: Outer = "none") -> NVFP4:
    """Quantize along the last axis.

    Args:
        x: float32, bfloat16 or float16, [..., N], any strides; ``outer="tile"`` needs two axes.
        outer: "none"; "row" (from the largest magnitude along the last axis) or "tile" (of 32 rows of the axis before it); or a
            number: values are multiplied by it before the block scales are rounded.

    Raises:
        TypeError, ValueError: another dtype, too few axes, another ``outer``.
    """
    _check("quantize", x, outer)
    values = x.detach().float()
    codes, scales, decoding = _codes(values, outer)
    codes = codes.flatten(-2)
    return NVFP4(codes[..., 0::2] | (codes[..., 1::2] << 4), scales, decoding, x.shape[-1])


@keeps_subnormals
def dequantize(packed: NVFP4) -> Tensor:
    """float32 [..., N]: ``RN((code * scale) * outer)``, the inner product exact; a block of scale 0 is +0, one of scale NaN is NaN."""
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], dim=-1).reshape(*packed.scales.shape, BLOCK)
    return _values(codes, packed.scales, packed.outer)[..., : packed.length]


def fake_quantize(x: Tensor, *, outer: Outer = "none") -> Tensor:
    """``dequantize(quantize(x))``, float32 [..., N], with a straight-through gradient: that of x is the one of the result, in x's dtype.

    Args:
        x, outer: as in ``quantize``.

    Raises:
        TypeError, ValueError: as ``quantize``.
    """
    _check("fake_quantize", x, outer)
    found: Tensor = _StraightThrough.apply(x.float(), outer)
    return found


def rounded(values: Tensor, *, outer: Outer = "none", decode_outer: bool = True) -> Tensor:
    """``fake_quantize`` of float32 values inside an operator: no checks, no gradient, the caller's floating-point mode; without
    ``decode_outer`` not multiplied by the outer scale."""
    codes, scales, decoding = _codes(values, outer)
    return _values(codes, scales, decoding if decode_outer else torch.ones_like(decoding))[..., : values.shape[-1]]


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @keeps_subnormals
    def forward(values: Tensor, outer: Outer) -> Tensor:
        return rounded(values, outer=outer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Outer], output: Tensor) -> None:
        """Keeps nothing: the gradient passes through."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0]
        return tangent.clone()


def _check(function: str, x: Tensor, outer: Outer) -> None:
    check_outer(f"{function}: outer", outer)
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
        found = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{function}: x must be a tensor of float32, bfloat16 or float16; got {found}")
    if x.ndim < (2 if outer == "tile" else 1):
        raise ValueError(f"{function}: x must have {'2 axes' if outer == 'tile' else '1 axis'} or more; got shape {list(x.shape)}")


def _codes(values: Tensor, outer: Outer) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [..., n, 16], scales uint8 [..., n], decoding scale float32."""
    encoding, decoding = _outer_scales(values, outer)
    blocks = -(-values.shape[-1] // BLOCK)
    padded = values.new_zeros((*values.shape[:-1], blocks * BLOCK))
    padded[..., : values.shape[-1]] = values
    grouped = padded.reshape(*values.shape[:-1], blocks, BLOCK)
    largest = grouped.abs().amax(dim=-1)  # NaN propagates
    scaled = torch.where(torch.isfinite(largest), (largest / _like(values, 6.0)) * encoding, torch.nan)
    scales = _encode_e4m3(scaled)
    inverse = _like(values, 1.0) / (_decode_e4m3(scales) * decoding)
    live = ((scales != 0) & (scales != _NAN_SCALE)).unsqueeze(-1)
    codes = torch.where(live, _encode_e2m1(torch.where(live, grouped * inverse.unsqueeze(-1), 0.0)), 0)
    return codes.to(torch.uint8), scales, decoding


def _values(codes: Tensor, scales: Tensor, decoding: Tensor) -> Tensor:
    table = torch.from_numpy(CODES).to(codes.device)
    scale = _decode_e4m3(scales).unsqueeze(-1)
    values = torch.where(scale == 0, 0.0, (table[codes.int()] * scale) * decoding.unsqueeze(-1))
    return values.flatten(-2)


def _encode_e2m1(values: Tensor) -> Tensor:
    magnitude = values.abs()
    code = torch.signbit(values).to(torch.int32) << 3
    for tie, passes in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True, False, True, False, True, False), strict=True):
        code = code + (magnitude >= tie if passes else magnitude > tie)
    return code


def _encode_e4m3(values: Tensor) -> Tensor:
    """float32 >= 0 or NaN to E4M3 bits."""
    small = values < 2.0**-6
    bits = torch.where(small | torch.isnan(values), 1.0, values).contiguous().view(torch.int32)
    normal = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960).clamp(max=0x7E)  # 120 * 8: the exponent bias moves from 127 to 7
    subnormal = (torch.where(small, values, 0.0) * 512.0 + 2.0**23).view(torch.int32) & 0xF
    code = torch.where(small, subnormal, normal)
    return torch.where(torch.isnan(values), _NAN_SCALE, code).to(torch.uint8)


def _decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 bits without a sign to float32, exactly."""
    magnitude = codes.to(torch.int32)
    normal = ((magnitude + 960) << 20).view(torch.float32)
    values = torch.where(magnitude < 8, magnitude.float() * 2.0**-9, normal)
    return torch.where(magnitude == _NAN_SCALE, torch.nan, values)


def _outer_scales(values: Tensor, outer: Outer) -> tuple[Tensor, Tensor]:
    """Encoding and decoding scale, each broadcasting to [..., 1]."""
    if not isinstance(outer, str) or outer == "none":
        encoding = _like(values, 1.0 if isinstance(outer, str) else float(outer))
        return encoding, _like(values, 1.0) / encoding
    rows = torch.nn.functional.pad(values.abs(), (0, 1)).amax(dim=-1, keepdim=True)  # padded, since a row may be empty
    if outer == "tile":
        count = values.shape[-2]
        tiles = torch.nn.functional.pad(rows, (0, 0, 0, -count % TILE_ROWS)).unflatten(-2, (-1, TILE_ROWS)).amax(dim=-2)
        rows = tiles.repeat_interleave(TILE_ROWS, dim=-2)[..., :count, :]
    largest = torch.where(torch.isfinite(rows), rows.clamp(min=1e-8), torch.nan)
    # A quotient of tensors: torch computes number / tensor as a product with the reciprocal.
    encoding = _like(values, LARGEST) / largest
    return encoding, _like(values, 1.0) / encoding


def _like(tensor: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=tensor.device)
