"""What is inside the wheels and sdists: licence, no framework linked, nothing of the machine that built them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

NAMES = ("attn-spec", "attn-reference", "attn-triton", "attn-cuda", "attn-jax-rocm-sink", "attn-shared-tests")
NATIVE = ("attn-reference", "attn-cuda", "attn-jax-rocm-sink")
SYSTEM = re.compile(r"^(ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so\.\d+$")
"""Libraries that every Linux with a C++ runtime has: not libtorch, libpython, libcudart, libcuda or libamdhip64."""


def archive(dist: Path, name: str, pattern: str) -> Path:
    (found,) = dist.glob(f"{name.replace('-', '_')}-[0-9]{pattern}")
    return found


@pytest.fixture
def libraries(dist: Path, tmp_path: Path):
    """Shared libraries in the wheel of a package, unpacked."""

    def unpack(name: str) -> list[Path]:
        with zipfile.ZipFile(archive(dist, name, "*.whl")) as wheel:
            wheel.extractall(tmp_path)
        return sorted(tmp_path.rglob("*.so"))

    return unpack


def needed(library: Path) -> list[str]:
    """Names of the libraries that ``library`` loads."""
    listing = subprocess.run(["readelf", "--dynamic", "--wide", library], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", listing)


@pytest.mark.parametrize("name", NAMES)
def test_archives_carry_the_licence_and_types(dist: Path, name: str) -> None:
    with zipfile.ZipFile(archive(dist, name, "*.whl")) as wheel:
        files = wheel.namelist()
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)
    assert f"{name.replace('-', '_')}/py.typed" in files
    with tarfile.open(archive(dist, name, "*.tar.gz")) as sdist:
        assert any(re.fullmatch(r"[^/]+/LICENSE", file) for file in sdist.getnames())


@pytest.mark.parametrize("name", NAMES)
def test_no_path_of_the_building_machine(dist: Path, name: str) -> None:
    root = str(dist.parent).encode()
    with zipfile.ZipFile(archive(dist, name, "*.whl")) as wheel:
        assert [file for file in wheel.namelist() if root in wheel.read(file)] == []


@pytest.mark.parametrize("name", NATIVE)
def test_native_libraries_need_the_system_only(libraries, name: str) -> None:
    found = libraries(name)
    assert found or (name == "attn-cuda" and shutil.which("nvcc") is None)
    for library in found:
        assert [entry for entry in needed(library) if not SYSTEM.match(entry)] == []


def test_a_linked_framework_would_be_noticed() -> None:
    for entry in ("libtorch.so", "libc10.so", "libcudart.so.13", "libcuda.so.1", "libpython3.11.so.1.0", "libamdhip64.so.7"):
        assert not SYSTEM.match(entry)


@pytest.mark.parametrize("name", ["attn-spec", "attn-triton", "attn-shared-tests"])
def test_pure_packages_serve_every_python(dist: Path, name: str) -> None:
    assert archive(dist, name, "*.whl").name.endswith("-py3-none-any.whl")


def test_the_jax_wheel_serves_every_python(dist: Path) -> None:
    assert "-py3-none-" in archive(dist, "attn-jax-rocm-sink", "*.whl").name
