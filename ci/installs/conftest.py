"""Where `nox -s install` put the packages: archives in dist/, one environment a package in build/install/."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.fixture
def path_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A PATH with every command of this machine but those whose names start with one of ``prefixes``."""

    def build(*prefixes: str) -> str:
        folder = tmp_path_factory.mktemp("bin")
        for source in dict.fromkeys([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]):
            for command in Path(source).iterdir():
                if not command.name.startswith(prefixes) and not (folder / command.name).exists():
                    (folder / command.name).symlink_to(command)
        return str(folder)

    return build
