"""The guarantees table of README.md, written from the contracts and the capabilities of the installed backends.

``python ci/guarantees_table.py`` rewrites the text between the markers; ``--check`` exits 1 when it would change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attn_spec import backends
from attn_spec._contract import CONTRACTS, Contract
from attn_spec._operators import OPERATORS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- guarantees: begin -->", "<!-- guarantees: end -->"


def promises(contract: Contract) -> list[str]:
    """One row a promise: what may change, which quantities keep their bits, and the test that holds it."""
    quantities = list(dict.fromkeys(name for guarantee in contract.guarantees for name in guarantee.quantities))
    lines = [
        f"Contract [`{contract.name}`]({contract.document}): a change of ... moves no bit of ...",
        "",
        f"| change | {' | '.join(quantities)} | held by |",
        f"|---|{'---|' * len(quantities)}---|",
    ]
    for guarantee in contract.guarantees:
        marks = ["yes" if name in guarantee.quantities else "" for name in quantities]
        path, _, test = guarantee.test.partition("::")
        lines.append(f"| {guarantee.change} | {' | '.join(marks)} | [`{test}`]({path}) |")
    return lines


def support() -> list[str]:
    """One row an engine of an installed backend: devices, contracts and the operators with the options that it honours."""
    names = [
        name
        for name in OPERATORS
        if any(name in backend.capabilities(e).operators for backend in backends().values() for e in backend.engines)
    ]
    lines = [f"| backend | devices | contracts | {' | '.join(f'`{name}`' for name in names)} |", f"|---|---|---|{'---|' * len(names)}"]
    for name, backend in sorted(backends().items()):
        for engine in backend.engines:
            capabilities = backend.capabilities(engine)
            cells = []
            for operator in names:
                offered = capabilities.operators.get(operator)
                cells.append("" if offered is None else "forward, gradients" if "gradient" in offered.features else "forward")
            where, contracts = ", ".join(capabilities.devices), ", ".join(capabilities.contracts)
            lines.append(f"| `{name}:{engine}` | {where} | {contracts} | {' | '.join(cells)} |")
    return lines


def table() -> str:
    """The generated text, markers excluded."""
    parts = [line for contract in CONTRACTS.values() for line in (*promises(contract), "")]
    return "\n".join([*parts, *support()])


def replaced(document: str, text: str) -> str:
    """``document`` with ``text`` between its markers."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def main(arguments: list[str]) -> int:
    before = README.read_text()
    after = replaced(before, table())
    if arguments == ["--check"]:
        print("the guarantees table is current" if before == after else "the guarantees table in README.md is stale: run `nox -s gen`")
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
