"""``check``: the operator test. Bytes against the reference, batch invariance, dtypes, and the trace of the build that ran."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np

from attn_spec._arrays import dtype_name
from attn_spec._backend import Backend, Call
from attn_spec._compare import Difference, difference
from attn_spec._dispatch import get_op
from attn_spec._errors import UnsupportedProblem
from attn_spec._operators import OPERATORS, QAT
from attn_spec._registry import get_backend, parse
from attn_spec._trace import Recording
from attn_spec.testing.inputs import Sizes, outputs_of, random_call, select
from attn_spec.testing.recordings import record, replay

ALIASES = {
    "pytorch": "attn_reference:pytorch",
    "host": "attn_reference:host",
    "cuda": "attn_cuda",
    "triton": "attn_triton",
    "jax": "attn_jax_rocm_sink",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


_DEFAULTS = {"op": "attention", "dtype": "bfloat16", "batch": 2, "heads": 4, "seq": 16, "head_dim": 64, "seed": 123}
_FLAGS = ("sinks", "padding", "check_grad")
_FIXED = (*_DEFAULTS, *_FLAGS, "kv_heads", "keys", "value_dim", "reference", "contract", "causal", "window", "record")
"""Options that a recording decides."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check", help="the operator test: compare bytes with the reference, and batch invariance; exit 1 on any failure"
    )
    parser.add_argument("--op", help="default: attention", choices=tuple(name for name in OPERATORS if name != "attn"))
    parser.add_argument("--candidate", default="host", help=f"{', '.join(ALIASES)}, or NAME[:ENGINE] of an installed backend")
    parser.add_argument(
        "--reference", help="as --candidate; default attn_reference's PyTorch definition, its host kernels for the definition itself"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "rocm"))
    parser.add_argument("--dtype", help="default: bfloat16", choices=(*DTYPES.values(), *DTYPES))
    parser.add_argument("--contract")
    parser.add_argument("--recording", metavar="FILE", help="compare the results of a recorded call with the candidate's, and nothing else")
    parser.add_argument("--record", metavar="FILE", help="write the call and the candidate's results as a recording")
    for name in ("batch", "heads", "kv_heads", "seq", "keys", "head_dim", "value_dim", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {_DEFAULTS[name]}" if name in _DEFAULTS else None)
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: causal, for attention")
    parser.add_argument("--window", type=_side, nargs=2, metavar=("LEFT", "RIGHT"), help="positions besides the diagonal one, or none")
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--padding", action="store_true", help="with a random key padding mask")
    parser.add_argument("--check-grad", action="store_true", help="gradients too, from random cotangents")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    name = ALIASES.get(options.candidate, options.candidate)
    candidate, engine = get_backend(name), parse(name)[1]
    if options.recording is not None:
        _refuse_fixed(options)
        return _run_recording(options.recording, candidate, engine, options)
    for default, value in _DEFAULTS.items():
        if getattr(options, default) is None:
            setattr(options, default, value)
    op = get_op(options.op, device=options.device, backend=name, contract=options.contract)
    sizes = Sizes(
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads,
        queries=options.seq,
        keys=options.keys,
        head_dim=options.head_dim,
        value_dim=options.value_dim,
        causal=options.causal is not False,
        window=tuple(options.window) if options.window else None,
        sinks=options.sinks,
        padding=options.padding,
    )
    _applies(options)
    call = random_call(options.op, DTYPES.get(options.dtype, options.dtype), sizes, options.seed, gradients=options.check_grad)
    call = replace(call, contract=options.contract)
    reference = _reference(options.reference, candidate, engine, call)
    rows = check(call, candidate, engine, options.device, reference)
    if options.record is not None:
        results = candidate.evaluate(call, device=options.device, engine=engine)
        origin = {"backend": op.trace.selected_backend, "platform": op.trace.platform, "build": op.trace.kernel_fingerprint}
        record(call, results, origin).save(options.record)
    passed = all(found.equal for found in rows.values())
    if options.json:
        lines = {row: {"passed": found.equal, "detail": found.text()} for row, found in rows.items()}
        print(json.dumps({"passed": passed, "rows": lines, "reference": _name(*reference), "trace": op.trace.as_dict()}, indent=2))
        return 0 if passed else 1
    for row, found in rows.items():
        print(f"{'pass' if found.equal else 'FAIL'}  {row:44} {found.text()}")
    print(f"reference: {_name(*reference)}")
    for field, value in op.trace.as_dict().items():
        print(f"trace {field}: {value}")
    print(f"{sum(found.equal for found in rows.values())} of {len(rows)} passed")
    return 0 if passed else 1


def _run_recording(path: str, candidate: Backend, engine: str | None, options: argparse.Namespace) -> int:
    """A call recorded elsewhere, say on a GPU, computed again: exit status 0 when every byte comes back."""
    recording = Recording.load(path)
    call, expected = replay(recording)
    reasons = candidate.reasons(call.problem(options.device), engine)
    if reasons:
        raise UnsupportedProblem(candidate.name, reasons, call.problem(options.device))
    found = candidate.evaluate(call, device=options.device, engine=engine)
    rows = {name: difference(found[name], expected[name]) for name in expected}
    passed = bool(rows) and all(row.equal for row in rows.values())
    if options.json:
        lines = {name: {"passed": row.equal, "detail": row.text()} for name, row in rows.items()}
        print(json.dumps({"passed": passed, "rows": lines, "header": recording.header}, indent=2))
        return 0 if passed else 1
    for name, row in rows.items():
        print(f"{'pass' if row.equal else 'FAIL'}  {name:44} {row.text()}")
    for field, value in recording.header.items():
        print(f"recorded {field}: {value}")
    print(f"{sum(row.equal for row in rows.values())} of {len(rows)} passed")
    return 0 if passed else 1


def check(call: Call, candidate: Backend, engine: str | None, device: str, reference: tuple[Backend, str | None]) -> dict[str, Difference]:
    """Every comparison by name: bytes and dtypes against the reference, then batch size, slot and neighbours against itself."""
    problem = call.problem(device)
    reasons = candidate.reasons(problem, engine)
    if reasons:
        raise UnsupportedProblem(candidate.name, reasons, problem)
    results = candidate.evaluate(call, device=device, engine=engine)
    expected = reference[0].evaluate(call, device="cpu", engine=reference[1])
    rows = {f"{name} equals the reference": difference(results[name], expected[name]) for name in expected}
    for name in call.wrt:
        rows[f"d{name} has the dtype of {name}"] = _same_dtype(results[f"d{name}"], call.arrays[name])
    batch = len(call.arrays["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in call.arrays else next(iter(call.arrays.values())).shape[0]
    whole = outputs_of(call, results, 0)
    others = list(range(1, batch))
    for what, items, slot in (
        ("alone", [0], 0),
        ("in the last slot", [*others, 0], len(others)),
        ("among twice its neighbours", [0, *others, *others], 0),
        ("beside copies of itself", [0] * (batch + 1), batch),
    ):
        rearranged = select(call, items)
        part = outputs_of(rearranged, candidate.evaluate(rearranged, device=device, engine=engine), slot)
        rows.update({f"{name} of item 0 {what}": difference(part[name], whole[name]) for name in whole})
    return rows


def _side(text: str) -> int | None:
    """A side of the window; "none" is one without a bound."""
    return None if text == "none" else int(text)


_KEYWORDS = {
    "causal": ("attention", "attention_varlen", *QAT),
    "window": ("attention", "attention_varlen"),
    "sinks": ("attention", "attention_varlen", *QAT),
    "padding": ("attention", "qat_attention", "joint_attn_softmax", "joint_attention"),
    "keys": ("attention", "attention_varlen", *QAT, "joint_attn_qk_gemm", "joint_attn_softmax", "joint_attn_av_gemm"),
}
"""The operators that each option of the command applies to."""


def _applies(options: argparse.Namespace) -> None:
    """Refuse an option that the operator does not have, and sizes that no array can have."""
    for name, operators in _KEYWORDS.items():
        value = getattr(options, name)
        if value is not None and value is not False and options.op not in operators:
            raise ValueError(f"--{name} does not apply to {options.op}; it is an option of {', '.join(operators)}")
    for name, least in (("batch", 1), ("heads", 1), ("seq", 0), ("keys", 0), ("kv_heads", 0), ("head_dim", 0), ("value_dim", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be {least} or more; got {value}")


def _same_dtype(gradient: np.ndarray, array: np.ndarray) -> Difference:
    if gradient.dtype == array.dtype:
        return Difference(True)
    return Difference(False, reason=f"dtype {dtype_name(gradient.dtype)} against {dtype_name(array.dtype)}")


def _refuse_fixed(options: argparse.Namespace) -> None:
    flags = {name: getattr(options, name) for name in _FIXED}
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if (value if name in _FLAGS else value is not None)]
    if given:
        raise ValueError(f"a recording has its own call; it takes no {', '.join(given)}")


def _reference(name: str | None, candidate: Backend, engine: str | None, call: Call) -> tuple[Backend, str | None]:
    """The reference that is named; else an engine of attn_reference that can run the call, another one than the candidate if there is."""
    name = ALIASES.get(name or "attn_reference", name or "attn_reference")
    backend, wanted = get_backend(name), parse(name)[1]
    if wanted is not None or backend.name != "attn_reference":
        return backend, wanted
    is_definition = candidate is backend and engine == "pytorch"
    engines = ("host", "pytorch") if is_definition else ("pytorch", "host")
    return backend, next((each for each in engines if not backend.reasons(call.problem("cpu"), each)), engines[0])


def _name(backend: Backend, engine: str | None) -> str:
    return f"{backend.name}:{backend.engine(engine)}"
