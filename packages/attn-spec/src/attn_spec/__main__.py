"""``python -m attn_spec``: info, explain, check, compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from attn_spec._errors import BackendUnavailable, UnknownName, UnsupportedProblem
from attn_spec.cli import check, compare, explain, info


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for a failed check or comparison, 2 for bad use."""
    parser = argparse.ArgumentParser(prog="python -m attn_spec", description="Attention contracts: backends, checks and traces.")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (info, explain, check, compare):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (UnknownName, BackendUnavailable, UnsupportedProblem, ValueError, TypeError, OSError) as error:
        print(f"{parser.prog} {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
