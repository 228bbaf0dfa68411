"""Private memory, calls of device functions, constant tables and arguments by value, as clang compiles them for each GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_code import TARGETS, compiled
from interpreter import Device

SOURCE = """
typedef unsigned int uint;
struct Scaled { float factors[3]; int shift; };
__device__ const uint table[8] = {2, 3, 5, 7, 11, 13, 17, 19};

extern "C" __global__ void scattered(uint* x) {
  uint held[40];
#pragma clang loop unroll(disable)
  for (uint i = 0; i < 40; ++i) held[i * 7 % 40] = x[THREAD] * 40 + i;
  x[THREAD] = held[x[THREAD] % 40] + held[THREAD & 7];
}

extern "C" __global__ void scattered_flat(uint* x) {
  volatile uint held[16];
  for (int i = 0; i < 16; ++i) held[i] = x[THREAD] * 16 + i;
  x[THREAD] = held[x[THREAD] & 15] + held[THREAD & 7];
}

__device__ __attribute__((noinline)) uint remainder_of(uint value, uint by, uint* calls) {
  volatile uint kept = value % by;
  *calls += 1;
  return kept;
}

extern "C" __global__ void called(uint* x) {
  uint calls = 0;
  uint sum = 0;
  for (uint i = 0; i < x[THREAD] % 5; ++i) sum += remainder_of(x[THREAD] + i, table[i], &calls);
  x[THREAD] = sum * 16 + calls;
}

extern "C" __global__ void by_value(float* x, char a, Scaled scaled, short b, double c) {
  x[BLOCK * 64 + THREAD] = scaled.factors[(a + BLOCK) % 3] * (1 << scaled.shift) + b + (float)c;
}

extern "C" __global__ void placed(uint* x) {
  uint at = __builtin_amdgcn_workitem_id_x() + 4 * (__builtin_amdgcn_workitem_id_y() + 3 * __builtin_amdgcn_workitem_id_z());
  uint block = __builtin_amdgcn_workgroup_id_x() + 2 * (__builtin_amdgcn_workgroup_id_y() + 3 * __builtin_amdgcn_workgroup_id_z());
  x[block * 24 + at] = block * 1000 + at;
}
"""
Play = Callable[[str], Device]


class Scaled(ctypes.Structure):
    _fields_ = (("factors", ctypes.c_float * 3), ("shift", ctypes.c_int32))


@pytest.fixture(scope="module", params=TARGETS)
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return request.param, compiled(SOURCE, request.param, tmp_path_factory.mktemp("memory") / "kernels.co")


def pointer(device: Device, array: np.ndarray) -> ctypes.c_void_p:
    device.register(array.ctypes.data, array.nbytes)
    return ctypes.c_void_p(array.ctypes.data)


def test_private_memory(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    before, thread = (np.arange(128, dtype=np.uint32) * 7) % 31, np.arange(128)
    after = before.copy()
    module = device.module(image)
    module.launch("scattered", [1], [128], [pointer(device, after)])
    assert (after == 80 * before + before % 40 * 23 % 40 + (thread & 7) * 23 % 40).all()  # 7 * 23 = 1 modulo 40
    assert module.executed("buffer_" if target == "gfx90a" else "scratch_") > 0


def test_private_memory_by_flat_addresses(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    before, thread = (np.arange(128, dtype=np.uint32) * 7) % 31, np.arange(128)
    after = before.copy()
    module = device.module(image)
    module.launch("scattered_flat", [1], [128], [pointer(device, after)])
    assert (after == 32 * before + (before & 15) + (thread & 7)).all()
    assert module.executed("flat_store") > 0


def test_calls(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    before = np.arange(100, 164, dtype=np.uint32)
    after = before.copy()
    module = device.module(image)
    module.launch("called", [1], [64], [pointer(device, after)])
    primes = (2, 3, 5, 7, 11)
    expected = [16 * sum((int(x) + i) % primes[i] for i in range(int(x) % 5)) + int(x) % 5 for x in before]
    assert after.tolist() == expected
    assert module.executed("s_swappc_b64") > 0


def test_arguments_by_value(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    x = np.full(192, np.nan, np.float32)
    values = [ctypes.c_int8(4), Scaled((0.5, 1.5, 2.5), 3), ctypes.c_int16(-7), ctypes.c_double(0.25)]
    device.module(image).launch("by_value", [3], [64], [pointer(device, x), *values])
    assert (x.reshape(3, 64) == np.array([[1.5], [2.5], [0.5]]) * 8 - 7 + 0.25).all()


def test_three_axes(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    x = np.zeros(12 * 24, np.uint32)
    device.set_order(5)
    device.module(image).launch("placed", [2, 3, 2], [4, 3, 2], [pointer(device, x)])
    assert (x.reshape(12, 24) == 1000 * np.arange(12)[:, None] + np.arange(24)).all()


def test_a_host_mapping_is_enough_when_allowed(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    x = np.zeros(12 * 24, np.uint32)
    device.allow_host_memory(True)
    device.module(image).launch("placed", [2, 3, 2], [4, 3, 2], [ctypes.c_void_p(x.ctypes.data)])
    assert x[-1] == 11023


def test_a_table_is_part_of_the_code_object(play: Play, tmp_path: Path) -> None:
    """Its address is relative to the program counter, so it is found wherever the code object lies."""
    device = play("gfx942")
    source = (
        '__device__ const float table[4] = {1, 2, 4, 8};\nextern "C" __global__ void looked_up(float* x) { x[THREAD] = table[THREAD & 3]; }'
    )
    module, x = device.module(compiled(source, "gfx942", tmp_path / "kernel.co")), np.zeros(64, np.float32)
    module.launch("looked_up", [1], [64], [pointer(device, x)])
    assert (x == 2.0 ** (np.arange(64) % 4)).all()
