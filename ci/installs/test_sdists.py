"""Wheels built from the sdists on poorer machines: without git, without nvcc, without any C++ compiler.

The wheels in dist/ are such builds already, without git and nvcc, but for attn-cuda's (``ci/wheels.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from poorer_path import path_without

GIT_AND_NVCC = ("git", "nvcc")
COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "x86_64-linux-gnu-g", "aarch64-linux-gnu-g", "c89", "c99", "tcc", "icx", "icpx")
STATE = """
from attn_spec._registry import get_backend
backend = get_backend({backend!r})
for engine in backend.engines:
    print(engine, backend.unavailable({device!r}, engine), sep=': ')
"""


@pytest.fixture
def built(run, dist: Path, python_of, tmp_path: Path) -> Callable[..., tuple[str, dict[str, str | None]]]:
    """Build the sdist of a package with a poorer PATH; Python and environment in which the result comes before the installed package."""

    def build(name: str, *missing: str) -> tuple[str, dict[str, str | None]]:
        (sdist,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
        poorer: dict[str, str | None] = {
            "PATH": path_without(tmp_path / "bin", *missing),
            "CC": None,
            "CXX": None,
            "CUDACXX": None,
            "CUDA_HOME": None,
            "CUDA_PATH": None,
        }
        python, out = python_of(name), tmp_path / "wheel"
        wheel = run("uv", "build", "--wheel", "--out-dir", str(out), "--find-links", str(dist), "--python", python, str(sdist), **poorer)
        assert wheel.returncode == 0, wheel.stderr
        target = tmp_path / "installed"
        found = [str(path) for path in out.glob("*.whl")]
        placed = run("uv", "pip", "install", "--no-deps", "--no-index", "--python", python, "--target", str(target), *found)
        assert placed.returncode == 0, placed.stderr
        return python, {**poorer, "PYTHONPATH": str(target)}

    return build


def state(run, python: str, environment: dict[str, str | None], backend: str, device: str) -> dict[str, str]:
    """Why each engine is not usable, by engine; "None" when it is."""
    result = run(python, "-c", STATE.format(backend=backend, device=device), **environment)
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


@pytest.mark.parametrize("name", ("attn-reference", "attn-jax-rocm-sink"))
def test_the_wheels_built_without_git_and_nvcc_have_their_kernels(run, python_of, name: str) -> None:
    assert state(run, python_of(name), {}, name.replace("-", "_"), "cpu")["host"] == "None"


def test_cuda_builds_without_git_and_nvcc(run, built) -> None:
    python, environment = built("attn-cuda", *GIT_AND_NVCC)
    result = run(python, "-c", "import attn_cuda; print(attn_cuda.__file__)", **environment)
    assert result.returncode == 0, result.stderr
    assert "/installed/" in result.stdout
    assert "CUDA compiler" in next(iter(state(run, python, environment, "attn_cuda", "cuda").values()))


def test_reference_without_a_compiler_is_pytorch_only(run, built) -> None:
    python, environment = built("attn-reference", *GIT_AND_NVCC, *COMPILERS)
    found = state(run, python, environment, "attn_reference", "cpu")
    assert found["pytorch"] == "None"
    assert "C++ compiler" in found["host"]
    info = run(python, "-m", "attn_spec", "info", **environment)
    assert "C++ compiler" in info.stdout


def test_jax_without_a_compiler_says_so(run, built) -> None:
    python, environment = built("attn-jax-rocm-sink", *GIT_AND_NVCC, *COMPILERS)
    assert "C++ compiler" in state(run, python, environment, "attn_jax_rocm_sink", "cpu")["host"]


def test_cuda_without_a_compiler_says_so(run, built) -> None:
    python, environment = built("attn-cuda", *GIT_AND_NVCC, *COMPILERS)
    assert "compiler" in next(iter(state(run, python, environment, "attn_cuda", "cuda").values()))
