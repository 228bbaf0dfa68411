"""docs/add-a-backend.md, followed to the letter: its backend is found, passes the operator test, and a wrong one fails it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/add-a-backend.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return found[0]


CHECK, SUITE = (
    next(line for line in DOCUMENT.splitlines() if line.startswith(start)) for start in ("python -m attn_spec check", "pytest ")
)
REFUSAL = "        if reasons:\n            raise UnsupportedProblem(self.name, reasons, problem)\n"


def install(folder: Path, code: str) -> None:
    """The module and its entry point, as an installer leaves them."""
    (folder / "mine.py").write_text(code)
    metadata = folder / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))


def run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m module`` in ``folder``, which holds the backend."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def attn_spec(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "attn_spec", *arguments)


def suite(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """The command of the document on some tests of the suite."""
    _, *arguments = shlex.split(SUITE)
    place = arguments.index("attn_shared_tests")
    arguments[place : place + 1] = [f"attn_shared_tests.{test}" for test in tests]
    return run(folder, "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def test_it_is_found_and_passes(tmp_path: Path) -> None:
    install(tmp_path, block("python"))
    assert "mine" in attn_spec(tmp_path, "info").stdout
    result = attn_spec(tmp_path, *shlex.split(CHECK)[3:])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "selected_backend: mine:libm" in result.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("range(probs.shape[3])", "reversed(range(probs.shape[3]))"),
        ("out = fused(probs[..., key, None], v[:, :, None, key], out)", "out = probs[..., key, None] * v[:, :, None, key] + out"),
    ],
    ids=["descending keys", "two roundings"],
)
def test_other_arithmetic_fails(tmp_path: Path, right: str, wrong: str) -> None:
    code = block("python")
    assert right in code
    install(tmp_path, code.replace(right, wrong))
    result = attn_spec(tmp_path, *shlex.split(CHECK)[3:])
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAIL" in result.stdout


def test_what_it_does_not_list_is_refused(tmp_path: Path) -> None:
    install(tmp_path, block("python"))
    result = attn_spec(tmp_path, "check", "--candidate", "mine", "--op", "attention")
    assert result.returncode == 2
    assert "operator attention (supported: joint_attn_av_gemm)" in result.stderr


def test_the_suite_passes(tmp_path: Path) -> None:
    install(tmp_path, block("python"))
    result = suite(tmp_path, "test_errors", "test_cross_backend::test_bytes_equal_the_reference")
    assert result.returncode == 0, result.stdout + result.stderr
    ran = re.search(r"^mine:libm\[cpu\] +(\d+) +(\d+)", result.stdout, re.MULTILINE)
    assert ran is not None and int(ran[1]) > 1 and int(ran[2]) > 1, result.stdout


def test_the_suite_notices_a_backend_that_refuses_nothing(tmp_path: Path) -> None:
    code = block("python")
    assert REFUSAL in code
    install(tmp_path, code.replace(REFUSAL, ""))
    result = suite(tmp_path, "test_errors::test_capabilities_and_behaviour_agree")
    assert result.returncode == 1, result.stdout + result.stderr
