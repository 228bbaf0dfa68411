"""The operators as data: one table that dispatcher, validation, checks, traces and reports read.

Axes, used everywhere: B batch, H query heads, K kv heads, S queries, T keys, D head dim of q and k, V head dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_spec._errors import UnknownName

__all__ = ["DTYPES", "OPERATORS", "PRODUCTION", "QAT", "Operator", "operator"]

DTYPES = ("float32", "bfloat16", "float16")
PRODUCTION = "attn"
"""The operator that is production attention, outside every contract; never a substitute for ``attention``."""
QAT = ("qat_attention", "qat_attention_varlen")
"""The operators that take a ``QATConfig``."""


@dataclass(frozen=True)
class Operator:
    """One public operator.

    ``inputs`` and ``optional`` are array arguments, ``options`` keyword options; ``gradients`` names the array arguments that have one.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def arrays(self) -> tuple[str, ...]:
        return self.inputs + self.optional


_ATTENTION_OPTIONS = ("causal", "scale", "window", "dropout_p", "dropout_seed", "return_lse")
_QAT_OPTIONS = ("causal", "scale", "config", "return_lse")

OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator("joint_attn_qk_gemm", ("q", "k"), ("scores",), ("q", "k"), options=("scale", "out_dtype")),
        Operator("joint_attn_softmax", ("scores",), ("probs",), ("scores",), optional=("key_padding_mask",)),
        Operator("joint_attn_av_gemm", ("probs", "v"), ("out",), ("probs", "v")),
        Operator(
            "joint_attention",
            ("q_txt", "k_txt", "v_txt", "q_img", "k_img", "v_img"),
            ("out_txt", "out_img"),
            ("q_txt", "k_txt", "v_txt", "q_img", "k_img", "v_img"),
            optional=("prompt_mask",),
            options=("scale",),
        ),
        Operator(
            "attention",
            ("q", "k", "v"),
            ("out", "lse"),
            ("q", "k", "v", "sinks", "bias"),
            optional=("key_padding_mask", "kv_lengths", "q_start", "k_start", "sinks", "bias"),
            options=_ATTENTION_OPTIONS,
        ),
        Operator(
            "attention_varlen",
            ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
            ("out", "lse"),
            ("q", "k", "v", "sinks"),
            optional=("seqlens_q", "seqlens_k", "sinks"),
            options=_ATTENTION_OPTIONS,
        ),
        Operator(
            "qat_attention",
            ("q", "k", "v"),
            ("out", "lse"),
            ("q", "k", "v", "sinks"),
            optional=("key_padding_mask", "sinks"),
            options=_QAT_OPTIONS,
        ),
        Operator(
            "qat_attention_varlen",
            ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
            ("out", "lse"),
            ("q", "k", "v", "sinks"),
            optional=("seqlens_q", "seqlens_k", "sinks"),
            options=_QAT_OPTIONS,
        ),
        Operator("attn", ("q", "k", "v"), ("out",), ("q", "k", "v"), options=("causal", "scale")),
    )
}


def operator(name: str) -> Operator:
    """The operator called ``name``; UnknownName lists the known ones."""
    if name not in OPERATORS:
        raise UnknownName("operator", name, OPERATORS)
    return OPERATORS[name]
