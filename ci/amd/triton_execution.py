"""Triton's own launches with AMD code objects on the CPU: what a kernel call compiles for a GPU runs in the interpreter, on CPU tensors.

Only the driver differs from production (https://github.com/triton-lang/triton/blob/main/third_party/amd/backend/driver.py): it loads code
objects into the interpreter, and passes the arguments as Triton's launcher does, with two scratch pointers at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton
from attn_spec.torch.poison import poisoned_memory
from interpreter import Device, Module
from triton.backends.compiler import GPUTarget

__all__ = ["executing"]

TARGETS = ("gfx90a", "gfx942", "gfx950")
LDS_BYTES = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}
KINDS = {"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
KINDS |= {"u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
KINDS |= {"fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double}


def _arguments(device: Device, kind: Any, value: Any) -> Iterator[Any]:
    """ctypes values of one argument of a signature, whose tensors become known memory."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, value, strict=True):
            yield from _arguments(device, inner, part)
    elif kind.startswith("*"):
        storage = value.untyped_storage()
        device.register(storage.data_ptr(), storage.nbytes())
        yield ctypes.c_void_p(value.data_ptr())
    elif kind != "constexpr":
        yield KINDS[kind](value)


class _Driver:
    """Triton keeps compiled kernels by device, so each target is a device of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.launches: list[tuple[str, Module]] = []
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=self._properties)
        self.launcher_cls = self._launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self._device.target, 64)

    def get_current_device(self) -> int:
        return TARGETS.index(self._device.target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": LDS_BYTES[self._device.target]}

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, tuple[str, Module], int, int, int]:
        return None, (name, self._device.module(binary)), 0, 0, 1024

    def _launcher(self, source: Any, metadata: Any) -> Any:
        def launch(*call: Any) -> None:
            grid, (name, module), values = call[:3], call[4], call[9:]
            found = [
                part
                for kind, value in zip(source.signature.values(), values, strict=True)
                for part in _arguments(self._device, kind, value)
            ]
            scratch = [ctypes.c_void_p(), ctypes.c_void_p()]
            self.launches.append((name, module))
            try:
                module.launch(name, grid, [64 * metadata.num_warps], [*found, *scratch], metadata.shared)
            finally:
                self._device.forget_registered()

        return launch


@contextmanager
def executing(device: Device, *launch_modules: ModuleType) -> Iterator[list[tuple[str, Module]]]:
    """Kernel calls run on ``device``; yields the list of what was launched.

    ``launch_modules`` choose their configurations by a function ``platform``, which says "rocm" inside.
    """
    driver = _Driver(device)
    outside = triton.runtime.driver.active if triton.runtime.driver._active is not None else None
    triton.runtime.driver.set_active(driver)
    try:
        with ExitStack() as stack:
            stack.enter_context(poisoned_memory("error"))
            for module in launch_modules:
                stack.enter_context(patch.object(module, "platform", lambda _: "rocm"))
            yield driver.launches
    finally:
        triton.runtime.driver.set_active(outside)
