"""The NVFP4 quantizer: numpy against the nearest entry of a table, and the C++ header against numpy, byte for byte."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attn_spec import bfloat16, include_dir, nvfp4
from attn_spec._arrays import from_float32, to_float32
from attn_spec.testing.asserts import assert_bytes

F32 = np.float32
SOURCE = Path(__file__).with_name("nvfp4.cpp")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
OUTERS = ("none", "row", "tile", 2048.0, 2688.0, 2.0**-20)
E4M3 = [(1 + m / 8) * 2.0 ** (e - 7) if e else m * 2.0**-9 for e in range(16) for m in range(8)][:0x7F]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is missing: these tests compile the contract's headers"
    target = tmp_path_factory.mktemp("nvfp4") / "nvfp4.so"
    command = [compiler, *FLAGS, f"-I{include_dir()}", str(SOURCE), "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(target))


def call(function: object, *arrays: np.ndarray | int) -> None:
    arguments = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int(a) for a in arrays[:-1]]
    function(*arguments, ctypes.c_int64(int(arrays[-1])))  # type: ignore[operator]


def around(table: list[float]) -> np.ndarray:
    """Each entry and each midpoint of ``table``, with the float32 neighbours of both."""
    middle = np.array([*table, *((a + b) / 2 for a, b in pairwise(table))], F32)
    return np.concatenate([middle, np.nextafter(middle, F32(-1)), np.nextafter(middle, F32(1e9))])


def nearest(value: float, table: list[float]) -> int:
    """Index of the nearest entry, the even index of two, the last beyond the end."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - min(value, table[-1])), i % 2))


MAGNITUDES = np.concatenate([np.abs(around([0, 0.5, 1, 1.5, 2, 3, 4, 6])), np.array([6.5, 7, 8, 1e9, np.inf, 1e-40, 3e38], F32)])
SCALES = np.concatenate([np.abs(around(E4M3)), np.array([464, 480, 1e4, np.inf, 1e-40, 3e38], F32)])


def test_e2m1_is_the_nearest_value_and_the_even_code_of_two(library: ctypes.CDLL) -> None:
    expected = np.array([nearest(float(value), [0, 0.5, 1, 1.5, 2, 3, 4, 6]) for value in MAGNITUDES], np.uint8)
    values = np.concatenate([MAGNITUDES, -MAGNITUDES])
    expected = np.concatenate([expected, expected | 8])
    assert_bytes(nvfp4.encode_e2m1(values), expected, "numpy")
    found = np.empty(values.shape, np.uint8)
    call(library.encode_e2m1, values, found, values.size)
    assert_bytes(found, expected, "C++")
    ties = nvfp4.encode_e2m1(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], F32))
    assert ties.tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_e4m3_is_the_nearest_value_and_saturates(library: ctypes.CDLL) -> None:
    expected = np.array([nearest(float(value), E4M3) for value in SCALES], np.uint8)
    values, expected = np.append(SCALES, F32(np.nan)), np.append(expected, np.uint8(0x7F))
    assert_bytes(nvfp4.encode_e4m3(values), expected, "numpy")
    found = np.empty(values.shape, np.uint8)
    call(library.encode_e4m3, values, found, values.size)
    assert_bytes(found, expected, "C++")
    assert nvfp4.encode_e4m3(np.array([449, 1e4, 2.0**-10, 2.0**-10 * 1.001], F32)).tolist() == [0x7E, 0x7E, 0, 1]


def test_every_code_and_every_scale_decodes(library: ctypes.CDLL) -> None:
    codes, scales = np.arange(16, dtype=np.uint8), np.arange(256, dtype=np.uint8)
    found = np.empty(16, F32)
    call(library.decode_e2m1, codes, found, 16)
    assert_bytes(found, nvfp4.CODES, "E2M1")
    assert_bytes(nvfp4.encode_e2m1(nvfp4.CODES), codes, "E2M1 there and back")
    expected = np.array([*E4M3, np.nan, *(-value for value in E4M3), np.nan], F32)
    assert_bytes(nvfp4.decode_e4m3(scales), expected, "E4M3 in numpy")
    found = np.empty(256, F32)
    call(library.decode_e4m3, scales, found, 256)
    assert_bytes(found, expected, "E4M3 in C++")
    assert_bytes(nvfp4.encode_e4m3(expected[:127]), scales[:127], "E4M3 there and back")


def edge_values() -> np.ndarray:
    """[70, 48]: ordinary blocks, zeros of both signs, underflow, saturation, NaN and infinities in some rows, ties on the scaled grid."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((70, 48)) * np.exp2(rng.integers(-30, 30, (70, 1)))).astype(F32)
    x[0, :16], x[1] = 0, -0.0
    x[2, ::2] = -0.0
    x[3] = np.where(np.arange(48) % 2, 6 * 2.0**-10, -1e-4)
    x[4] = np.where(np.arange(48) % 2, 6 * 2.0**-10 * 1.01, -1e-4)
    x[5, 3], x[6, 3], x[7, 40] = 3e38, -2689, 2688
    x[8, 20], x[9, 20], x[10, 5] = np.nan, np.inf, -np.inf
    x[11, :16] = np.resize(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75], F32), 16)
    x[12] = 1e-42
    return x


def row_by_row(x: np.ndarray, outer: nvfp4.Outer) -> tuple[np.ndarray, int]:
    """The outer argument of each block for the C++ entry point, and its kind."""
    with np.errstate(invalid="ignore"):
        if outer == "none":
            return np.ones((x.shape[0], 3), F32), 0
        if outer == "row":
            return np.repeat(np.abs(x).max(-1, keepdims=True), 3, -1), 1
        if outer == "tile":
            tiles = [np.full((len(x[at : at + 32]), 3), np.abs(x[at : at + 32]).max(), F32) for at in range(0, len(x), 32)]
            return np.concatenate(tiles), 1
    return np.full((x.shape[0], 3), outer, F32), 2


@pytest.mark.parametrize("outer", OUTERS)
def test_the_header_and_numpy_give_the_same_bytes(library: ctypes.CDLL, outer: nvfp4.Outer) -> None:
    x = edge_values()
    if outer == "tile":
        x[8, 20] = 1.0  # one tile of the three stays finite
        x[9, 20] = 2.0
        x[10, 5] = np.nan_to_num(x[10, 6])
        x[40, 1] = np.nan
    packed = nvfp4.quantize(x, outer=outer)
    argument, kind = row_by_row(x, outer)
    codes, scales, decoded = np.empty((70, 24), np.uint8), np.empty((70, 3), np.uint8), np.empty((70, 48), F32)
    call(library.quantize, x, np.ascontiguousarray(argument), kind, codes, scales, decoded, scales.size)
    assert_bytes(packed.codes, codes, "codes")
    assert_bytes(packed.scales, scales, "scales")
    assert_bytes(nvfp4.dequantize(packed), decoded, "values")
    assert np.isnan(decoded).any() and np.isfinite(decoded).any()


def test_blocks_of_zeros_are_exactly_positive_zero() -> None:
    x = edge_values()
    packed = nvfp4.quantize(x)
    values = nvfp4.dequantize(packed)
    assert not packed.codes[:2, :8].any() and not packed.scales[1].any()
    assert not values[1].view(np.uint32).any()
    assert not values[3].view(np.uint32).any(), "the largest scale that rounds to zero"
    assert values[4, 1] == 3 * 2.0**-9 and np.signbit(values[4, 0]) and values[4, 0] == 0, (
        "the smallest scale; a small negative value is -0"
    )


def test_nonfinite_values_stay_in_their_scope() -> None:
    x = edge_values()
    values = nvfp4.dequantize(nvfp4.quantize(x))
    for row, block in ((8, 1), (9, 1), (10, 0)):
        expected = np.zeros(48, bool)
        expected[block * 16 : block * 16 + 16] = True
        assert (np.isnan(values[row]) == expected).all()
    row = nvfp4.dequantize(nvfp4.quantize(x, outer="row"))
    assert (np.isnan(row).all(-1) == ~np.isfinite(x).all(-1)).all() and not np.isnan(row[np.isfinite(x).all(-1)]).any()


def test_saturation_and_known_values() -> None:
    x = np.array([[3e38, *[0] * 15], [6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -6, *[0] * 7]], F32)
    values = nvfp4.dequantize(nvfp4.quantize(x))
    assert values[0, 0] == 2688
    assert values[1, :9].tolist() == [6, 4, 4, 2, 2, 1, 1, 0, -6]


def test_rounding_the_block_scale_decides_the_codes() -> None:
    """The codes divide by the rounded scale: a quantizer that divides by the exact one gives other bytes."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((256, 16)).astype(F32)
    packed = nvfp4.quantize(x)
    exact = nvfp4.encode_e2m1(x / (np.abs(x).max(-1, keepdims=True) / F32(6)))
    assert not np.array_equal(packed.codes, exact[:, ::2] | (exact[:, 1::2] << 4))
    relative = np.abs(nvfp4.dequantize(packed) - x).max(-1) / np.abs(x).max(-1)
    assert 0 < relative.max() < 0.25


@pytest.mark.parametrize("length", (0, 1, 15, 16, 17, 40))
def test_a_short_last_block_is_padded_with_zeros(length: int) -> None:
    x = np.random.default_rng(length).standard_normal((2, 3, length)).astype(F32)
    packed = nvfp4.quantize(x)
    assert packed.codes.shape == (2, 3, -(-length // 16) * 8) and packed.scales.shape == (2, 3, -(-length // 16))
    padded = np.pad(x, ((0, 0), (0, 0), (0, -length % 16)))
    assert_bytes(nvfp4.dequantize(packed), nvfp4.dequantize(nvfp4.quantize(padded))[..., :length], "values")


def test_half_types_strides_and_the_order_of_codes() -> None:
    x = np.random.default_rng(2).standard_normal((32, 64)).astype(F32)
    brain = from_float32(x, "bfloat16")
    assert brain.dtype == bfloat16
    assert_bytes(nvfp4.quantize(brain).codes, nvfp4.quantize(to_float32(brain)).codes, "bfloat16")
    assert_bytes(nvfp4.quantize(x.T).codes, nvfp4.quantize(np.ascontiguousarray(x.T)).codes, "a transposed view")
    assert nvfp4.quantize(np.array([6, -0.5, *[0] * 14], F32)).codes.tolist() == [0x97, *[0] * 7]
    exact = nvfp4.dequantize(nvfp4.quantize(x))
    assert_bytes(to_float32(from_float32(exact, "bfloat16")), exact, "values without an outer scale are bfloat16 numbers")


@pytest.mark.parametrize(
    ("x", "outer", "error", "message"),
    [
        (np.zeros(16), "none", TypeError, "x has dtype float64"),
        (np.zeros(16, F32), "tile", ValueError, r"x must have 2 axes or more; got shape \[16\]"),
        (np.zeros(16, F32), "block", ValueError, "outer must be one of none, tile, row or a number; got 'block'"),
        (np.zeros(16, F32), True, TypeError, "got True"),
        (np.zeros(16, F32), 0.0, ValueError, r"must lie in \[2\*\*-24, 2\*\*24\]; got 0.0"),
        (np.zeros(16, F32), float("nan"), ValueError, "got nan"),
    ],
)
def test_bad_arguments_are_named(x: np.ndarray, outer: nvfp4.Outer, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nvfp4.quantize(x, outer=outer)
