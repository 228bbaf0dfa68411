"""A frozen description of one call: what every backend is asked about, and what every error prints."""

from __future__ import annotations

from dataclasses import dataclass

from attn_spec._qat import QATConfig

__all__ = ["Problem"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of one operator, without its data.

    Sizes follow the axes of ``attn_spec``; for packed input ``batch`` counts segments and ``queries``/``keys`` are packed totals.
    ``features`` holds the name of each keyword that is used ("causal", "window", "sinks", ...) and "gradient" when a gradient is asked for.
    ``config`` is given for the operators of 4-bit attention alone.
    """

    op: str
    dtype: str
    device: str = "cpu"
    contract: str = "ordered-v1"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    queries: int = 1
    keys: int = 1
    head_dim: int = 1
    value_dim: int = 1
    features: frozenset[str] = frozenset()
    config: QATConfig | None = None

    def __str__(self) -> str:
        sizes = f"B={self.batch} H={self.heads} K={self.kv_heads} S={self.queries} T={self.keys} D={self.head_dim} V={self.value_dim}"
        used = " ".join(sorted(self.features) + ([] if self.config is None else [f"config={self.config.fingerprint}"]))
        return f"{self.op} {sizes} {self.dtype} {self.device} {self.contract}" + (f" {used}" if used else "")
