"""The index of requirements (``REQUIREMENTS.md``) names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
INDEX = (FOLDER / "REQUIREMENTS.md").read_text()
FOLDERS = (FOLDER, FOLDER.parents[2] / "ci" / "amd")


def missing(text: str) -> list[str]:
    """Named tests that no file of that name defines."""
    files = {path.name: path.read_text() for folder in FOLDERS for path in folder.glob("*.py")}
    names = re.findall(r"`(\w+\.py)::(\w+)`", text)
    return [f"{file}::{test}" for file, test in names if f"\ndef {test}(" not in files.get(file, "")]


def test_every_requirement_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| R(\d+) \|(.*)$", INDEX, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    assert all("::test_" in row for _, row in rows)
    assert missing(INDEX) == []


def test_a_test_that_is_gone_is_found() -> None:
    assert missing(INDEX.replace("::test_each_feature`", "::test_no_feature`")) == ["test_hip_engine.py::test_no_feature"]
