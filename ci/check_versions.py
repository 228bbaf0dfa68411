"""One version for every package: pyproject files, ``__version__``, the pins between packages and the changelog must agree."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = re.compile(r"^(attn-[a-z-]+)\s*(.*)$")


def projects(root: Path) -> list[Path]:
    """The pyproject files of the installable packages."""
    return [*sorted(root.glob("packages/*/pyproject.toml")), root / "shared_tests" / "pyproject.toml"]


def requirements(document: dict) -> list[str]:
    """Every requirement that a pyproject file states: for the build, for use, and of its extras."""
    project = document["project"]
    extras = [entry for group in project.get("optional-dependencies", {}).values() for entry in group]
    return [*document["build-system"]["requires"], *project.get("dependencies", []), *extras]


def disagreements(root: Path) -> list[str]:
    """What does not agree with the version of attn-spec, one sentence each."""
    expected = tomllib.loads((root / "packages/attn-spec/pyproject.toml").read_text())["project"]["version"]
    found = []
    for path in projects(root):
        document = tomllib.loads(path.read_text())
        where = path.relative_to(root)
        version = document["project"]["version"]
        if version != expected:
            found.append(f"{where}: version {version}, attn-spec has {expected}")
        for requirement in requirements(document):
            own = OWN.match(requirement)
            if own and own[2] != f"=={expected}":
                found.append(f"{where}: requires {requirement!r} instead of '{own[1]}=={expected}'")
        for module in path.parent.glob("src/*/__init__.py"):
            literal = re.search(r'^__version__ = "(.*)"$', module.read_text(), re.MULTILINE)
            if literal is None or literal[1] != expected:
                found.append(f"{module.relative_to(root)}: __version__ is {literal[1] if literal else 'missing'}, not {expected}")
    if not re.search(rf"^## \[{re.escape(expected)}\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md: no section for {expected}")
    return found


def main() -> int:
    found = disagreements(ROOT)
    print("\n".join(found) or "one version everywhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
