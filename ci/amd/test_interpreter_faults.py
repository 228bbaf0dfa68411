"""What a kernel does wrong is reported with its instruction, and what has no defined order is not run in silence."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_code import TARGETS, assembled, compiled
from interpreter import Device, DeviceFault

REVERSED = """
extern "C" __global__ void reversed(float* x) {
  __shared__ float held[256];
  held[THREAD] = x[THREAD];
  %s
  x[THREAD] = held[255 - THREAD];
}
"""
KERNELS = """
extern "C" __global__ void past_the_end(float* x) { x[THREAD] += x[THREAD + 1]; }
extern "C" __global__ void wild(float* x, long at) { x[THREAD] = *(float*)(at * 8); }
extern "C" __global__ void counted(int* x) { __atomic_fetch_add(x, 1, __ATOMIC_RELAXED); }
extern "C" __global__ void endless(volatile int* x) { while (x[0] == 0) {} }
extern "C" __global__ void past_shared(float* x, int at) {
  __shared__ float held[64];
  held[THREAD] = x[THREAD];
  x[THREAD] = held[at];
}
extern "C" __global__ void unwritten(float* x) {
  __shared__ volatile float held[64];
  if (THREAD == 0) held[0] = x[0];
  x[THREAD] = held[THREAD];
}
"""
Play = Callable[[str], Device]


def pointer(device: Device, array: np.ndarray) -> ctypes.c_void_p:
    device.register(array.ctypes.data, array.nbytes)
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return request.param, compiled(KERNELS, request.param, tmp_path_factory.mktemp("faults") / "kernels.co")


@pytest.mark.parametrize("target", TARGETS)
def test_a_barrier_orders_waves(play: Play, target: str, tmp_path: Path) -> None:
    device = play(target)
    module = device.module(compiled(REVERSED % "BARRIER;", target, tmp_path / "kernel.co"))
    for seed in (0, 1, 2, 3):
        device.set_order(seed)
        x = np.arange(256, dtype=np.float32)
        module.launch("reversed", [1], [256], [pointer(device, x)])
        assert (x == np.arange(256)[::-1]).all()


@pytest.mark.parametrize("target", TARGETS)
def test_a_missing_barrier_is_a_race(play: Play, target: str, tmp_path: Path) -> None:
    device = play(target)
    module = device.module(compiled(REVERSED % "", target, tmp_path / "kernel.co"))
    races = 0
    for seed in range(4):
        device.set_order(seed)
        x = np.arange(256, dtype=np.float32)
        try:
            module.launch("reversed", [1], [256], [pointer(device, x)])
        except DeviceFault as fault:
            assert "race: wave" in str(fault)
            assert "ds_" in str(fault)
            races += 1
    assert races == 4


def test_a_load_past_the_end(play: Play, kernels: tuple[str, bytes]) -> None:
    target, image = kernels
    device = play(target)
    x = np.zeros(64, np.float32)
    with pytest.raises(
        DeviceFault, match=r"past_the_end, workgroup \(0, 0, 0\), wave 0, at 0x[0-9a-f]+: global_load.* lie in no allocation"
    ):
        device.module(image).launch("past_the_end", [1], [64], [pointer(device, x)])
    device.module(image).launch("past_the_end", [1], [63], [pointer(device, x)])


def test_a_wild_pointer(play: Play, kernels: tuple[str, bytes]) -> None:
    target, image = kernels
    device = play(target)
    with pytest.raises(DeviceFault, match="at 0x8 lie in no allocation"):
        device.module(image).launch("wild", [1], [64], [pointer(device, np.zeros(64, np.float32)), ctypes.c_int64(1)])


def test_atomics_are_refused(play: Play, kernels: tuple[str, bytes]) -> None:
    target, image = kernels
    device = play(target)
    with pytest.raises(DeviceFault, match=r"atomic_add.*no such instruction in the interpreter"):
        device.module(image).launch("counted", [1], [64], [pointer(device, np.zeros(1, np.int32))])


def test_an_endless_loop_ends(play: Play, kernels: tuple[str, bytes]) -> None:
    target, image = kernels
    device = play(target)
    device.set_step_limit(10_000)
    with pytest.raises(DeviceFault, match="more instructions than the limit of 10000"):
        device.module(image).launch("endless", [1], [64], [pointer(device, np.zeros(1, np.int32))])


def test_local_memory_has_bounds(play: Play, kernels: tuple[str, bytes]) -> None:
    target, image = kernels
    device = play(target)
    module, x = device.module(image), np.ones(64, np.float32)
    module.launch("past_shared", [1], [64], [pointer(device, x), ctypes.c_int32(63)])
    with pytest.raises(DeviceFault, match="4 bytes of LDS at 256 of 256"):
        module.launch("past_shared", [1], [64], [pointer(device, x), ctypes.c_int32(64)])


def test_local_memory_starts_poisoned(play: Play, kernels: tuple[str, bytes]) -> None:
    target, image = kernels
    device = play(target)
    x = np.ones(64, np.float32)
    device.module(image).launch("unwritten", [1], [64], [pointer(device, x)])
    assert x[0] == 1.0
    assert np.isnan(x[1:]).all()


def test_an_unknown_instruction(play: Play, tmp_path: Path) -> None:
    """Decoding goes on; only running it fails, with its text."""
    device = play("gfx942")
    body = "s_cbranch_scc0 skip\n  v_mfma_f32_4x4x1_16b_f32 a[0:3], v0, v1, a[0:3]\nskip:"
    image = assembled(
        {"skips": f"s_cmp_eq_u32 0, 1\n{body}", "runs": f"s_cmp_eq_u32 0, 0\n{body.replace('skip', 'skip2')}"}, "gfx942", tmp_path / "k.co"
    )
    module, x = device.module(image), np.zeros(1, np.float32)
    module.launch("skips", [1], [64], [pointer(device, x)] * 2)
    with pytest.raises(DeviceFault, match=r"v_mfma_f32_4x4x1_16b_f32 .*mnemonic.*no such instruction"):
        module.launch("runs", [1], [64], [pointer(device, x)] * 2)


def test_another_gpu_is_refused(play: Play, tmp_path: Path) -> None:
    image = assembled({"nothing": "s_nop 0"}, "gfx90a", tmp_path / "kernel.co")
    with pytest.raises(DeviceFault, match="a code object for gfx90a on gfx942"):
        play("gfx942").module(image)
    with pytest.raises(ValueError, match="the interpreter plays gfx90a, gfx942, gfx950"):
        play("gfx1100")


def test_a_flushing_kernel_is_refused(play: Play, tmp_path: Path) -> None:
    device = play("gfx942")
    source = 'extern "C" __global__ void scaled(float* x) { x[THREAD] *= 0.5f; }'
    module = device.module(compiled(source, "gfx942", tmp_path / "kernel.co", "-fgpu-flush-denormals-to-zero"))
    with pytest.raises(DeviceFault, match="float mode other than nearest even with subnormals"):
        module.launch("scaled", [1], [64], [pointer(device, np.zeros(64, np.float32))])
