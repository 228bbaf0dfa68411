"""The GPU that the interpreter plays, from Python: modules, launches, known memory, and what was run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Device", "DeviceFault", "Module"]

TARGETS = ("gfx90a", "gfx942", "gfx950")


class DeviceFault(RuntimeError):
    """A kernel broke a rule of the interpreter; the text names the instruction, its address, the workgroup and the wave."""


class Module:
    """A loaded code object. Keep it as long as its functions are launched."""

    def __init__(self, device: Device, image: bytes) -> None:
        self._device = device
        self._handle = ctypes.c_void_p()
        device.check(device.runtime.hipModuleLoadData(ctypes.byref(self._handle), image))

    def launch(
        self, name: str, grid: Sequence[int], threads: Sequence[int], arguments: Sequence[ctypes._SimpleCData[Any]], shared: int = 0
    ) -> None:
        """Run a kernel over ``grid`` workgroups of ``threads`` work-items. Raises DeviceFault.

        ``arguments`` are ctypes values of the kernel's explicit arguments, in order; ``shared`` is its dynamic LDS in bytes.
        """
        function = ctypes.c_void_p()
        library = self._device.runtime
        self._device.check(library.hipModuleGetFunction(ctypes.byref(function), self._handle, name.encode()))
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        sizes = [*grid, *[1] * (3 - len(grid)), *threads, *[1] * (3 - len(threads)), shared]
        self._device.check(library.hipModuleLaunchKernel(function, *sizes, None, pointers, None))

    def executed(self, prefix: str = "") -> int:
        """How often instructions whose mnemonic begins with ``prefix`` have run, counted by wave."""
        return int(self._device.runtime.amd_executed(self._handle, prefix.encode()))


class Device:
    """A GPU of ``target`` played by ``library`` (``interpreter.build()``). A process has one; making another changes its target."""

    def __init__(self, library: Path, target: str) -> None:
        self.runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name, result, kinds in (
            ("amd_take_fault", ctypes.c_char_p, []),
            ("amd_executed", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_char_p]),
            ("amd_register_memory", None, [ctypes.c_void_p, ctypes.c_uint64]),
            ("amd_set_order", None, [ctypes.c_uint64]),
            ("amd_set_step_limit", None, [ctypes.c_uint64]),
            ("amd_set_reciprocal_error", None, [ctypes.c_uint32]),
        ):
            function = getattr(self.runtime, name)
            function.restype, function.argtypes = result, kinds
        if self.runtime.amd_play(target.encode()):
            raise ValueError(f"target {target!r}: the interpreter plays {', '.join(TARGETS)}")
        self.target = target
        self.take_fault()

    def module(self, image: bytes) -> Module:
        """Load an ELF code object or an offload bundle. Raises DeviceFault where it has no code for this GPU."""
        return Module(self, image)

    def check(self, error: int) -> None:
        """Raise what a HIP call reported."""
        fault = self.take_fault()
        if error:
            raise DeviceFault(fault or f"HIP error {error}")

    def take_fault(self) -> str:
        """The text of the last fault, or nothing; it is reported once."""
        return str(self.runtime.amd_take_fault().decode())

    def register(self, address: int, size: int) -> None:
        """Let kernels touch ``size`` bytes of host memory at ``address``."""
        self.runtime.amd_register_memory(address, size)

    def forget_registered(self) -> None:
        """Undo every ``register``."""
        self.runtime.amd_forget_registered_memory()

    def allow_host_memory(self, allowed: bool) -> None:
        """Whether kernels may touch any writable memory of this process: for buffers whose bounds are not known, as those of XLA."""
        self.runtime.amd_allow_host_memory(int(allowed))

    def set_order(self, seed: int) -> None:
        """0: workgroups and waves run in ascending order. Else in an order that follows from ``seed``."""
        self.runtime.amd_set_order(seed)

    def set_reciprocal_error(self, seed: int) -> None:
        """0: v_rcp_f32 is rounded correctly. Else it is off by up to one unit in the last place, depending on its argument."""
        self.runtime.amd_set_reciprocal_error(seed)

    def set_step_limit(self, instructions: int) -> None:
        """Instructions that one launch may run."""
        self.runtime.amd_set_step_limit(instructions)

    def totals(self) -> tuple[int, int, int]:
        """Launches, workgroups and wave instructions so far."""
        values = [ctypes.c_uint64() for _ in range(3)]
        self.runtime.amd_totals(*(ctypes.byref(value) for value in values))
        return values[0].value, values[1].value, values[2].value
