"""Launches of the attention forward kernels: results and workspaces; no arithmetic happens here."""

from __future__ import annotations

import math

import torch
from attn_spec import UnsupportedProblem
from attn_spec.torch import AttentionInputs
from torch import Tensor

from attn_triton import _pairs_launch
from attn_triton._configuration import on_device
from attn_triton._pairs_launch import Pairs, configs_of, pairs_of
from attn_triton._problem import MAX_HEAD_DIM, attention_problem, fresh_results
from attn_triton._remembered_launch import Kinds, Launches, kind_of, options_of, tensors_of

__all__ = ["attention_forward", "check_supported"]

_KINDS = Kinds()


def check_supported(inputs: AttentionInputs) -> None:
    """Refuse what the kernels lack when they are called below the public functions."""
    reasons = []
    if inputs.dropout_seed is not None or inputs.dropout_p > 0.0:
        reasons.append("dropout (not supported)")
    widest = max(inputs.q.shape[-1], inputs.v.shape[-1])
    if widest > MAX_HEAD_DIM:
        reasons.append(f"head_dim={widest} (supported: up to {MAX_HEAD_DIM})")
    if reasons:
        raise UnsupportedProblem("attn_triton", reasons)


def attention_forward(inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (layout of q, V columns, ``out_dtype``), LSE, row max and row sum (float32, ``inputs.row_shape``)."""
    check_supported(inputs)
    q, given = inputs.q, tensors_of(inputs)
    out, lse, row_max, row_sum = results = fresh_results(inputs, out_dtype)
    if lse.numel():
        configs, few = configs_of(inputs)
        sign = math.copysign(1.0, inputs.scale)  # 0.0 equals -0.0
        kind = kind_of(given, few, sign, _pairs_launch.WORKSPACE, out_dtype, *options_of(inputs))
        launches = _KINDS.get(kind, configs)
        with on_device(q):
            if launches is not None:
                launches.again((*given, *results))
            else:
                launches = Launches((*given, *results), configs)
                _forward(pairs_of(inputs, attention_problem(inputs), launches), out, (lse, row_max, row_sum))
                _KINDS.keep(kind, launches)
    return results


def _forward(pairs: Pairs, out: Tensor, states: tuple[Tensor, Tensor, Tensor]) -> None:
    inputs, ranges = pairs.inputs, pairs.ranges(1)
    (scores,), of_tiles = pairs.numbers(1), pairs.sums(1, 2)
    copies = None if pairs.few else (pairs.rows_copy(inputs.q), pairs.keys_copy(inputs.k))
    values = pairs.values(inputs.v)
    for space in pairs.workspaces(1):
        if copies is None:
            pairs.scores_of_few(space, scores, ranges)
        else:
            pairs.products(space, *copies, scores, ranges, final=True)
        pairs.states(space, scores, ranges, of_tiles, states)
        pairs.probabilities(space, scores, ranges, *states[1:])
        pairs.row_sums(space, scores, ranges, values, 1.0, out)
