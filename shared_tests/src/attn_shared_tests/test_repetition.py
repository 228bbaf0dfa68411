"""Repetition: the same call twice, after other calls, in a fresh process and on one thread gives the same bytes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec._arrays import from_float32
from attn_spec.testing.asserts import assert_same
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV

ATTENTION = problems.attention(
    heads=4, queries=30, keys=300, with_sinks=True, bias_shape=(1, 4, 1, 300), wrt=(*QKV, "sinks", "bias"), dtype="bfloat16"
)
CALLS: dict[str, Call] = {
    "av": Call(
        "joint_attn_av_gemm",
        {"probs": problems.softmax((1, 2, 3, 5)).arrays["scores"], "v": problems.softmax((1, 1, 5, 4)).arrays["scores"]},
    ),
    "attention": ATTENTION,
    "softmax": problems.softmax((3, 5, 600), gradient=True),
    "joint": problems.joint(text=20, image=40, gradient=True),
    "packed": problems.varlen((3, 0, 40), wrt=QKV),
}
FRESH = """
import os, pickle, sys
from attn_spec._registry import get_backend
name, engine, device, source, target = sys.argv[1:]
if device == "cpu" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
with open(source, "rb") as file:
    calls = pickle.load(file)
backend = get_backend(name)
results = {key: backend.evaluate(call, device=device, engine=engine) for key, call in calls.items()}
with open(target, "wb") as file:
    pickle.dump(results, file)
"""


def check_twice(evaluate: Evaluate, call: Call) -> None:
    first = evaluate(call)
    for turn in range(3):
        assert_same(evaluate(call), first, f"call {turn + 2}")


def check_after_others(evaluate: Evaluate) -> None:
    """Calls of one shape with other scales, strides, dtypes, sinks and masks, then the first again."""
    base = problems.attention(queries=3, wrt=QKV)
    flipped = {name: base.arrays[name][:, :, ::-1].copy()[:, :, ::-1] for name in QKV}
    others = (
        problems.edited(base, scale=0.2),
        problems.edited(base, causal=False),
        problems.edited(base, sinks=np.ones(4, np.float32)),
        problems.edited(base, **flipped),
        problems.edited(base, **{name: from_float32(base.arrays[name], "bfloat16") for name in QKV}, cotangents=_half(base)),
        problems.edited(base, key_padding_mask=problems.mask_of((3, 7), 7)),
    )
    alone = [evaluate(call) for call in (base, *others)]
    again = [evaluate(call) for call in reversed((base, *others))]
    for index, (one, two) in enumerate(zip(alone, reversed(again), strict=True)):
        assert_same(two, one, f"setting {index} after the others")
    assert_same(alone[4], alone[0], "strides")
    for index in (1, 2, 3, 6):
        assert any((alone[index][name] != alone[0][name]).any() for name in ("out", "lse")), f"setting {index} changes nothing"


def check_fresh_process(evaluate: Evaluate, calls: dict[str, Call], fresh: dict[str, dict[str, np.ndarray]]) -> None:
    """What a new process on one thread computed equals what this one computes."""
    for name, call in calls.items():
        assert_same(fresh[name], evaluate(call), f"{name} in a fresh process on one thread")


def _half(call: Call) -> dict[str, np.ndarray]:
    cotangents = dict(call.cotangents or {})
    return {**cotangents, "out": from_float32(cotangents["out"], "bfloat16")}


def compute_elsewhere(backend: Runner, calls: dict[str, Call], folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Results of a new process, on the CPU bound to one processor."""
    source, target = folder / "calls.pickle", folder / "results.pickle"
    source.write_bytes(pickle.dumps(calls))
    command = [sys.executable, "-c", FRESH, backend.backend.name, backend.engine, backend.device, str(source), str(target)]
    subprocess.run(command, check=True, timeout=300)
    found: dict[str, dict[str, np.ndarray]] = pickle.loads(target.read_bytes())
    return found


@pytest.mark.parametrize("name", CALLS)
def test_same_call_same_bits(backend: Runner, name: str) -> None:
    backend.run(check_twice, CALLS[name])


def test_a_call_does_not_remember_the_one_before(backend: Runner) -> None:
    backend.run(check_after_others)


def test_a_fresh_process_on_one_thread_gives_the_same_bits(backend: Runner, tmp_path: Path) -> None:
    calls = {name: call for name, call in CALLS.items() if backend.supports(call)}
    assert calls, f"{backend.name} runs none of {', '.join(CALLS)}"
    backend.run(check_fresh_process, calls, compute_elsewhere(backend, calls, tmp_path))


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_twice, faulty.drifts, (CALLS["softmax"],)),
        (check_after_others, faulty.remembers_by_shape, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)


def test_the_fresh_process_check_catches(reference: Evaluate) -> None:
    calls = {"softmax": CALLS["softmax"]}
    fresh = {"softmax": reference(CALLS["softmax"])}
    assert_bites(check_fresh_process, faulty.returns_zeros, reference, calls, fresh)
