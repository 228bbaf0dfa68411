"""Launches of the kernels that smooth Q and K and round Q, K and V to NVFP4; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_spec import QATConfig
from attn_spec.nvfp4 import TILE_ROWS
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _nvfp4_kernel as kernel
from attn_triton._configuration import padded
from attn_triton._problem import attention_problem, key_grid, result_strides
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["Operand", "Operands", "constant_scales", "operands"]

_CHUNK = 64
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


@dataclass(frozen=True)
class Operand:
    """Q, K or V in the layout of its input: rounded to NVFP4, as it was before (smoothed), and the mean [items, heads, 1, D] or None."""

    quantized: Tensor
    original: Tensor
    mean: Tensor | None = None

    def backward(self, config: QATConfig) -> Tensor:
        """What the products of the backward read."""
        return self.quantized if config.quantized_backward else self.original


@dataclass(frozen=True)
class Operands:
    q: Operand
    k: Operand
    v: Operand


def operands(inputs: AttentionInputs, config: QATConfig, dtype: torch.dtype) -> Operands:
    """The operands of a call, in ``dtype``. Tokens that belong to no item, and keys that the mask drops, hold anything."""
    queries = inputs.cu_seqlens_q, inputs.seqlens_q, None
    keys = inputs.cu_seqlens_k, inputs.seqlens_k, inputs.key_mask
    return Operands(
        _operand(inputs.q, *queries, config, dtype, quantize=config.quantize_q, smooth=config.smooth_q),
        _operand(inputs.k, *keys, config, dtype, quantize=config.quantize_k, smooth=config.smooth_k),
        _operand(inputs.v, *keys, config, dtype, quantize=config.quantize_v, along_tokens=config.v_axis == "keys"),
    )


def constant_scales(outer: float | str) -> tuple[float, float]:
    """Encoding and decoding scale of "none" or a constant: float32 values."""
    encode = torch.tensor(1.0 if isinstance(outer, str) else float(outer), dtype=torch.float32)
    return float(encode), float(torch.ones(()) / encode)


def _operand(
    x: Tensor,
    offsets: Tensor | None,
    used: Tensor | None,
    mask: Tensor | None,
    config: QATConfig,
    dtype: torch.dtype,
    *,
    quantize: bool,
    smooth: bool = False,
    along_tokens: bool = False,
) -> Operand:
    if not quantize and not smooth:
        return Operand(x, x)
    # As the keys of a call whose queries are the same tokens: items, masks and grids are then those of keys.
    call = AttentionInputs(x, x, x, key_mask=mask, cu_seqlens_q=offsets, cu_seqlens_k=offsets, seqlens_q=used, seqlens_k=used)
    problem, columns = attention_problem(call), padded(x.shape[-1])
    sizes = problem.sizes
    per_head = (sizes.batch, sizes.kv_heads, x.shape[-1])
    mean = peaks = None
    if smooth:
        mean = torch.zeros(per_head, dtype=torch.float32, device=x.device)
        if mean.numel():
            kernel.token_means[(sizes.batch * sizes.kv_heads,)](
                problem.arrays, sizes.encoded, mean, CHUNK=_CHUNK, COLUMNS=columns, DOT=platform(x.device) == "cuda", **_OPTIONS
            )
    outer = config.qkv_outer
    kind = outer if outer in ("row", "tile") else "constant"
    if quantize and along_tokens and kind != "constant":
        peaks = torch.zeros(per_head, dtype=torch.float32, device=x.device)
        if peaks.numel():
            kernel.token_peaks[(sizes.batch * sizes.kv_heads,)](
                problem.arrays, sizes.encoded, mean, peaks, CHUNK=_CHUNK, COLUMNS=columns, **_OPTIONS
            )
        if kind == "tile":
            peaks = _per_tile(peaks)
    quantized = torch.empty(x.shape, dtype=dtype, device=x.device) if quantize else None
    smoothed = torch.empty(x.shape, dtype=dtype, device=x.device) if smooth else None
    encode, decode = (1.0, 1.0) if kind != "constant" else constant_scales(outer)
    into = quantized if quantized is not None else smoothed
    assert into is not None
    grid = key_grid(call, sizes, TILE_ROWS)
    if grid.programs and x.numel():
        kernel.fake_quantize[(grid.programs,)](
            *problem.on(grid),
            mean,
            peaks,
            encode,
            decode,
            quantized,
            smoothed,
            *result_strides(into, call.packed),
            ROWS=TILE_ROWS,
            COLUMNS=columns,
            OUTER=kernel.OUTERS[str(kind)],
            ALONG_TOKENS=along_tokens,
            INTEGER_ROUNDING=INTERPRETED,
            **_OPTIONS,
        )
    original = x if smoothed is None else smoothed
    return Operand(original if quantized is None else quantized, original, None if mean is None else mean.unsqueeze(2))


def _per_tile(peaks: Tensor) -> Tensor:
    """[..., D] to the largest of each 32 columns, at each of them; NaN if any is."""
    padded = torch.nn.functional.pad(peaks, (0, -peaks.shape[-1] % TILE_ROWS))
    return padded.unflatten(-1, (-1, TILE_ROWS)).amax(-1).repeat_interleave(TILE_ROWS, -1)[..., : peaks.shape[-1]].contiguous()
