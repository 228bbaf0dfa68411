"""``compare A B``: two recordings, byte for byte."""

from __future__ import annotations

import argparse
import json
from typing import Any

from attn_spec._compare import difference
from attn_spec._trace import Recording


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("compare", help="compare two saved recordings byte for byte")
    parser.add_argument("a", metavar="A", help="safetensors recording")
    parser.add_argument("b", metavar="B", help="safetensors recording")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    left, right = Recording.load(options.a), Recording.load(options.b)
    lines: dict[str, str] = {}
    equal = True
    for name in sorted({*left.arrays, *right.arrays}):
        if name not in left.arrays or name not in right.arrays:
            lines[name], equal = f"only in {options.a if name in left.arrays else options.b}", False
            continue
        found = difference(left.arrays[name], right.arrays[name])
        lines[name] = found.text()
        equal &= found.equal
    if options.json:
        print(json.dumps({"equal": equal, "arrays": lines, "headers": [left.header, right.header]}, indent=2))
    else:
        for name, line in lines.items():
            print(f"{name:24} {line}")
        print("equal" if equal else "different")
    return 0 if equal else 1
