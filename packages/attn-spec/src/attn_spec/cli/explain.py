"""``explain``: who would run a problem here, and every refusal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from attn_spec._errors import UnknownName
from attn_spec._operators import DTYPES, OPERATORS, QAT
from attn_spec._problem import Problem
from attn_spec._registry import explain, in_order
from attn_spec._validation import ArrayInfo, describe

_VALUES = {"scale", "out_dtype", "dropout_p", "dropout_seed", "config"}
FEATURES = {name for op in OPERATORS.values() for name in (*op.optional, *op.options)} - _VALUES | {"dropout"}
"""Names of the keywords that a problem may use."""
_OPTIONS: dict[str, dict[str, Any]] = {"window": {"window": (0, None)}, "dropout": {"dropout_p": 0.5}, "return_lse": {"return_lse": True}}
"""Features that are no arrays, as options of a call."""


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
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: that of the operator")
    parser.add_argument("--features", nargs="*", default=[], metavar="KEYWORD", help="keywords used, for example: sinks window gradient")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    features = frozenset(part for entry in options.features for part in entry.split(",") if part)
    known = FEATURES | {"gradient"}
    for feature in sorted(features - known):
        raise UnknownName("feature", feature, sorted(known))
    problem = _problem(options, features)
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


def _problem(options: argparse.Namespace, features: frozenset[str]) -> Problem:
    """The problem of a call of these sizes, so that what a call refuses is refused here in the same words."""
    for name in ("batch", "heads", "kv_heads", "seq", "keys", "head_dim", "value_dim"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more; got {value}")
    batch, heads, queries, head_dim = options.batch, options.heads, options.seq, options.head_dim
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    keys = queries if options.keys is None else options.keys
    value_dim = head_dim if options.value_dim is None else options.value_dim
    op = OPERATORS[options.op]
    packed = "cu_seqlens_q" in op.inputs
    q, k, v = ((heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim))
    shapes: dict[str, tuple[int, ...]] = {"q": q, "k": k, "v": v, "scores": (heads, queries, keys), "probs": (heads, queries, keys)}
    shapes = {name: (rows, count, width) if packed else (batch, count, rows, width) for name, (count, rows, width) in shapes.items()}
    for side in ("txt", "img"):
        shapes[f"q_{side}"] = (batch, *q)
        shapes |= {f"{name}_{side}": (batch, kv_heads, queries, width) for name, width in (("k", head_dim), ("v", value_dim))}
    arrays = {name: ArrayInfo(shapes[name], options.dtype, options.device) for name in op.inputs if name in shapes}
    integers = {name: (batch + 1,) for name in ("cu_seqlens_q", "cu_seqlens_k") if packed}
    integers |= {name: (batch,) for name in ("kv_lengths", "q_start", "k_start", "seqlens_q", "seqlens_k") if name in features}
    arrays |= {name: ArrayInfo(shape, "int32", options.device) for name, shape in integers.items()}
    masks = {"key_padding_mask": (batch, keys), "prompt_mask": (batch, queries)}
    arrays |= {name: ArrayInfo(shape, "bool", options.device) for name, shape in masks.items() if name in features}
    floats = {"sinks": (heads,), "bias": (batch, heads, queries, keys)}
    arrays |= {name: ArrayInfo(shape, "float32", options.device) for name, shape in floats.items() if name in features}
    given: dict[str, Any] = {}
    for name in sorted(features & _OPTIONS.keys()):
        given |= _OPTIONS[name]
    causal = options.op not in QAT if options.causal is None else options.causal
    if "causal" in features or options.causal is not None or "causal" in op.options:
        given["causal"] = causal or "causal" in features
    return describe(options.op, arrays, given, contract=options.contract, gradient="gradient" in features)
