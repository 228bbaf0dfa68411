"""Sharding over batch and heads on eight CPU devices, in a process of its own: the number of devices is fixed when JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from attn_jax_rocm_sink._kernel import dropout_at
from attn_jax_rocm_sink._signature import Signature

CASES = Path(__file__).parent / "eight_devices.py"


def test_sharded_calls_have_the_bytes_of_one_device() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=environment, cwd=CASES.parents[1], capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout


def test_an_engine_that_draws_dropout_for_whole_calls_refuses_a_part() -> None:
    def seed_of(engine: str) -> list[int]:
        signature = Signature("forward", ("q", "k", "v", "dropout_seed"), ("out", "lse"), (("engine", engine),), "bfloat16")
        return [int(word) for word in dropout_at(signature, jnp.array([7, 1, 0, 2], jnp.uint32), 3, 4)]

    assert seed_of("host") == [7, 1, 3, 6]
    with pytest.raises(ValueError, match="engine ck draws dropout for whole calls alone"):
        seed_of("ck")
