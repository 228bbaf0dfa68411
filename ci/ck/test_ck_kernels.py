"""Kernels of Composable Kernel under the production ck engine: jit, XLA FFI, the engine's own kernels, CK's host code and its code objects,
executed by the interpreter ("interpreter bytes": docs/rocm.md says what that cannot show). Held to float64 from the definition.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _ffi, attention
from engine_on_cpu import engine_on_cpu
from interpreter import Device
from interpreter import build as build_interpreter
from matrix_oracle import Problem, solve

from ck.libraries import ROOT, TARGET, build
from ck.sources import HEAD_DIM

BATCH, HEADS, KV_HEADS = 1, 4, 2
LIMITS = {"out": 2.0**-7, "lse": 2.0**-16, "dq": 2.0**-7, "dk": 2.0**-7, "dv": 2.0**-7, "dsinks": 2.0**-7}
"""Largest error beside the largest value. CK rounds P and dS to bfloat16 before their products, and every result at the end."""

KERNELS = {"forward": 1, "backward": 3}
"""Of CK in a call: forward; the sum dout . out, dk and dv with partial dq, and the sum of these."""
OWN = {"forward": 2, "backward": 3}
"""Of the engine with sinks: rescaled output and log-sum-exp; terms, chunks and heads of dsinks."""
GROUPS = 2
"""Sums of dk and dv over the heads of a group, in backward."""

Results = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """A call: queries and keys, and whether it is causal."""

    length: int
    causal: bool

    def __str__(self) -> str:
        return f"S{self.length}" + ("-causal" if self.causal else "")


SHAPES = [Shape(length, causal) for length in (128, 256) for causal in (False, True)]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Device]:
    """The GPU behind ``engine="ck"``."""
    library = build(ROOT / "build" / "ck")
    found = Device(build_interpreter(), TARGET)
    found.allow_host_memory(True)  # the bounds of XLA's buffers are not known
    with engine_on_cpu("ck", library):
        yield found


def inputs(shape: Shape) -> tuple[dict[str, jax.Array], jax.Array]:
    """bfloat16 q, k, v and dout, and sinks around the log-sum-exp of a row."""
    rng = np.random.default_rng(shape.length)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "dout": HEADS}
    found = {name: jnp.asarray(rng.standard_normal((BATCH, count, shape.length, HEAD_DIM)), jnp.bfloat16) for name, count in heads.items()}
    found["sinks"] = jnp.asarray([1.5, 4.0, 6.0, -jnp.inf], jnp.float32)
    return found, found.pop("dout")


def exact(shape: Shape, sinks: bool) -> Results:
    given, dout = inputs(shape)
    wide = {name: np.asarray(array).astype(np.float64) for name, array in given.items()}
    visible = np.ones((BATCH, shape.length, shape.length), bool)
    if shape.causal:
        visible = np.tril(visible)
    found = solve(
        Problem(
            wide["q"],
            wide["k"],
            wide["v"],
            visible,
            HEAD_DIM**-0.5,
            wide["sinks"] if sinks else None,
            None,
            None,
            0.0,
            np.asarray(dout).astype(np.float64),
            np.zeros((BATCH, HEADS, shape.length)),
        )
    )
    return {name: found[name] for name in LIMITS} | {"dsinks": found["dsinks"].sum(0)}


@cache
def run(shape: Shape, sinks: bool) -> Results:
    """out, lse and all gradients of one compiled call."""
    given, dout = inputs(shape)
    if not sinks:
        del given["sinks"]

    def call(moving: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return attention(**moving, causal=shape.causal, return_lse=True, engine="ck")

    @jax.jit
    def both(moving: dict[str, jax.Array], dout: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        out, pullback, lse = jax.vjp(call, moving, has_aux=True)
        return out, lse, pullback(dout)[0]

    out, lse, gradients = both(given, dout)
    found = {"out": out, "lse": lse, **{f"d{name}": array for name, array in gradients.items()}}
    return {name: np.asarray(array).astype(np.float64) for name, array in found.items()}


def errors(found: Results, expected: Results) -> Results:
    """Largest error of each result, beside what is allowed."""
    return {
        name: np.nan_to_num(np.abs(found[name] - expected[name]).max() / (LIMITS[name] * np.abs(expected[name]).max()), nan=np.inf)
        for name in found
    }


@pytest.mark.parametrize("sinks", (False, True), ids=("plain", "sinks"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_near_float64(device: Device, shape: Shape, sinks: bool) -> None:
    before = device.totals()[0]
    found = run(shape, sinks)
    launches = sum(KERNELS.values()) + GROUPS + (sum(OWN.values()) if sinks else 0)
    assert device.totals()[0] - before == launches
    assert set(found) == set(LIMITS) - (set() if sinks else {"dsinks"})
    for name, error in errors(found, exact(shape, sinks)).items():
        assert error <= 1, f"{name} is {error:.2f} times further from float64 than allowed"
    if sinks:
        assert found["dsinks"][3] == 0.0, "the gradient of a sink of -inf"


def test_the_engine_rescales() -> None:
    """These kernels know no sink, so the sinks above are the engine's formulas."""
    library = _ffi.load("ck").handle
    assert library is not None
    sinks = library.attn_jax_rocm_sink_ck_sinks
    sinks.restype = ctypes.c_char_p
    assert sinks() == b"rescaled"


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]], ids=str)
def test_a_dropped_sink_is_found(shape: Shape) -> None:
    """Without the rescale, and without the sink in the log-sum-exp that backward gets, every result fails."""
    found = errors(run(shape, False), exact(shape, True))
    assert min(found.values()) > 1, found


@pytest.mark.parametrize("fault", ("zeros", "other causality", "backward without the sink", "dsinks without the output's rescale"))
def test_a_fault_is_found(fault: str) -> None:
    shape = SHAPES[0]
    good, expected = run(shape, True), exact(shape, True)
    plain = run(shape, False)
    share = np.exp(plain["lse"] - good["lse"])[..., None]
    bad = {
        "zeros": {name: np.zeros_like(array) for name, array in good.items()},
        "other causality": run(Shape(shape.length, not shape.causal), True),
        "backward without the sink": {name: plain[name] for name in ("dq", "dk", "dv")},
        "dsinks without the output's rescale": {"dsinks": good["dsinks"] / share.mean((0, 2, 3))},
    }[fault]
    found = errors(bad, expected)
    assert min(found.values()) > 1, found


def test_the_runs_of_a_call_agree(device: Device) -> None:
    """Deterministic: another order of workgroups and waves moves no bit."""
    shape = SHAPES[-1]
    good = run(shape, True)
    run.cache_clear()
    try:
        device.set_order(7)
        again = run(shape, True)
    finally:
        device.set_order(0)
    assert all(np.array_equal(again[name], good[name]) for name in good)
