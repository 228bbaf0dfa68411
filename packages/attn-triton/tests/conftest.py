"""The tests run in Triton's interpreter; ``TRITON_INTERPRET=0`` in the environment runs them on the GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator

import pytest
from attn_spec.torch.poison import poisoned_memory
from attn_triton._softmax_kernel import INTERPRETED


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN."""
    with poisoned_memory("error"):
        yield
