"""Fixtures: a CUDA device or the only reason to skip, and byte comparison."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from attn_spec.torch.poison import poisoned_memory
from torch import Tensor

PACKAGE = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The current CUDA device. The test is skipped only when there is no device: with one, a package that cannot use it fails here."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from attn_cuda.backend import BACKEND

    reason = BACKEND.unavailable("cuda")
    assert reason is None, reason
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN."""
    with poisoned_memory("warn"):
        yield


@pytest.fixture(scope="session")
def nvcc() -> str:
    """Path of nvcc; the compile-only tests need it and nothing else. Without a toolkit they are skipped, but not in CI."""
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        pytest.skip("nvcc is not on PATH; .ci/run demands it")
    return found


@pytest.fixture(scope="session")
def package() -> Path:
    """Source tree of attn-cuda."""
    return PACKAGE


def _bits(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu().contiguous()
    bits = host.view(torch.int32 if host.dtype == torch.float32 else torch.int16).clone()
    bits[torch.isnan(host)] = 0  # every NaN is one value; that both have it at the same places is checked first
    return bits


def _assert_same_bits(found: Tensor, wanted: Tensor, what: str = "") -> None:
    assert found.dtype == wanted.dtype, f"{what}: dtype {found.dtype}, wanted {wanted.dtype}"
    assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)}, wanted {list(wanted.shape)}"
    nan_found, nan_wanted = torch.isnan(found.detach().cpu()), torch.isnan(wanted.detach().cpu())
    assert torch.equal(nan_found, nan_wanted), (
        f"{what}: {int((nan_found != nan_wanted).sum())} of {found.numel()} elements differ in being NaN"
    )
    different = _bits(found) != _bits(wanted)
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {found.numel()} elements differ, first at {list(first)}: "
            f"{found[first].item()!r}, wanted {wanted[first].item()!r}"
        )


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[..., None]:
    """``assert_same_bits(found, wanted, what)``: dtype, shape, NaN positions and all other bits, so that +0 is not -0."""
    return _assert_same_bits
