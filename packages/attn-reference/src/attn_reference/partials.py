"""``attention_partial`` and ``merge_partials`` of ``sm90-v1``: the bits of one call over all keys."""

from __future__ import annotations

import torch
from attn_spec.torch import AttentionInputs, PartialOperators, Partials
from attn_spec.torch._acceptance import Acceptance
from torch import Tensor

from attn_reference._host_kernels import KERNELS as HOST
from attn_reference._host_kernels import unavailable
from attn_reference._ieee import keeps_subnormals
from attn_reference._pytorch_kernels import KERNELS as DEFINITION
from attn_reference._rounding import nearest
from attn_reference._sm90_attention import State, fold, result
from attn_reference.backend import BACKEND

__all__ = ["Partials", "attention_partial", "merge_partials"]


def _states(inputs: AttentionInputs, count: int) -> tuple[Tensor, Tensor, Tensor]:
    compiled = inputs.q.device.type == "cpu" and unavailable() is None
    return (HOST if compiled else DEFINITION).attention_sm90_states(inputs, count)


@keeps_subnormals
def _merge(n: Tensor, l: Tensor, o: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    state = fold([State(*parts) for parts in zip(n, l, o, strict=True)])
    out, lse = result(state, None if sinks is None else sinks[:, None].expand(state.n.shape))
    return nearest(out, dtype), lse


_OPERATORS = PartialOperators(Acceptance(BACKEND, "pytorch"), _states, _merge)
attention_partial = _OPERATORS.attention_partial
merge_partials = _OPERATORS.merge_partials
