"""Recordings: what one machine writes, the safetensors library and another machine read, and the other way round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
from attn_spec import bfloat16
from attn_spec._arrays import from_float32
from attn_spec._compare import difference
from attn_spec._trace import Recording
from safetensors.numpy import load_file, save_file

VALUES = np.array([[1.5, -0.0, np.inf], [1e-42, -3e38, 0.1]], np.float32)
ARRAYS = {
    "in.q": VALUES,
    "in.half": from_float32(VALUES, "bfloat16"),
    "in.f16": from_float32(VALUES, "float16"),
    "in.mask": np.array([True, False]),
    "in.offsets": np.array([0, 2, 5], np.int32),
    "in.wide": np.array([2**40], np.int64),
    "out.empty": np.zeros((0, 3), np.float32),
    "out.strided": np.arange(8, dtype=np.float32)[::2],
}
HEADER = {"contract": "ordered-v1", "device": "cpu", "options": {"window": [1, None], "scale": 0.5}}


def test_a_recording_comes_back(tmp_path: Path) -> None:
    Recording(ARRAYS, HEADER).save(tmp_path / "a.safetensors")
    found = Recording.load(tmp_path / "a.safetensors")
    assert found.header == HEADER and set(found.arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert difference(found.arrays[name], array).equal, name


def test_the_safetensors_library_reads_a_recording(tmp_path: Path) -> None:
    Recording(ARRAYS, HEADER).save(tmp_path / "a.safetensors")
    plain = {name: array for name, array in ARRAYS.items() if array.dtype != bfloat16}
    Recording(plain, HEADER).save(tmp_path / "plain.safetensors")
    found = load_file(tmp_path / "plain.safetensors")
    for name, array in plain.items():
        assert difference(found[name], array).equal, name
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(ARRAYS) and "attn" in file.metadata()
        assert file.get_slice("in.half").get_dtype() == "BF16" and file.get_slice("in.half").get_shape() == [2, 3]


def test_a_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    save_file({"x": VALUES, "n": np.array([3], np.int64)}, tmp_path / "b.safetensors", metadata={"made": "elsewhere"})
    found = Recording.load(tmp_path / "b.safetensors")
    assert found.header == {"made": "elsewhere"} and difference(found.arrays["x"], VALUES).equal


def test_the_same_recording_has_the_same_bytes(tmp_path: Path) -> None:
    for name, arrays in (("a", ARRAYS), ("b", dict(reversed(ARRAYS.items())))):
        Recording(arrays, HEADER).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"\xff" * 16)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        Recording.load(tmp_path / "c")
