"""``attention_partial`` and ``merge_partials`` of ``sm90-v1``: the bits of one call over all keys."""

from __future__ import annotations

from attn_spec.torch import PartialOperators, Partials
from attn_spec.torch._acceptance import Acceptance

from attn_triton._sm90_launch import attention_states, merged_states
from attn_triton.backend import BACKEND

__all__ = ["Partials", "attention_partial", "merge_partials"]

_OPERATORS = PartialOperators(Acceptance(BACKEND, "triton"), attention_states, merged_states)
attention_partial = _OPERATORS.attention_partial
merge_partials = _OPERATORS.merge_partials
