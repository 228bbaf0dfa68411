"""MFMA in the interpreter: where each element lies, and what the sums are, on gfx942.

Layouts: AMD's CDNA3 instruction set guide, chapter "Matrix Arithmetic Instructions"; LLVM's AMDGPU documentation names the instructions. No
document orders or rounds the sums bit by bit, so values are exact here only where every order gives the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_code import assembled
from interpreter import Device, DeviceFault, Module

Play = Callable[[str], Device]
SHAPES = {"32x32x8": (32, 8), "16x16x16": (16, 16)}

LOAD = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32_e32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
"""


def kernel(shape: str, *, added: str = "v[24:{last}]", before: str = "", options: str = "") -> str:
    """Loads A to v[8:9], B to v[10:11] and C to v[24:...], multiplies into v[40:...] and stores that."""
    registers = SHAPES[shape][0] ** 2 // 64
    loads = [f"  global_load_dword v{place}, v1, s[4:5] offset:{256 * i}" for i, place in enumerate(range(8, 12))]
    loads += [f"  s_add_u32 s4, s4, 1024\n  s_addc_u32 s5, s5, 0\n{_each('load', 24, registers, 's[4:5]')}"]
    matrix = f"  v_mfma_f32_{shape}_bf16 v[40:{39 + registers}], v[8:9], v[10:11], {added.format(last=23 + registers)} {options}"
    after = "  s_mov_b64 exec, -1\n  s_nop 15\n  s_nop 15\n" + _each("store", 40, registers, "s[6:7]")
    return "\n".join([LOAD, *loads, "  s_waitcnt vmcnt(0)", before, matrix, after])


def _each(kind: str, first: int, count: int, base: str) -> str:
    lines = []
    for i in range(count):
        data = f"v{first + i}, v1" if kind == "load" else f"v1, v{first + i}"
        lines.append(f"  global_{kind}_dword {data}, {base}")
        if i + 1 < count:
            low, high = base[2:-1].split(":")
            lines.append(f"  s_add_u32 s{low}, s{low}, 256\n  s_addc_u32 s{high}, s{high}, 0")
    return "\n".join(lines)


def bits(values: np.ndarray) -> np.ndarray:
    """Bfloat16 bits of float32 values that have no more of them."""
    found = values.astype(np.float32).view(np.uint32)
    assert not (found & 0xFFFF).any()
    return found >> 16


def factor(matrix: np.ndarray) -> np.ndarray:
    """Registers [2, 64] of A [side, depth], or of B transposed: lane i + side * (k // 4) holds k % 4, two to a register."""
    side, depth = matrix.shape
    found = np.zeros((2, 64), np.uint32)
    for i in range(side):
        for k in range(depth):
            found[k % 4 // 2, i + side * (k // 4)] |= np.uint32(bits(matrix[i, k : k + 1])[0]) << np.uint32(16 * (k % 2))
    return found


def place(i: int, j: int, side: int) -> tuple[int, int]:
    """Register and lane of C[i, j] or D[i, j]: four rows in neighbouring registers, then the next lanes, then the next four registers."""
    groups = 64 // side
    return 4 * (i // (4 * groups)) + i % 4, j + side * (i // 4 % groups)


def multiplied(device: Device, module: Module, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D [side, side] of A [side, depth], B [depth, side] and C, through the kernel."""
    side = a.shape[0]
    spots = [(i, j, *place(i, j, side)) for i in range(side) for j in range(side)]
    given = np.zeros((4 + side * side // 64, 64), np.uint32)
    given[:2], given[2:4] = factor(a), factor(b.T)
    for i, j, register, lane in spots:
        given[4 + register, lane] = c[i, j : j + 1].astype(np.float32).view(np.uint32)[0]
    written = np.full((side * side // 64, 64), np.nan, np.float32)
    for array in (given, written):
        device.register(array.ctypes.data, array.nbytes)
    module.launch(name, [1], [64], [ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(written.ctypes.data)])
    device.forget_registered()
    found = np.empty((side, side), np.float32)
    for i, j, register, lane in spots:
        found[i, j] = written[register, lane]
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    bodies: dict[str, str] = {}
    for shape in SHAPES:
        bodies |= {
            f"all_{shape}": kernel(shape),
            f"zero_{shape}": kernel(shape, added="0"),
            f"one_{shape}": kernel(shape, added="1.0"),
            f"no_exec_{shape}": kernel(shape, before="  s_mov_b64 exec, 0"),
            f"broadcast_{shape}": kernel(shape, options="cbsz:1"),
        }
    return assembled(bodies, "gfx942", tmp_path_factory.mktemp("matrix") / "kernels.co")


def small_integers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(-60, 61, shape).astype(np.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_identity_gives_the_other_factor(play: Play, image: bytes, shape: str) -> None:
    side, depth = SHAPES[shape]
    device, nothing, identity = play("gfx942"), np.zeros((side, side)), np.eye(side, depth)
    module = device.module(image)
    b = small_integers(depth, side)
    np.testing.assert_array_equal(multiplied(device, module, f"all_{shape}", identity, b, nothing), identity @ b)
    np.testing.assert_array_equal(multiplied(device, module, f"all_{shape}", b.T, identity.T, nothing), (identity @ b).T)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_element_of_a_factor_has_its_place(play: Play, image: bytes, shape: str) -> None:
    """A single 1 at [i, k] of A moves row k of B to row i; all other rows are those of C."""
    side, depth = SHAPES[shape]
    device, b, c = play("gfx942"), small_integers(depth, side), small_integers(side, side, seed=2)
    module = device.module(image)
    for spot in range(0, side * depth, 5):
        i, k = divmod(spot, depth)
        one = np.zeros((side, depth))
        one[i, k] = 1
        expected = c.copy()
        expected[i] += b[k]
        np.testing.assert_array_equal(multiplied(device, module, f"all_{shape}", one, b, c), expected, err_msg=str((i, k)))


def test_corners_by_hand(play: Play, image: bytes) -> None:
    """Registers and lanes written out, not by the functions above."""
    device = play("gfx942")
    module = device.module(image)
    for name, spots in {
        # (register and lane of A, register and lane of B) -> register and lane of D
        "zero_32x32x8": {((0, 0), (0, 0)): (0, 0), ((1, 5), (1, 31)): (5 - 4, 31 + 32), ((0, 63), (0, 34)): (15, 2 + 32)},
        "zero_16x16x16": {((0, 0), (0, 0)): (0, 0), ((1, 21), (1, 31)): (1, 15 + 16), ((0, 63), (0, 50)): (3, 2 + 48)},
    }.items():
        for ((register_a, lane_a), (register_b, lane_b)), (register, lane) in spots.items():
            given = np.zeros((20, 64), np.uint32)
            given[register_a, lane_a], given[2 + register_b, lane_b] = 0x40400000, 0x40A00000  # the upper half: 3 and 5
            written = np.full((16 if "32x32" in name else 4, 64), np.nan, np.float32)
            for array in (given, written):
                device.register(array.ctypes.data, array.nbytes)
            module.launch(name, [1], [64], [ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(written.ctypes.data)])
            device.forget_registered()
            assert [tuple(spot) for spot in np.argwhere(written)] == [(register, lane)], (name, register_a, lane_a)
            assert written[register, lane] == 15


@pytest.mark.parametrize("shape", SHAPES)
def test_sums(play: Play, image: bytes, shape: str) -> None:
    """Integers are exact; other values are near, one rounding away from binary64; a constant C is read, and EXEC is not."""
    side, depth = SHAPES[shape]
    device = play("gfx942")
    module = device.module(image)
    a, b, c = small_integers(side, depth), small_integers(depth, side, seed=3), small_integers(side, side, seed=4)
    np.testing.assert_array_equal(multiplied(device, module, f"all_{shape}", a, b, c), a @ b + c)
    np.testing.assert_array_equal(multiplied(device, module, f"one_{shape}", a, b, c), a @ b + 1)
    np.testing.assert_array_equal(multiplied(device, module, f"no_exec_{shape}", a, b, c), a @ b + c)
    a, b = a / 2.0**9, b * 2.0**5
    c = np.random.default_rng(5).standard_normal((side, side)).astype(np.float32)
    exact = a @ b + c
    found = multiplied(device, module, f"all_{shape}", a, b, c)
    np.testing.assert_allclose(found, exact, rtol=2**-24, atol=0)
    assert np.abs(multiplied(device, module, f"all_{shape}", a, b[:, ::-1], c) - exact).max() > 1


def test_subnormals_are_kept(play: Play, image: bytes) -> None:
    """The smallest bfloat16 times 2 to the power 100."""
    a, b = np.full((32, 8), 2.0**-133), np.zeros((8, 32))
    b[0] = 2.0**100
    device = play("gfx942")
    np.testing.assert_array_equal(
        multiplied(device, device.module(image), "zero_32x32x8", a, b, np.zeros((32, 32))), np.full((32, 32), 2.0**-33)
    )


def test_what_is_not_there_faults(play: Play, image: bytes, tmp_path: Path) -> None:
    """Broadcasts of blocks, and the instruction of gfx90a, whose matrix units flush subnormals."""
    zero, body = np.zeros((32, 8)), kernel("32x32x8").replace("32x32x8_bf16", "32x32x8bf16_1k")
    old = assembled({"old": body}, "gfx90a", tmp_path / "old.co")
    for target, code, name, text in (
        ("gfx942", image, "broadcast_32x32x8", r"v_mfma_f32_32x32x8_bf16 .*cbsz:1"),
        ("gfx90a", old, "old", r"v_mfma_f32_32x32x8bf16_1k.*no such instruction"),
    ):
        device = play(target)
        with pytest.raises(DeviceFault, match=text):
            multiplied(device, device.module(code), name, zero, zero.T, zero @ zero.T)
