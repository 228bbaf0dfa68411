"""The build option of the tile sweep: a build with another tile than the contract's has its own fingerprint and is refused by name."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import attn_cuda._extension
import pytest
import torch
from attn_cuda._extension import build_reason, extension, tile_reason, unavailable
from attn_cuda.backend import BACKEND
from attn_spec import UnsupportedProblem, get_op
from attn_spec._contract import contract

REASON = "attn-cuda was built with softmax tile 64 and contract ordered-v1 needs 256"


def _cmake(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["cmake", *arguments], check=False, capture_output=True, text=True)


def _configure(nvcc: str, package: Path, build: Path, tile: int) -> subprocess.CompletedProcess[str]:
    options = {
        "CMAKE_CUDA_COMPILER": nvcc,
        "CMAKE_BUILD_TYPE": "Release",
        "ATTN_CUDA_ARCHITECTURES": "90a-real",
        "ATTN_CUDA_SOFTMAX_TILE": tile,
    }
    chosen = [f"-D{name}={value}" for name, value in {**options, "Python_EXECUTABLE": sys.executable}.items()]
    return _cmake("-S", str(package), "-B", str(build), "-G", "Ninja", *chosen, *options)


def _fingerprint(header: str) -> str:
    return next(line.split('"')[1] for line in header.splitlines() if "ATTN_CUDA_FINGERPRINT" in line)


def test_the_tile_reaches_the_library_and_its_fingerprint(nvcc: str, package: Path, tmp_path: Path) -> None:
    headers = {}
    for tile in (64, 256):
        build = tmp_path / str(tile)
        done = _configure(nvcc, package, build, tile)
        assert done.returncode == 0, done.stderr
        assert _cmake("--build", str(build), "--target", "attn_cuda_build_info").returncode == 0
        headers[tile] = (build / "attn_build_info.h").read_text()
        assert f"-DATTN_CUDA_SOFTMAX_TILE={tile}" in headers[tile]
    assert _fingerprint(headers[64]) != _fingerprint(headers[256])
    probe = "CMakeFiles/attn_cuda_softmax.dir/csrc/probe.cu.o"
    done = _cmake("--build", str(tmp_path / "64"), "--target", probe)
    assert done.returncode == 0, done.stdout
    library = tmp_path / "probe.so"
    subprocess.run([nvcc, "-shared", str(tmp_path / "64" / probe), "-o", str(library)], check=True)
    assert ctypes.CDLL(str(library)).attn_cuda_softmax_tile() == 64


def test_another_tile_stops_the_configuration(nvcc: str, package: Path, tmp_path: Path) -> None:
    done = _configure(nvcc, package, tmp_path, 96)
    assert done.returncode != 0
    assert "ATTN_CUDA_SOFTMAX_TILE=96: supported are 64, 128, 256 and 512" in done.stderr


def test_this_build_has_the_tile_of_the_contract() -> None:
    module = extension()
    assert not isinstance(module, str), module
    assert tile_reason(contract("ordered-v1").tile) is None
    assert tile_reason(module.SOFTMAX_TILE) is None and build_reason() is None


@pytest.fixture
def tile_64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as if its module had been built with tile 64."""
    module = SimpleNamespace(FLAGS="--fmad=false", SOFTMAX_TILE=64, FINGERPRINT="0" * 64)
    monkeypatch.setattr(attn_cuda._extension, "extension", lambda: module)
    build_reason.cache_clear()
    yield
    build_reason.cache_clear()


@pytest.mark.usefixtures("tile_64")
def test_such_a_build_is_passed_over_with_its_reason() -> None:
    reason = unavailable("cuda")
    assert reason is not None and REASON in reason
    assert REASON in str(BACKEND.unavailable("cuda"))
    try:
        rejections = get_op("joint_attn_softmax", device="cuda").trace.prior_rejections
    except UnsupportedProblem as error:  # no other backend has a device here
        rejections = error.reasons
    assert any(REASON in rejection for rejection in rejections), rejections


@pytest.mark.usefixtures("tile_64")
def test_its_registered_operators_refuse_too() -> None:
    with pytest.raises(UnsupportedProblem, match=REASON):
        torch.ops.attn_cuda.joint_attn_softmax(torch.zeros(2, 3), None, torch.float32)
