"""``explain``: who would run a problem here, and every refusal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from attn_spec._contract import contract as find_contract
from attn_spec._contract import default_contract
from attn_spec._errors import UnknownName
from attn_spec._operators import DTYPES, OPERATORS
from attn_spec._problem import Problem
from attn_spec._registry import explain, in_order

_VALUES = {"scale", "out_dtype", "dropout_p", "dropout_seed", "config"}
FEATURES = {name for op in OPERATORS.values() for name in (*op.optional, *op.options)} - _VALUES | {"dropout"}
"""Names of the keywords that a problem may use."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("explain", help="who would run this problem, and each refusal")
    parser.add_argument("--op", default="attention", choices=tuple(OPERATORS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "rocm"))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--contract")
    for name, value in (
        ("batch", 1),
        ("heads", 1),
        ("kv-heads", None),
        ("seq", 128),
        ("keys", None),
        ("head-dim", 128),
        ("value-dim", None),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--features", nargs="*", default=[], metavar="KEYWORD", help="keywords used, for example: causal sinks gradient")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    features = frozenset(part for entry in options.features for part in entry.split(",") if part)
    known = FEATURES | {"gradient"}
    for feature in sorted(features - known):
        raise UnknownName("feature", feature, sorted(known))
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    sizes = {"batch": options.batch, "seq": options.seq, "keys": options.keys or 0}
    if kv_heads < 1 or options.heads % kv_heads or any(size < 0 for size in sizes.values()) or options.head_dim < 1:
        raise ValueError(f"heads {options.heads} must be a multiple of kv heads {kv_heads}, and no size negative; got {sizes}")
    if options.contract is not None:
        find_contract(options.contract)
    problem = Problem(
        op=options.op,
        dtype=options.dtype,
        device=options.device,
        contract=options.contract or default_contract(options.op, options.dtype, options.head_dim, options.device),
        batch=options.batch,
        heads=options.heads,
        kv_heads=kv_heads,
        queries=options.seq,
        keys=options.seq if options.keys is None else options.keys,
        head_dim=options.head_dim,
        value_dim=options.value_dim or options.head_dim,
        features=features,
    )
    answers = explain(problem)
    order = in_order(options.device)
    chosen = next(
        (name for backend in order for name, reasons in answers.items() if name.partition(":")[0] == backend and not reasons), None
    )
    if options.json:
        print(json.dumps({"problem": str(problem), "chosen": chosen, "reasons": answers}, indent=2))
        return 0 if chosen else 1
    print(f"problem: {problem}")
    print(f"runs on: {chosen or 'no installed backend'}")
    for name, reasons in answers.items():
        print(f"{name:32} " + ("can run it" if not reasons else "; ".join(reasons)))
    return 0 if chosen else 1
