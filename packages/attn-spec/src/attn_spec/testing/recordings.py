"""Calls and their results as recordings, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_spec._backend import Call
from attn_spec._trace import Recording

__all__ = ["record", "replay"]

_UNNAMED = "ordered-v1"
"""The contract of a call that names none."""


def record(call: Call, results: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> Recording:
    """A call and its results as a recording; ``header`` says where it is from."""
    arrays = {f"in.{name}": array for name, array in call.arrays.items()}
    arrays |= {f"cotangent.{name}": array for name, array in (call.cotangents or {}).items()}
    arrays |= {f"out.{name}": array for name, array in results.items()}
    described = {"op": call.op, "options": dict(call.options), "wrt": list(call.wrt), "contract": call.contract or _UNNAMED}
    return Recording(arrays, {**header, **described})


def replay(recording: Recording) -> tuple[Call, dict[str, np.ndarray]]:
    """The call of a recording and the results that it must give. ValueError where the header describes no call."""
    header = recording.header
    missing = [name for name in ("op", "options", "wrt", "contract") if name not in header]
    if missing:
        raise ValueError(f"the recording describes no call: its header lacks {', '.join(missing)}")
    parts: dict[str, dict[str, np.ndarray]] = {"in": {}, "cotangent": {}, "out": {}}
    for name, array in recording.arrays.items():
        kind, _, argument = name.partition(".")
        if kind not in parts:
            raise ValueError(f"the recording describes no call: array {name} is none of in.*, cotangent.*, out.*")
        parts[kind][argument] = array
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in header["options"].items()}
    call = Call(header["op"], parts["in"], options, parts["cotangent"] or None, tuple(header["wrt"]), header["contract"])
    return call, parts["out"]
