"""The version check notices each place that can disagree."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_versions
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that state a version."""
    for pattern in (
        "packages/*/pyproject.toml",
        "packages/*/src/*/__init__.py",
        "shared_tests/pyproject.toml",
        "shared_tests/src/*/__init__.py",
    ):
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    return tmp_path


def test_this_tree_agrees() -> None:
    assert check_versions.disagreements(ROOT) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("packages/attn-cuda/pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"', "version 0.2.0, attn-spec has 0.1.0"),
        (
            "packages/attn-triton/pyproject.toml",
            "attn-spec==0.1.0",
            "attn-spec>=0.1",
            "requires 'attn-spec>=0.1' instead of 'attn-spec==0.1.0'",
        ),
        (
            "packages/attn-reference/src/attn_reference/__init__.py",
            '__version__ = "0.1.0"',
            '__version__ = "0.0.9"',
            "__version__ is 0.0.9",
        ),
        ("CHANGELOG.md", "## [0.1.0]", "## [0.3.0]", "no section for 0.1.0"),
    ],
)
def test_a_disagreement_is_named(tree: Path, file: str, before: str, after: str, message: str) -> None:
    path = tree / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    found = check_versions.disagreements(tree)
    assert len(found) == 1
    assert found[0].startswith(file)
    assert message in found[0]
