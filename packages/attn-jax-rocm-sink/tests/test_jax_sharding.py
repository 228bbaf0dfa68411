"""Sharding over batch and heads on eight CPU devices, in a process of its own: the number of devices is fixed when JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "eight_devices.py"


def test_sharded_calls_have_the_bytes_of_one_device() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=environment, cwd=CASES.parents[1], capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout
