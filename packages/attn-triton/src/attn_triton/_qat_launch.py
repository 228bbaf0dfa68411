"""Launches of 4-bit attention's forward: operands, then the kernels of nvfp4-ordered-v1 or of nvfp4-sm90-v1; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_spec import QATConfig
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_forward_kernel as states_kernel
from attn_triton import _qat_kernel as kernel
from attn_triton import _qat_sm90_launch
from attn_triton._configuration import Config, on_device
from attn_triton._nvfp4_launch import Operands, constant_scales, operands
from attn_triton._problem import Problem, attention_problem, block_sides, fresh_results, result_strides, row_grid
from attn_triton._products_launch import qk_gemm_forward
from attn_triton._qat_configuration import ForwardConfigs, forward_configs
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["QuantizedCall", "Saved", "p_scales", "qat_forward"]

Saved = tuple[Tensor, Tensor, Tensor, Tensor]


def p_scales(config: QATConfig) -> tuple[float, float]:
    """Outer scales of P."""
    return constant_scales(config.p_scale)


def qat_forward(inputs: AttentionInputs, config: QATConfig, contract: str) -> Saved:
    """out (layout and dtype of q), LSE, and the row maximum and sum (float32, ``inputs.row_shape``)."""
    if contract == _qat_sm90_launch.CONTRACT:
        return _qat_sm90_launch.qat_forward(inputs, config, p_scales(config))
    q = inputs.q
    out, lse, row_max, row_sum = fresh_results(inputs, q.dtype)
    if lse.numel() == 0:
        return out, lse, row_max, row_sum
    with on_device(q):
        call = QuantizedCall.of(inputs, config)
        dot = platform(q.device) == "cuda"
        problem = attention_problem(call.inputs, columns_first=dot)
        configs = forward_configs(q.device)
        indexed = call.inputs.bias is not None or inputs.key_mask is not None
        _row_states(call, problem, configs.indexed if indexed else configs.states, dot, lse, row_max, row_sum)
        _outputs(call, problem, configs, dot, row_max, row_sum, out)
    return out, lse, row_max, row_sum


@dataclass(frozen=True)
class QuantizedCall:
    """``inputs`` with quantized operands (float32), and with the scores of the mean of Q as a bias."""

    inputs: AttentionInputs
    config: QATConfig
    operands: Operands

    @classmethod
    def of(cls, inputs: AttentionInputs, config: QATConfig) -> QuantizedCall:
        found = operands(inputs, config, torch.float32)
        bias = None if found.q.mean is None else _mean_scores(inputs, found.q.mean, found.k.original)
        tensors: dict[str, Any] = {"q": found.q.quantized, "k": found.k.quantized, "v": found.v.quantized, "bias": bias}
        return cls(replace(inputs, **tensors), config, found)


def _mean_scores(inputs: AttentionInputs, mean: Tensor, k: Tensor) -> Tensor:
    """Scores of the mean query [B or segments, H, 1, D] against the smoothed keys, [B or segments, H, 1, T or total]."""
    if not inputs.packed:
        return qk_gemm_forward(mean, k.float(), inputs.scale, torch.float32)
    assert inputs.cu_seqlens_k is not None
    scores = qk_gemm_forward(mean.permute(2, 1, 0, 3), k.transpose(0, 1).unsqueeze(0).float(), inputs.scale, torch.float32)[0]
    place = inputs.cu_seqlens_k[:-1, None] + torch.arange(k.shape[0], device=k.device)
    place = place.clamp(max=max(0, k.shape[0] - 1)).unsqueeze(1).expand(-1, scores.shape[0], -1)
    return scores.transpose(0, 1).gather(2, place).unsqueeze(2)


def _row_states(call: QuantizedCall, problem: Problem, config: Config, dot: bool, *results: Tensor) -> None:
    rows, _ = block_sides(problem.sizes, config.rows, config.keys)
    grid = row_grid(call.inputs, problem.sizes, rows)
    if grid.programs:
        states_kernel.attention_row_states[(grid.programs,)](
            *problem.on(grid), *results, ROWS=rows, KEYS=config.keys, CHUNK=config.chunk, DOT=dot, **config.options
        )


def _outputs(
    call: QuantizedCall, problem: Problem, configs: ForwardConfigs, dot: bool, row_max: Tensor, row_sum: Tensor, out: Tensor
) -> None:
    launches = configs.output_launches(out.shape[-1])
    grid = row_grid(call.inputs, problem.sizes, launches[0].config.rows)
    if grid.programs == 0:
        return
    spoiled = torch.empty(grid.programs, dtype=torch.int32, device=out.device)
    for launch in launches:
        kernel.qat_outputs[(grid.programs,)](
            *launch.problem(problem, call.inputs.v).on(grid),
            row_max,
            row_sum,
            *p_scales(call.config),
            out[..., launch.part],
            *result_strides(out, call.inputs.packed),
            spoiled,
            QUANTIZE=call.config.quantize_p,
            DOT=dot,
            INTEGER_ROUNDING=INTERPRETED,
            **launch.options,
        )
