"""A package is built again when, and only when, something that goes into it has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import wheels

COMPILERS = ("Python 3.11", "c++ 12", "nvcc 13")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "packages/attn-spec/src/attn.h",
        "packages/attn-cuda/csrc/kernel.cu",
        "packages/attn-triton/kernel.py",
        wheels.CONSTRAINTS,
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    return tmp_path


@pytest.mark.parametrize("name", ["packages/attn-cuda/csrc/kernel.cu", "packages/attn-spec/src/attn.h", wheels.CONSTRAINTS])
def test_a_changed_source_changes_the_inputs(tree: Path, name: str) -> None:
    before = wheels.inputs(tree, "packages/attn-cuda", COMPILERS)
    (tree / name).write_text("2\n")
    assert wheels.inputs(tree, "packages/attn-cuda", COMPILERS) != before


@pytest.mark.parametrize("name", ["packages/attn-cuda/csrc/new.cu", "packages/attn-spec/src/new.h"])
def test_a_new_source_changes_the_inputs(tree: Path, name: str) -> None:
    before = wheels.inputs(tree, "packages/attn-cuda", COMPILERS)
    (tree / name).write_text("")
    assert wheels.inputs(tree, "packages/attn-cuda", COMPILERS) != before


def test_an_absent_compiler_changes_the_inputs(tree: Path) -> None:
    assert wheels.inputs(tree, "packages/attn-cuda", COMPILERS) != wheels.inputs(tree, "packages/attn-cuda", (*COMPILERS[:2], "none"))


@pytest.mark.parametrize(
    "name", ["packages/attn-triton/kernel.py", "packages/attn-cuda/build/kernel.o", "packages/attn-cuda/src/__pycache__/a.pyc"]
)
def test_other_files_do_not(tree: Path, name: str) -> None:
    before = wheels.inputs(tree, "packages/attn-cuda", COMPILERS)
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("2\n")
    assert wheels.inputs(tree, "packages/attn-cuda", COMPILERS) == before


def test_a_record_is_current_only_with_its_files(tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()
    (built / "attn_cuda-1-py3-none-any.whl").write_text("new")
    record = wheels.Record(tmp_path, "packages/attn-cuda", COMPILERS[0])
    assert not record.is_current("a")
    record.replace("a", built)
    again = wheels.Record(tmp_path, "packages/attn-cuda", COMPILERS[0])
    assert again.is_current("a")
    assert not again.is_current("b")
    assert not wheels.Record(tmp_path, "packages/attn-cuda", "Python 3.12").is_current("a")
    (tmp_path / "attn_cuda-1-py3-none-any.whl").unlink()
    assert not again.is_current("a")


@pytest.mark.parametrize("name", ["attn-spec", "attn-reference", "attn-triton", "attn-jax-rocm-sink"])
def test_wheels_are_built_without_git_and_nvcc(tmp_path: Path, name: str) -> None:
    path = wheels.environment(f"packages/{name}", tmp_path)["PATH"]
    assert shutil.which("git", path=path) is None and shutil.which("nvcc", path=path) is None
    assert shutil.which("c++", path=path) is not None


def test_only_the_kernels_of_cuda_are_built_with_nvcc(tmp_path: Path) -> None:
    path = wheels.environment("packages/attn-cuda", tmp_path)["PATH"]
    assert [shutil.which(tool, path=path) for tool in ("git", "nvcc")] == [shutil.which(tool) for tool in ("git", "nvcc")]
