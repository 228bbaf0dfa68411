"""Documents that name tests: each test exists, and each known public failure has its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attn_spec._contract import CONTRACTS

ROOT = Path(__file__).parents[3]
FOLDERS = (
    ROOT / "shared_tests/src/attn_shared_tests",
    Path(__file__).parent,
    ROOT / "packages/attn-cuda/tests",
    ROOT / "packages/attn-reference/tests",
    ROOT / "packages/attn-triton/tests",
    ROOT / "packages/attn-jax-rocm-sink/tests",
    ROOT / "ci/tests",
)
TABLE = ROOT / "docs/public-failures.md"
SWITCHES = ROOT / "docs/qat.md"
IDS = {
    "A": (1, 2, 3, 4, 5, 7, 8, 10, 11, 13, 14),
    "B": (1, 2, 4, 5, 6, 7, 8, 9),
    "C": (1, 2, 4, 5),
    "D": (1, 2, 4, 5, 6, 7, 9, 10),
    "E": (1, 2, 3, 5, 6, 7, 8, 9),
    "F": (1, 2, 3, 4, 6, 7, 8, 9, 10, 12),
    "G": (1, 2, 3, 4, 5, 6),
    "H": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "I": (1, 2, 3, 4, 6),
    "J": (1, 2, 3, 5, 6, 7, 8),
    "K": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "L": (1, 2, 3, 4, 6, 7, 8),
    "M": (1, 2, 3, 4, 5),
    "N": (1, 3, 4, 5),
}
COVERED = "ABCDEFHIJK"
"""Kinds of which every row names a test or says why it does not apply."""


def rows() -> dict[str, str]:
    """Last cell by id."""
    cells = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if re.match(r"\| [A-N]\d+ \|", line)]
    return {cell[0]: cell[-1] for cell in cells}


def named(text: str) -> list[str]:
    return re.findall(r"`(test_\w+\.py::test_\w+)`", text)


def exists(test: str) -> bool:
    file, function = test.split("::")
    return any(f"\ndef {function}(" in (folder / file).read_text() for folder in FOLDERS if (folder / file).exists())


def test_every_known_failure_has_a_row() -> None:
    assert sorted(rows()) == sorted(f"{kind}{number}" for kind, numbers in IDS.items() for number in numbers)


def test_every_row_is_covered_or_says_why_not() -> None:
    for name, cell in rows().items():
        assert named(cell) or "later:" in cell or "does not apply:" in cell or "`nox -s " in cell, name
        if name[0] in COVERED:
            assert named(cell) or "does not apply:" in cell or "4-bit" in cell, name


def test_every_named_test_exists() -> None:
    missing = [test for cell in rows().values() for test in named(cell) if not exists(test)]
    assert not missing, missing


def test_every_switch_of_4_bit_attention_has_its_test() -> None:
    found = [named(line) for line in SWITCHES.read_text().splitlines() if line.startswith("| ") and not line.startswith("| switch |")]
    assert len(found) == 14 and all(found)
    missing = [test for tests in found for test in tests if not exists(test)]
    assert not missing, missing


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_guarantee_has_its_test(name: str) -> None:
    for guarantee in CONTRACTS[name].guarantees:
        folder, _, test = guarantee.test.rpartition("/")
        assert (ROOT / folder) == FOLDERS[0] and exists(test), guarantee.test


def test_the_search_notices_a_missing_test() -> None:
    assert not exists("test_forward.py::test_nothing_of_the_kind") and not exists("test_absent.py::test_known_answers")
