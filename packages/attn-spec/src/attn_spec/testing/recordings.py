"""Calls and their results as recordings, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from attn_spec._backend import Call
from attn_spec._qat import QATConfig
from attn_spec._trace import Recording

__all__ = ["Recording", "record", "replay"]


def record(call: Call, results: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> Recording:
    """A call and its results as a recording; ``header`` says where it is from. ``Recording.save(path)`` writes it."""
    arrays = {f"in.{name}": array for name, array in call.arrays.items()}
    arrays |= {f"cotangent.{name}": array for name, array in (call.cotangents or {}).items()}
    arrays |= {f"out.{name}": array for name, array in results.items()}
    options = {name: asdict(value) if isinstance(value, QATConfig) else value for name, value in call.options.items()}
    contract = call.problem().contract if call.contract is None else call.contract
    described = {"op": call.op, "options": options, "wrt": list(call.wrt), "contract": contract}
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
    if "config" in options:
        options["config"] = QATConfig(**header["options"]["config"])
    call = Call(header["op"], parts["in"], options, parts["cotangent"] or None, tuple(header["wrt"]), header["contract"])
    return call, parts["out"]
