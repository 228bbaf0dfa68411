"""Every Python example in the documents of the repository runs as it is printed, and every guarantee names a test that exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import guarantees_table
import pytest
from attn_spec._contract import CONTRACTS, Guarantee

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("shared_tests/README.md")), *sorted(ROOT.glob("docs/*.md"))]
"""Those of the packages run in `nox -s install`, where nothing but the package is installed."""
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, code in enumerate(FENCE.findall(path.read_text()), 1)
]
GUARANTEES = [guarantee for contract in CONTRACTS.values() for guarantee in contract.guarantees]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "example.py").write_text(code)
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    return subprocess.run(
        [sys.executable, "example.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path) -> None:
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_broken_example_is_noticed(tmp_path: Path) -> None:
    assert run("import attn_spec\nattn_spec.get_op('nothing')\n", tmp_path).returncode != 0


def test_the_main_readme_has_an_example_for_torch_and_one_for_jax() -> None:
    examples = FENCE.findall((ROOT / "README.md").read_text())
    for framework in ("import torch", "import jax"):
        matching = [code for code in examples if framework in code]
        assert len(matching) == 1
        assert len(matching[0].splitlines()) <= 10


@pytest.mark.parametrize("guarantee", GUARANTEES, ids=lambda guarantee: guarantee.change)
def test_a_guarantee_names_a_test_that_exists(guarantee: Guarantee) -> None:
    path, _, name = guarantee.test.partition("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in functions, f"{path} has no {name}"


def test_the_table_in_the_readme_is_current() -> None:
    document = (ROOT / "README.md").read_text()
    assert guarantees_table.replaced(document, guarantees_table.table()) == document, "run `nox -s gen`"
    assert guarantees_table.replaced(document, "stale") != document
