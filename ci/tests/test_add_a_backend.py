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


CHECK = next(line for line in DOCUMENT.splitlines() if line.startswith("python -m attn_spec check"))


def install(folder: Path, code: str) -> None:
    """The module and its entry point, as an installer leaves them."""
    (folder / "mine.py").write_text(code)
    metadata = folder / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))


def attn_spec(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "attn_spec", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


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
