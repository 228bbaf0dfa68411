"""The record of test runs counts what pytest wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import record_tests

PASSED = '<testcase classname="a.test_x" name="one"/>'
SKIPPED = '<testcase classname="a.test_x" name="two"><skipped message="no GPU"/></testcase>'
FAILED = '<testcase classname="b.test_y" name="three"><failure message="x"/></testcase>'
BROKEN = '<testcase classname="b.test_y" name="four"><error message="x"/></testcase>'


def junit(folder: Path, name: str, *cases: str) -> Path:
    file = folder / name
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return file


def test_counts_by_module_over_all_files(tmp_path: Path) -> None:
    found = record_tests.summary([junit(tmp_path, "1.xml", PASSED, SKIPPED), junit(tmp_path, "2.xml", PASSED, FAILED, BROKEN)])
    assert found["total"] == {"failed": 2, "passed": 2, "skipped": 1}
    assert found["modules"] == {"a.test_x": {"passed": 2, "skipped": 1}, "b.test_y": {"failed": 2}}
    assert found["failed"] == ["b.test_y::three", "b.test_y::four"] and found["skipped"] == {"no GPU": 1}


@pytest.mark.parametrize(("cases", "code"), [((PASSED, SKIPPED), None), ((PASSED, FAILED), 1), ((SKIPPED,), 1), ((), 1)])
def test_it_fails_when_a_test_failed_or_nothing_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cases: tuple[str, ...], code: int | None
) -> None:
    output = tmp_path / "record.json"
    monkeypatch.setattr(
        sys, "argv", ["record_tests.py", "--output", str(output), "--command", "pytest", str(junit(tmp_path, "1.xml", *cases))]
    )
    if code is None:
        record_tests.main()
    else:
        with pytest.raises(SystemExit) as stop:
            record_tests.main()
        assert stop.value.code == code
    assert '"fingerprints"' in output.read_text()
