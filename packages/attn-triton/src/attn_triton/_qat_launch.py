"""Launches of 4-bit attention: operands, then the kernels of nvfp4-ordered-v1 or of nvfp4-sm90-v1; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_spec import QATConfig
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_launch as forward_launch
from attn_triton import _qat_kernel as kernel
from attn_triton import _qat_sm90_launch
from attn_triton._attention_backward_launch import CONFIGS, SELECTIONS, Columns, _Backward, _gradient, _turned
from attn_triton._configuration import on_device, padded
from attn_triton._nvfp4_launch import Operands, constant_scales, operands
from attn_triton._problem import Problem, attention_problem, fresh_results, key_grid, result_strides, row_grid
from attn_triton._products_launch import qk_gemm_forward
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["p_scales", "qat_backward", "qat_forward"]

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
        call = _Call.of(inputs, config)
        dot = platform(q.device) == "cuda"
        problem = attention_problem(call.inputs, columns_first=dot)
        configs = forward_launch.configs_of(q.device)
        indexed = call.inputs.bias is not None or inputs.key_mask is not None
        forward_launch._row_states(call.inputs, problem, configs.indexed if indexed else configs.states, dot, lse, row_max, row_sum)
        _outputs(call, problem, configs, dot, row_max, row_sum, out)
    return out, lse, row_max, row_sum


@dataclass(frozen=True)
class _Call:
    """``inputs`` with quantized operands (float32), and with the scores of the mean of Q as a bias."""

    inputs: AttentionInputs
    config: QATConfig
    operands: Operands

    @classmethod
    def of(cls, inputs: AttentionInputs, config: QATConfig) -> _Call:
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


def _outputs(
    call: _Call, problem: Problem, configs: forward_launch.ForwardConfigs, dot: bool, row_max: Tensor, row_sum: Tensor, out: Tensor
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


def qat_backward(
    inputs: AttentionInputs, config: QATConfig, contract: str, dout: Tensor, dlse: Tensor | None, saved: Saved, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each fresh, contiguous, with the shape and dtype of its input."""
    if contract == _qat_sm90_launch.CONTRACT:
        return _qat_sm90_launch.qat_backward(inputs, config, p_scales(config), dout, dlse, saved, needs)
    found: dict[str, Tensor] = {name: _gradient(inputs, name) for name in ("q", "k", "v", "sinks") if name in needs}
    if not any(gradient.numel() for gradient in found.values()):
        return found
    with on_device(inputs.q):
        call = _Call.of(inputs, config)
        right = call.operands.k.backward(config)
        problem = attention_problem(replace(call.inputs, k=right))
        turned = (call.inputs.q, call.inputs.k, call.operands.v.backward(config), dout)
        parts: list[Any] = [part for tensor in turned for part in _turned(tensor, inputs.packed)]
        columns = Columns(*parts)
        device = platform(inputs.q.device)
        passes = _Backward(call.inputs, problem, columns, dout, saved[2], saved[3], CONFIGS[device], device == "cuda")
        if "v" in found:
            _value_sums(call, passes, found["v"])
        if found.keys() - {"v"}:
            dsink = torch.empty_like(saved[2]) if "sinks" in found else None
            cotangent = None if dlse is None else dlse.float().contiguous()
            delta = passes.delta(cotangent, dsink) if config.high_precision_delta else _delta(call, passes, cotangent, dsink)
            if "q" in found:
                passes.query_sums(delta, found["q"])
            if "k" in found:
                passes.key_sums(delta, _unsmoothed(inputs, call.operands, config), found["k"])
            if dsink is not None:
                passes.sink_sums(dsink, found["sinks"])
    return found


def _unsmoothed(inputs: AttentionInputs, parts: Operands, config: QATConfig) -> Tensor:
    """Rows of Q for dk: the mean that smoothing took away is added back."""
    q, mean = parts.q.backward(config), parts.q.mean
    if mean is None:
        return q
    if not inputs.packed:
        return q + mean
    assert inputs.cu_seqlens_q is not None
    item = torch.bucketize(torch.arange(q.shape[0], device=q.device), inputs.cu_seqlens_q[1:], right=True)
    return q + mean[item.clamp(max=max(0, mean.shape[0] - 1)), :, 0] if mean.shape[0] else q


def _value_sums(call: _Call, passes: _Backward, dv: Tensor) -> None:
    width = dv.shape[-1]
    config = passes.config(width, of_rows=False)
    grid = key_grid(call.inputs, passes.problem.sizes, config.owners)
    if grid.programs == 0 or dv.numel() == 0:
        return
    spoiled = torch.zeros(grid.programs, dtype=torch.int32, device=dv.device)
    for select in SELECTIONS:
        config = passes.config(width, of_rows=False).selecting(select, 1)
        kernel.qat_value_sums[(grid.programs,)](
            passes.problem.arrays,
            passes.problem.sizes.encoded,
            passes.columns,
            grid.plan,
            grid.per_item,
            passes.row_max,
            passes.row_sum,
            *p_scales(call.config),
            passes.dout,
            *result_strides(passes.dout, call.inputs.packed),
            passes.dout.stride(-1),
            dv,
            *result_strides(dv, call.inputs.packed),
            spoiled,
            ROWS=config.others,
            KEYS=config.owners,
            COLUMNS=padded(width),
            CHUNK=config.chunk,
            QUANTIZE=call.config.quantize_p,
            SELECT=select,
            DOT=passes.dot,
            INTEGER_ROUNDING=INTERPRETED,
            **config.options,
        )


def _delta(call: _Call, passes: _Backward, dlse: Tensor | None, dsink: Tensor | None) -> Tensor:
    """``_Backward.delta`` of the quantized P."""
    delta = torch.empty_like(passes.row_max)
    config = passes.configs[2]
    grid = row_grid(call.inputs, passes.problem.sizes, config.owners)
    if grid.programs and delta.numel():
        kernel.qat_delta[(grid.programs,)](
            passes.problem.arrays,
            passes.problem.sizes.encoded,
            passes.columns,
            grid.plan,
            grid.per_item,
            passes.row_max,
            passes.row_sum,
            *p_scales(call.config),
            dlse,
            delta,
            dsink,
            ROWS=config.owners,
            CHUNK=config.chunk,
            QUANTIZE=call.config.quantize_p,
            DOT=passes.dot,
            **config.options,
        )
    return delta
