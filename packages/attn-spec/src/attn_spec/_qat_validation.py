"""Checks of one call of ``qat_attention``, shared by every backend that has it."""

from __future__ import annotations

from collections.abc import Mapping

from attn_spec._errors import UnsupportedProblem
from attn_spec._qat import QATConfig
from attn_spec._validation import ArrayInfo, _boolean, _check_devices, _check_options, _equal, _float, _heads, _rank

__all__ = ["check_qat_attention"]

_OP = "qat_attention"
_HEAD_DIMS = range(16, 257, 16)


def check_qat_attention(
    backend: str, arrays: Mapping[str, ArrayInfo | None], *, causal: bool, scale: float | None, config: QATConfig
) -> None:
    """Check shapes, dtypes, devices and options, then what the configuration refuses.

    ``arrays`` has q [B, H, S, D], k and v [B, K, T, D] and key_padding_mask [B, T] or None.

    Raises:
        TypeError, ValueError: a bad argument, by name and value.
        UnsupportedProblem: a configuration that a causal call would break, with every reason.
    """
    if not isinstance(config, QATConfig):
        raise TypeError(f"{_OP}: config must be a QATConfig; got {type(config).__name__}")
    given = {name: info for name, info in arrays.items() if info is not None}
    _check_devices(_OP, given)
    _check_options(_OP, {"scale": scale, "causal": causal})
    _float(_OP, given, "q", "k", "v")
    _rank(_OP, given, 4, "B, heads, length, D", "q", "k", "v")
    q, k, v = (given[name].shape for name in ("q", "k", "v"))
    _equal(_OP, "batch sizes", q=q[0], k=k[0], v=v[0])
    _equal(_OP, "kv heads", k=k[1], v=v[1])
    _equal(_OP, "key lengths", k=k[2], v=v[2])
    _equal(_OP, "head dims", q=q[3], k=k[3], v=v[3])
    _heads(_OP, q[1], k[1])
    if q[3] not in _HEAD_DIMS:
        raise ValueError(f"{_OP}: the head dim must be a multiple of 16 from 16 to 256; got {q[3]}")
    _boolean(_OP, given, "key_padding_mask", (k[0], k[2]), "B, T")
    reasons = config.reasons(causal=causal)
    if reasons:
        raise UnsupportedProblem(backend, reasons)
