"""``QATConfig``: the numerics of 4-bit attention as one value instead of flags (docs/qat.md, docs/contracts/nvfp4-v1.md)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["LARGEST", "Outer", "QATConfig", "check_outer"]

Outer = Literal["none", "tile", "row"] | float
"""Second-level scale of the quantizer: none, from the largest magnitude of 32 rows or of one row, or a constant encoding scale."""

LARGEST = 2688.0
"""6 * 448, the largest code times the largest block scale: the outer scale of values up to 1."""
_KINDS = ("none", "tile", "row")
_LEAST, _MOST = 2.0**-24, 2.0**24


def check_outer(name: str, outer: Outer) -> None:
    """TypeError or ValueError unless ``outer`` is a known kind or a number in [2^-24, 2^24]."""
    if isinstance(outer, str):
        if outer not in _KINDS:
            raise ValueError(f"{name} must be one of {', '.join(_KINDS)} or a number; got {outer!r}")
    elif isinstance(outer, bool) or not isinstance(outer, (int, float)):
        raise TypeError(f"{name} must be one of {', '.join(_KINDS)} or a number; got {outer!r}")
    elif not (math.isfinite(outer) and _LEAST <= outer <= _MOST):
        raise ValueError(f"{name} as a number must lie in [2**-24, 2**24]; got {outer!r}")


@dataclass(frozen=True)
class QATConfig:
    """What is quantized, and how. The format is fixed: E2M1 codes, blocks of 16, E4M3 block scales.

    Attributes:
        enabled: False is ``attention`` of ``ordered-v1``, byte for byte.
        quantize_q, quantize_k, quantize_v, quantize_p: which operands are rounded to NVFP4. P is the same in both passes.
        qkv_outer: outer scale of Q, K and V.
        p_outer: outer scale of P: "none", "row" or a constant. ``exp(x - max)`` lies in [0, 1]; with the default 2688 = 6 * 448 a P of 1
            has the largest code and scale and stays 1 (with 2048 it becomes 1.03), and only blocks below 2.2e-6 of the row's largest P
            become zero ("none": below 5.9e-3).
        v_axis: the axis along which 16 values of V share a scale. "keys" is what a 4-bit product of P and V contracts over, and is
            refused for causal calls, where the block of a visible key holds later ones.
        smooth_q, smooth_k: subtract the mean over tokens, per batch item and head, before quantizing; refused for causal calls.
        high_precision_delta: delta of the softmax backward from the P before quantization; False takes the quantized one.
        quantized_backward: the products of the backward read the quantized Q, K and V; False reads them before quantization. P is
            that of the forward either way.

    Raises:
        TypeError, ValueError: a value of the wrong kind, with what is supported.
    """

    enabled: bool = True
    quantize_q: bool = True
    quantize_k: bool = True
    quantize_v: bool = True
    quantize_p: bool = True
    qkv_outer: Outer = "none"
    p_outer: Outer = LARGEST
    v_axis: Literal["keys", "head_dim"] = "keys"
    smooth_q: bool = False
    smooth_k: bool = False
    high_precision_delta: bool = True
    quantized_backward: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("qkv_outer", "p_outer", "v_axis") and not isinstance(value, bool):
                raise TypeError(f"QATConfig: {name} must be True or False; got {value!r}")
        check_outer("QATConfig: qkv_outer", self.qkv_outer)
        check_outer("QATConfig: p_outer", self.p_outer)
        if self.p_outer == "tile":
            raise ValueError("QATConfig: p_outer 'tile' would let one query change another's output; supported: none, row or a number")
        if self.v_axis not in ("keys", "head_dim"):
            raise ValueError(f"QATConfig: v_axis must be 'keys' or 'head_dim'; got {self.v_axis!r}")

    @classmethod
    def training(cls, *, causal: bool = False) -> QATConfig:
        """The recommended numerics: constant outer scale of P; V along keys as in 4-bit inference, for causal calls along the head dim."""
        return cls(v_axis="head_dim" if causal else "keys")

    @classmethod
    def fastvideo(cls) -> QATConfig:
        """FastVideo's Attn-QAT training configuration as close as correctness allows: V along the head dim, no outer scale of Q, K, V, no
        smoothing, delta in high precision. P keeps its outer scale: without one small probabilities vanish."""
        return cls(v_axis="head_dim")

    @property
    def p_scale(self) -> float:
        """``p_outer`` as an encoding scale: that of "row" is the one of the row's largest exponential, which is 1."""
        if isinstance(self.p_outer, str):
            return LARGEST if self.p_outer == "row" else 1.0
        return float(self.p_outer)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name this configuration, the same in every process."""
        fields = {
            name: float(value) if name.endswith("_outer") and not isinstance(value, str) else value for name, value in asdict(self).items()
        }
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def reasons(self, *, contract: str = "nvfp4-ordered-v1", features: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Why a call that uses the keywords ``features`` is refused; empty when it is not.

        In a causal call no scale and no mean may span tokens that the mask separates. A sink and a log-sum-exp stand beside scores of the
        unsmoothed keys.
        """
        if not self.enabled:
            return ()
        found = [f"smooth_k with {name} (it needs the scores before smoothing)" for name in ("sinks", "return_lse") if name in features]
        found = found if self.smooth_k else []
        if self.smooth_q and contract != "nvfp4-ordered-v1":
            found.append(f"smooth_q with contract {contract} (nvfp4-ordered-v1 has it)")
        return (*found, *(self._causal_reasons() if "causal" in features else ()))

    def _causal_reasons(self) -> tuple[str, ...]:
        found = [f"{name} with causal=True (the mean holds later tokens)" for name in ("smooth_q", "smooth_k") if getattr(self, name)]
        quantized = self.quantize_q or self.quantize_k or self.quantize_v
        if self.qkv_outer == "tile" and quantized:
            found.append("qkv_outer='tile' with causal=True (a tile holds later tokens; supported: none, row or a number)")
        if self.quantize_v and self.v_axis == "keys":
            use = "use QATConfig.training(causal=True), v_axis='head_dim' or quantize_v=False"
            found.append(f"v_axis='keys' with causal=True (a block holds later tokens; {use})")
        return tuple(found)
