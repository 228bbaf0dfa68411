"""Provenance of a result, and recordings (inputs, outputs, provenance) that another machine can replay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attn_spec._arrays import bfloat16, numpy_dtype

__all__ = ["Recording", "Trace"]


@dataclass(frozen=True)
class Trace:
    """Which build computed a result, under which contract, and which backends were passed over on the way, with their reasons; for 4-bit
    attention also the fingerprint of its ``QATConfig``."""

    op: str
    selected_backend: str
    contract: str
    reduction_order: str
    accumulator_precision: str
    split_k: bool | None
    tf32: bool | None
    kernel_fingerprint: str
    platform: str
    fallback: bool = False
    prior_rejections: tuple[str, ...] = ()
    config: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Recording:
    """Arrays with a JSON header, stored as safetensors. Inputs are named ``in.NAME``, results ``out.NAME``, cotangents
    ``cotangent.NAME``."""

    arrays: Mapping[str, np.ndarray]
    header: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; the header is JSON under the metadata key ``attn``."""
        index: dict[str, Any] = {"__metadata__": {"attn": json.dumps(self.header, sort_keys=True)}}
        chunks, offset = [], 0
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            data = array.tobytes()
            index[name] = {
                "dtype": _TO_SAFETENSORS[_name(array.dtype)],
                "shape": list(array.shape),
                "data_offsets": [offset, offset + len(data)],
            }
            chunks.append(data)
            offset += len(data)
        head = json.dumps(index).encode()
        head += b" " * (-len(head) % 8)
        Path(path).write_bytes(len(head).to_bytes(8, "little") + head + b"".join(chunks))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a safetensors file written by ``save`` (or by any other writer: the header is then its metadata)."""
        content = Path(path).read_bytes()
        size = int.from_bytes(content[:8], "little")
        if size > len(content) - 8:
            raise ValueError(f"{path} is not a safetensors file")
        index = json.loads(content[8 : 8 + size])
        metadata = index.pop("__metadata__", {})
        arrays = {}
        for name, entry in index.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            dtype = numpy_dtype(_FROM_SAFETENSORS[entry["dtype"]])
            arrays[name] = np.frombuffer(content[begin:end], dtype=dtype).reshape(entry["shape"])
        return cls(arrays, json.loads(metadata["attn"]) if "attn" in metadata else metadata)


def _name(dtype: np.dtype) -> str:
    return "bfloat16" if dtype == bfloat16 else dtype.name


_TO_SAFETENSORS = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
_FROM_SAFETENSORS = {value: key for key, value in _TO_SAFETENSORS.items()}
