"""What ``nox -s rocm`` makes of a machine: fake detectors in place of the driver, the compiler and the loader."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from rocm_machine import RUNNERS, Machine, absent_rows, decide, find_compiler, has_runtime, list_gpus

ROCM = Path("/opt/rocm")


def test_nothing_of_hip_is_no_error_and_gives_absent_rows() -> None:
    step = decide(Machine(0, None, False))
    assert (step.build, step.run, step.error) == (False, False, None)
    assert "no HIP detected" in step.text
    rows = absent_rows(step.text)
    assert len(rows) == len(RUNNERS) == 3
    assert all("absent: no HIP detected" in row for row in rows)


@pytest.mark.parametrize(
    ("machine", "missing"),
    [
        (Machine(1, None, True), "a HIP compiler"),
        (Machine(8, ROCM, False), "libamdhip64.so.7"),
        (Machine(1, None, False), "a HIP compiler and libamdhip64.so.7"),
        (Machine(0, ROCM, False), "libamdhip64.so.7"),
        (Machine(0, None, True), "a HIP compiler"),
    ],
)
def test_a_part_of_hip_that_cannot_build_is_an_error(machine: Machine, missing: str) -> None:
    step = decide(machine)
    assert not step.build
    assert not step.run
    assert step.error is not None
    assert step.error.endswith(f"cannot be built without {missing}")


def test_a_gpu_runs_and_a_compiler_alone_builds() -> None:
    assert decide(Machine(2, ROCM, True)).run
    step = decide(Machine(0, ROCM, True))
    assert (step.build, step.run, step.error) == (True, False, None)


def node(folder: Path, name: str, simd_count: int) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd_count}\nmem_banks_count 1\n")


def test_gpus_are_nodes_with_shader_units_that_a_process_can_open(tmp_path: Path) -> None:
    nodes, device = tmp_path / "nodes", tmp_path / "kfd"
    for index, count in enumerate((0, 304, 304)):
        node(nodes, str(index), count)
    assert list_gpus(nodes, device) == 0
    device.touch()
    assert list_gpus(nodes, device) == 2
    assert list_gpus(tmp_path / "none", device) == 0


def rocm_folder(folder: Path, *tools: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    for tool in tools:
        (folder / "bin" / tool).touch()
    return folder


def test_a_compiler_counts_only_where_hipconfig_says_amd(tmp_path: Path) -> None:
    asked: list[Mapping[str, str]] = []

    def answer(platform: str):
        def run(command: list[str], environment: Mapping[str, str]) -> str:
            asked.append(environment)
            assert command == [str(rocm / "bin" / "hipconfig"), "--platform"]
            return f"{platform}\n"

        return run

    rocm = rocm_folder(tmp_path / "rocm", "hipcc")
    environment = {"ROCM_PATH": str(rocm), "HIP_PLATFORM": "nvidia"}
    assert find_compiler(environment, answer("amd")) == rocm
    assert find_compiler(environment, answer("nvidia")) is None
    assert {found["HIP_PLATFORM"] for found in asked} == {"amd"}


def test_no_tool_or_a_failing_hipconfig_is_no_compiler(tmp_path: Path) -> None:
    def fail(command: list[str], environment: Mapping[str, str]) -> str:
        raise subprocess.CalledProcessError(1, command)

    empty = rocm_folder(tmp_path / "empty")
    assert find_compiler({"ROCM_PATH": str(empty)}, fail) is None
    broken = rocm_folder(tmp_path / "broken", "amdclang++")
    assert find_compiler({"ROCM_PATH": str(broken)}, fail) is None
    assert find_compiler({"ROCM_PATH": str(broken)}) is None  # without a hipconfig


def test_the_runtime_is_asked_for_by_the_name_of_rocm_7() -> None:
    names: list[str] = []

    def missing(name: str) -> object:
        names.append(name)
        raise OSError(name)

    assert not has_runtime(missing)
    assert has_runtime(names.append)
    assert names == ["libamdhip64.so.7"] * 2
