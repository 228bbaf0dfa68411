"""What Transformer Engine's attention calls name by enumeration: softmax, bias, mask and layout."""

from __future__ import annotations

from enum import Enum

__all__ = ["AttnBiasType", "AttnMaskType", "AttnSoftmaxType", "QKVLayout"]


class AttnSoftmaxType(Enum):
    """Denominator of the softmax: sum of exponentials; with 1 added; with exp of a learnable logit a head added."""

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off-by-one"
    LEARNABLE_SOFTMAX = "learnable"


class AttnBiasType(Enum):
    """Scores: ``scale * qk``; ``scale * (qk + bias)``; ``scale * qk + bias``; ``scale * qk - slope * distance``."""

    NO_BIAS = "no_bias"
    PRE_SCALE_BIAS = "pre_scale_bias"
    POST_SCALE_BIAS = "post_scale_bias"
    ALIBI = "alibi"


class AttnMaskType(Enum):
    """Visible pairs: padding hides what the sequence descriptor leaves out; causal starts at the top left, or ends at the bottom right."""

    NO_MASK = "no_mask"
    PADDING_MASK = "padding"
    CAUSAL_MASK = "causal"
    PADDING_CAUSAL_MASK = "padding_causal"
    CAUSAL_BOTTOM_RIGHT_MASK = "causal_bottom_right"
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = "padding_causal_bottom_right"

    def is_causal(self) -> bool:
        return "causal" in self.value

    def is_padding(self) -> bool:
        return self.value.startswith("padding")

    def is_bottom_right(self) -> bool:
        return self.value.endswith("bottom_right")


class QKVLayout(Enum):
    """Arrays of ``qkv``: (qkv [B, S, 3, H, D],), (q [B, S, H, D], kv [B, T, 2, K, D]) or (q, k, v).

    In the T layouts, of the same shapes, a sequence holds several segments.
    """

    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def is_thd(self) -> bool:
        return self.value.startswith("t")

    def is_qkvpacked(self) -> bool:
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)
