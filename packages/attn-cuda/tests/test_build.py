"""The build refuses flags that change bits, at configuration and in the build; it installs without compilers and says so."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attn_cuda._extension import flag_reason


def _cmake(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CUDAFLAGS")}
    return subprocess.run(["cmake", *arguments], check=False, env={**clean, **environment}, capture_output=True, text=True)


def _configure(source: Path, build: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    chosen = (f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release", "-DATTN_CUDA_ARCHITECTURES=90a-real", *options)
    return _cmake("-S", str(source), "-B", str(build), "-G", "Ninja", *chosen, **environment)


def _missing(build: Path) -> str | None:
    names: dict[str, str | None] = {}
    exec((build / "_build.py").read_text(), names)
    return names["MISSING"]


@pytest.fixture(scope="module")
def configured(nvcc: str, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder after a configuration with clean flags. Others in it keep what CMake found out about the compilers."""
    build = tmp_path_factory.mktemp("configured")
    done = _configure(package, build, f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DATTN_CUDA=ON")
    assert done.returncode == 0, done.stderr
    return build


@pytest.fixture
def again(configured: Path, package: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Configures the folder once more, with options and variables; afterwards with clean flags."""
    fresh = ("-UCMAKE_CUDA_FLAGS*", "-UATTN_CUDA")
    yield lambda *options, **environment: _configure(package, configured, *fresh, *options, **environment)
    assert _configure(package, configured, *fresh, "-DATTN_CUDA=ON").returncode == 0


def test_clean_flags_configure(configured: Path) -> None:
    assert _missing(configured) is None


@pytest.mark.parametrize(
    ("option", "environment"),
    [
        ("-DCMAKE_CUDA_FLAGS=--use_fast_math", {}),
        ("-DCMAKE_CUDA_FLAGS=-O3 -ftz=true", {}),
        ("-DCMAKE_CUDA_FLAGS_RELEASE=-O3 --ftz=true", {}),
        ("-DATTN_CUDA=AUTO", {"NVCC_APPEND_FLAGS": "-use_fast_math"}),
        ("-DATTN_CUDA=AUTO", {"NVCC_PREPEND_FLAGS": "-ftz=true"}),
        ("-DATTN_CUDA=AUTO", {"CUDAFLAGS": "-prec-div=false"}),
    ],
)
def test_flags_that_change_bits_stop_the_configuration(
    again: Callable[..., subprocess.CompletedProcess[str]], option: str, environment: dict[str, str]
) -> None:
    done = again(option, **environment)
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "change the bits that the contract fixes" in message, message


def test_flags_of_the_build_environment_stop_the_build(configured: Path) -> None:
    target = ("--build", str(configured), "--target", "attn_cuda_build_info")
    assert _cmake(*target).returncode == 0
    done = _cmake(*target, NVCC_APPEND_FLAGS="--ftz=true")
    assert done.returncode != 0
    assert "NVCC_APPEND_FLAGS contains 'ftz=true'" in " ".join((done.stdout + done.stderr).split())


def test_a_build_past_the_refusal_is_reported_at_load(nvcc: str, package: Path, tmp_path: Path) -> None:
    source, build = tmp_path / "source", tmp_path / "build"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("build", "tests", "src"))
    check = source / "cmake" / "FlagCheck.cmake"
    check.write_text(check.read_text().replace("FATAL_ERROR", "WARNING"))
    done = _configure(source, build, f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_FLAGS=-ftz=true")
    assert done.returncode == 0, done.stderr
    done = _cmake("--build", str(build), "--target", "CMakeFiles/attn_cuda_kernels.dir/csrc/probe.cu.o")
    assert done.returncode == 0, done.stdout
    library = tmp_path / "probe.so"
    objects = str(build / "CMakeFiles" / "attn_cuda_kernels.dir" / "csrc" / "probe.cu.o")
    subprocess.run([nvcc, "-shared", objects, "-o", str(library)], check=True)
    flags = ctypes.CDLL(str(library)).attn_cuda_flags
    flags.restype = ctypes.c_char_p
    reason = flag_reason(flags().decode())
    assert reason is not None and "ftz=true" in reason


def test_the_fingerprint_is_of_sources_flags_compiler_and_architectures(nvcc: str, package: Path, tmp_path: Path) -> None:
    source, build = tmp_path / "source", tmp_path / "build"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("build", "tests", "src"))

    def written() -> str:
        found = re.search(r'ATTN_CUDA_FINGERPRINT "(\w{64})"', (build / "attn_build_info.h").read_text())
        assert found is not None
        return found.group(1)

    def fingerprint() -> str:
        done = _cmake("--build", str(build), "--target", "attn_cuda_build_info")
        assert done.returncode == 0, done.stdout + done.stderr
        return written()

    assert _configure(source, build, f"-DCMAKE_CUDA_COMPILER={nvcc}").returncode == 0
    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    listed = subprocess.run(
        ["ninja", "-C", str(build), "-t", "commands", "attn_cuda_build_info"], check=True, capture_output=True, text=True
    )
    (step,) = (line for line in listed.stdout.splitlines() if "BuildInfo.cmake" in line)
    for path in sorted(path for path in (source / "csrc").rglob("*") if path.is_file()):
        path.write_text(path.read_text() + "\n")
        subprocess.run(step, shell=True, check=True)
        seen.append(written())
    assert fingerprint() == seen[-1]
    for option in ("-DATTN_CUDA_ARCHITECTURES=80-real;90a-real", "-DCMAKE_CUDA_FLAGS=-lineinfo"):
        assert _configure(source, build, option).returncode == 0
        seen.append(fingerprint())
    assert len(set(seen)) == len(seen)
    info = (build / "attn_build_info.h").read_text()
    assert 'ATTN_CUDA_ARCHITECTURES "90a-real"' in info and "-lineinfo" in info and re.search(r'ATTN_CUDA_COMPILER "NVIDIA \d+', info)
    assert "/attn/ordered.h" in (build / "build.ninja").read_text()


def test_without_compilers_it_installs_and_says_why(package: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    ninja = shutil.which("ninja") or str(Path(sys.executable).parent / "ninja")
    (tools / "ninja").symlink_to(ninja)
    cmake = shutil.which("cmake")
    assert cmake is not None
    command = [cmake, "-S", str(package), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    done = subprocess.run(command, check=False, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert _missing(tmp_path / "build") == "no C++ compiler was found when attn-cuda was built"


def test_without_nvcc_it_installs_and_says_why_and_on_demand_fails(package: Path, tmp_path: Path) -> None:
    options = ("-DCMAKE_CUDA_COMPILER=NOTFOUND",)
    done = _configure(package, tmp_path / "auto", *options)
    assert done.returncode == 0, done.stderr
    assert _missing(tmp_path / "auto") == "no CUDA compiler (nvcc) was found when attn-cuda was built"
    done = _configure(package, tmp_path / "on", *options, "-DATTN_CUDA=ON")
    assert done.returncode != 0 and "ATTN_CUDA=ON" in done.stderr


def test_it_can_be_left_out(package: Path, tmp_path: Path) -> None:
    assert _configure(package, tmp_path, "-DATTN_CUDA=OFF").returncode == 0
    assert _missing(tmp_path) == "attn-cuda was built with ATTN_CUDA=OFF"
