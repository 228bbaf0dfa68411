"""Where `nox -s install` put the packages: archives in dist/, one environment a package in build/install/."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dist() -> Path:
    return ROOT / "dist"


@pytest.fixture
def python_of() -> Callable[[str], str]:
    """Path of the Python in which one package was installed alone."""
    return lambda name: str(ROOT / "build/install" / name / "bin/python")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command in an empty folder, outside the tree; variables of ``env`` that are None are removed."""

    def run(*command: str, **env: str | None) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=900, check=False)

    return run
