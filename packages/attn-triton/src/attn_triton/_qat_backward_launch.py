"""Launches of 4-bit attention's gradients: the kernels of nvfp4-ordered-v1 or of nvfp4-sm90-v1; no arithmetic happens here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_spec import QATConfig
from attn_spec.torch import AttentionInputs
from attn_spec.torch._arrays import platform
from torch import Tensor

from attn_triton import _attention_backward_kernel as chains_kernel
from attn_triton import _qat_kernel as kernel
from attn_triton import _qat_sm90_launch
from attn_triton._attention_backward_launch import Columns, fresh_gradient, sink_sums, turned
from attn_triton._configuration import PairConfig, on_device, padded
from attn_triton._nvfp4_launch import Operands
from attn_triton._problem import Grid, Problem, attention_problem, block_sides, key_grid, result_strides, row_grid
from attn_triton._qat_configuration import BackwardConfigs, backward_configs
from attn_triton._qat_launch import QuantizedCall, Saved, p_scales
from attn_triton._softmax_kernel import INTERPRETED

__all__ = ["qat_backward"]

_SELECTIONS = (False, True)
"""Launches of a sum: over every pair, then, for the blocks in which that left a NaN, without the terms of masked pairs."""


def qat_backward(
    inputs: AttentionInputs, config: QATConfig, contract: str, dout: Tensor, dlse: Tensor | None, saved: Saved, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Gradients of the names in ``needs`` (q, k, v, sinks), each fresh, contiguous, with the shape and dtype of its input."""
    if contract == _qat_sm90_launch.CONTRACT:
        return _qat_sm90_launch.qat_backward(inputs, config, p_scales(config), dout, dlse, saved, needs)
    found: dict[str, Tensor] = {name: fresh_gradient(inputs, name) for name in ("q", "k", "v", "sinks") if name in needs}
    if not any(gradient.numel() for gradient in found.values()):
        return found
    with on_device(inputs.q):
        passes = _Passes.of(QuantizedCall.of(inputs, config), dout, saved)
        if "v" in found:
            passes.value_sums(found["v"])
        if found.keys() - {"v"}:
            dsink = torch.empty_like(saved[2]) if "sinks" in found else None
            delta = passes.delta(None if dlse is None else dlse.float().contiguous(), dsink)
            if "q" in found:
                passes.query_sums(delta, found["q"])
            if "k" in found:
                passes.key_sums(delta, _unsmoothed(inputs, passes.call.operands, config), found["k"])
            if dsink is not None:
                sink_sums(passes.problem, dsink, found["sinks"], dot=passes.dot)
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


@dataclass(frozen=True)
class _Passes:
    """The kernels of one call, which compute P and dS again: the problem, its copies and the row states."""

    call: QuantizedCall
    problem: Problem
    columns: Columns
    dout: Tensor
    row_max: Tensor
    row_sum: Tensor
    configs: BackwardConfigs
    dot: bool

    @classmethod
    def of(cls, call: QuantizedCall, dout: Tensor, saved: Saved) -> _Passes:
        inputs = call.inputs
        problem = attention_problem(replace(inputs, k=call.operands.k.backward(call.config)))
        tensors = (inputs.q, inputs.k, call.operands.v.backward(call.config), dout)
        parts: list[Any] = [part for tensor in tensors for part in turned(tensor, inputs.packed)]
        device = inputs.q.device
        return cls(call, problem, Columns(*parts), dout, saved[2], saved[3], backward_configs(device), platform(device) == "cuda")

    def delta(self, dlse: Tensor | None, dsink: Tensor | None) -> Tensor:
        """float32 [rows] in the shape of LSE; with ``dsink``, of that shape, the rows' sink gradients as well."""
        delta = torch.empty_like(self.row_max)
        config = self._fitted(self.configs.delta, of_rows=True)
        grid = row_grid(self.call.inputs, self.problem.sizes, config.owners)
        if grid.programs == 0 or delta.numel() == 0:
            return delta
        options = {"ROWS": config.owners, "CHUNK": config.chunk, "DOT": self.dot, **config.options}
        if self.call.config.high_precision_delta:
            chains_kernel.attention_delta[(grid.programs,)](*self._shared(grid), dlse, delta, dsink, **options)
        else:
            quantized = {"QUANTIZE": self.call.config.quantize_p, **options}
            kernel.qat_delta[(grid.programs,)](*self._shared(grid), *p_scales(self.call.config), dlse, delta, dsink, **quantized)
        return delta

    def query_sums(self, delta: Tensor, dq: Tensor) -> None:
        self._sum(chains_kernel.attention_query_sums, (delta,), dq, of_rows=True, chains=2)

    def key_sums(self, delta: Tensor, q: Tensor, dk: Tensor) -> None:
        self._sum(chains_kernel.attention_key_sums, (delta, *self._lying(q)), dk, of_rows=False, chains=2)

    def value_sums(self, dv: Tensor) -> None:
        config = self.call.config
        operands = (*p_scales(config), *self._lying(self.dout))
        self._sum(kernel.qat_value_sums, operands, dv, of_rows=False, chains=1, QUANTIZE=config.quantize_p)

    def _sum(self, sums: Any, operands: tuple[Any, ...], result: Tensor, *, of_rows: bool, chains: int, **constants: Any) -> None:
        """One gradient by its kernel: over every pair, then, where that left a NaN, without the terms of masked pairs."""
        config = self._sums(result, of_rows=of_rows)
        grid = (row_grid if of_rows else key_grid)(self.call.inputs, self.problem.sizes, config.owners)
        if grid.programs == 0 or result.numel() == 0:
            return
        spoiled = torch.zeros(grid.programs, dtype=torch.int32, device=result.device)
        for select in _SELECTIONS:
            sums[(grid.programs,)](
                *self._shared(grid),
                *operands,
                result,
                *result_strides(result, self.call.inputs.packed),
                spoiled,
                SELECT=select,
                **constants,
                **self._options(_selecting(config, chains) if select else config, result, of_rows=of_rows),
            )

    def _lying(self, tensor: Tensor) -> tuple[Any, ...]:
        """A tensor and its strides."""
        return tensor, *result_strides(tensor, self.call.inputs.packed), tensor.stride(-1)

    def _shared(self, grid: Grid) -> tuple[Any, ...]:
        """The first arguments of every kernel."""
        return self.problem.arrays, self.problem.sizes.encoded, self.columns, grid.plan, grid.per_item, self.row_max, self.row_sum

    def _sums(self, result: Tensor, *, of_rows: bool) -> PairConfig:
        return self._fitted(self.configs.of_sums(result.shape[-1], of_rows=of_rows), of_rows=of_rows)

    def _fitted(self, config: PairConfig, *, of_rows: bool) -> PairConfig:
        """``config`` with blocks that suit this problem (``block_sides``); their owners are rows or, else, keys."""
        if of_rows:
            owners, others = block_sides(self.problem.sizes, config.owners, config.others)
        else:
            others, owners = block_sides(self.problem.sizes, config.others, config.owners)
        return replace(config, owners=owners, others=others)

    def _options(self, config: PairConfig, result: Tensor, *, of_rows: bool) -> dict[str, Any]:
        """Compile-time arguments of a sum but SELECT, and compiler options."""
        rows, keys = (config.owners, config.others) if of_rows else (config.others, config.owners)
        sizes = {"ROWS": rows, "KEYS": keys, "COLUMNS": padded(result.shape[-1]), "CHUNK": config.chunk}
        return {**sizes, "DOT": self.dot, "INTEGER_ROUNDING": INTERPRETED, **config.options}


def _selecting(config: PairConfig, chains: int) -> PairConfig:
    """For the launch that leaves terms out: it keeps its operands in registers, so it has fewer. ``chains`` of a pair are 2 with dP."""
    return config if INTERPRETED else replace(config, others=32 // chains, chunk=16 * chains)
