"""The arithmetic headers compiled by clang for AMD GPUs and run in the interpreter give the bits of the host compiler."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_code import ROOT, TARGETS, compiled_with_headers
from interpreter import Device, Module

COUNT = 1 << 15
THREADS = 1024
Play = Callable[[str], Device]
EDGES = [
    0x00000000,
    0x80000000,
    0x00000001,
    0x807FFFFF,
    0x00800000,
    0x3F800000,
    0xBF800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
]


class Dropout(ctypes.Structure):
    _fields_ = (("seed", ctypes.c_uint64), ("threshold", ctypes.c_uint64), ("keep_scale", ctypes.c_float))


class RowState(ctypes.Structure):
    _fields_ = (("max", ctypes.c_float), ("sum", ctypes.c_float))


def patterns(seed: int, count: int = COUNT) -> np.ndarray:
    """Any bits at all, and every pair of edges at the end of two of them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    grid = np.array([EDGES] * len(EDGES), np.uint32)
    bits[: grid.size] = (grid if seed % 2 else grid.T).ravel()
    return bits.view(np.float32)


def plain(seed: int, scale: float) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(COUNT)).astype(np.float32)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; the contract says where a NaN is, not which."""
    nan = np.isnan(expected) if expected.dtype == np.float32 else np.zeros(expected.shape, bool)
    if expected.dtype == np.float32:
        assert (np.isnan(found) == nan).all()
    integers = np.dtype(f"u{expected.itemsize}")
    assert (found.view(integers)[~nan] == expected.view(integers)[~nan]).all()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("host") / "arithmetic.so"
    include = f"-I{ROOT}/packages/attn-spec/src/attn_spec/include"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", include, "-o", str(library)]
    subprocess.run(["g++", *flags, str(Path(__file__).with_name("host_arithmetic.cpp"))], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", params=TARGETS)
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    source = ROOT / "ci" / "arithmetic" / "device.hip"
    return request.param, compiled_with_headers(source, request.param, tmp_path_factory.mktemp("device") / "device.co")


class Both:
    """Runs a routine on the device and on the host, each on its own copies of the arrays."""

    def __init__(self, device: Device, module: Module, host: ctypes.CDLL) -> None:
        self.device, self.module, self.host = device, module, host

    def run(self, name: str, *arrays: np.ndarray, values: tuple[Any, ...] = (), threads: int = THREADS, count: int = COUNT) -> None:
        """Compare every array afterwards, byte for byte. ``values`` are passed after the arrays, by value to the kernel."""
        found, expected = [array.copy() for array in arrays], [array.copy() for array in arrays]
        for array in found:
            self.device.register(array.ctypes.data, array.nbytes)
        for first in range(0, count, threads):
            starts = [ctypes.c_void_p(array.ctypes.data + first * (array.nbytes // count)) for array in found]
            self.module.launch(name, [1], [threads], [*starts, *values])
        getattr(self.host, name)(count, *(ctypes.c_void_p(a.ctypes.data) for a in expected), *(ctypes.byref(v) for v in values))
        assert any((a.view(np.uint8) != b.view(np.uint8)).any() for a, b in zip(found, arrays, strict=True)), "nothing was computed"
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@pytest.fixture
def both(play: Play, code: tuple[str, bytes], host: ctypes.CDLL) -> Both:
    device = play(code[0])
    return Both(device, device.module(code[1]), host)


def test_exponential(both: Both) -> None:
    both.run("exponential", -np.abs(patterns(1)))
    both.run("exponential", -np.abs(plain(2, 60.0)))


def test_logarithm(both: Both) -> None:
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        both.run("logarithm", np.float32(1) + np.abs(patterns(3)))


def test_score_gradient(both: Both) -> None:
    both.run("score_gradient", patterns(1), patterns(2), patterns(3))
    both.run("score_gradient", plain(4, 1.0), plain(5, 1.0), plain(6, 1.0))


def test_merge_of_row_states(both: Both) -> None:
    rows, tiles = (np.stack((plain(seed, 40.0), 1 + np.abs(plain(seed + 1, 9.0))), axis=1) for seed in (1, 3))
    rows[::7, 0], tiles[::5, 0], tiles[::77, 0] = -np.inf, -np.inf, np.nan
    both.run("merge", rows, tiles)


def test_conversion(both: Both) -> None:
    halves = np.zeros(COUNT, np.uint16)
    both.run("conversion", patterns(1), halves, halves)
    both.run("conversion", plain(2, 1e-5), halves, halves)


def test_tree(both: Both) -> None:
    for slots in (plain(1, 1.0)[:512], np.concatenate((plain(2, 1.0)[:256], patterns(3)[:256]))):
        both.run("tree", slots, threads=1, count=1)


def test_dropout(both: Both) -> None:
    decision = Dropout(0x0123456789ABCDEF, 1 << 31, 2.0)
    both.run("dropout", np.full(THREADS, 7, np.uint8), values=(decision,), count=THREADS)


def test_chain(both: Both) -> None:
    both.run("chain", patterns(1), patterns(2), patterns(3))
    both.run("chain", plain(4, 1.0), plain(5, 1.0), plain(6, 1e-7))


@pytest.mark.parametrize("total", (1.0, 3.7, 1e30, 2.0**-126, 3e-42))
@pytest.mark.parametrize("error", (0, 11, 12))
def test_probability(both: Both, total: float, error: int) -> None:
    """IEEE division, whatever the reciprocal within one unit in the last place, with quotients from subnormal to infinite."""
    both.device.set_reciprocal_error(error)
    both.run("probability", -np.abs(plain(1, 40.0)), values=(RowState(0.0, total),))
    assert both.module.executed("v_rcp_f32") > 0
    assert both.module.executed("v_exp") == 0
