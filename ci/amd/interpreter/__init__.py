"""Runs AMD code objects on the CPU, for tests: a stand-in HIP runtime around an interpreter of CDNA instructions. See README.md."""

from interpreter.build import LIBRARY, build
from interpreter.device import Device, DeviceFault, Module

__all__ = ["LIBRARY", "Device", "DeviceFault", "Module", "build"]
