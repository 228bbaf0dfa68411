"""The interpreter of AMD code objects, compiled once, and the GPUs that it plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interpreter import Device, build


@pytest.fixture(scope="session")
def interpreter_library() -> Path:
    return build()


@pytest.fixture
def play(interpreter_library: Path) -> Iterator[Callable[[str], Device]]:
    """Makes the device of a target; afterwards every setting is back at its default."""
    played: list[Device] = []

    def make(target: str) -> Device:
        played.append(Device(interpreter_library, target))
        return played[-1]

    yield make
    for device in played:
        device.forget_registered()
        device.allow_host_memory(False)
        device.set_order(0)
        device.set_reciprocal_error(0)
        device.set_step_limit(4_000_000_000)
