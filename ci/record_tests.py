"""What test runs on a machine found, as a result file: counts for each module of tests, why tests were skipped, devices and fingerprints.

    pytest ... --junitxml=one.xml
    python ci/record_tests.py --output benchmarks/results/gpu-tests-h200.json --command "pytest ..." one.xml ...

Exits 1 when a test failed, or when nothing ran.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def outcome(case: ElementTree.Element) -> str:
    return next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")


def summary(files: Iterable[Path]) -> dict[str, Any]:
    """Counts by module, the names of failed tests, and how many tests were skipped for each reason, over JUnit files of pytest."""
    modules: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    failed: list[str] = []
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            module, found = case.get("classname", ""), outcome(case)
            modules.setdefault(module, Counter())[found] += 1
            if found == "failed":
                failed.append(f"{module}::{case.get('name')}")
            reasons.update(child.get("message", "") for child in case if child.tag == "skipped")
    total: Counter[str] = sum(modules.values(), Counter())
    return {
        "total": dict(sorted(total.items())),
        "failed": failed,
        "modules": {name: dict(sorted(counts.items())) for name, counts in sorted(modules.items())},
        "skipped": dict(reasons.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--command", required=True, help="what was run")
    parser.add_argument("files", type=Path, nargs="+", help="JUnit files of pytest")
    options = parser.parse_args()

    from attn_spec._environment import environment
    from attn_spec._registry import fingerprints

    found = summary(options.files)
    about = {**environment(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "fingerprints": fingerprints()}
    options.output.write_text(json.dumps({"environment": about, "command": options.command, **found}, indent=1) + "\n")
    print(json.dumps({"total": found["total"], "failed": found["failed"]}, indent=1))
    if found["failed"] or not found["total"].get("passed"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
