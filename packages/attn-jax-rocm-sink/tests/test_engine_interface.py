"""What holds for every engine behind the interface: one list of buffers, a plan of the configuration alone, refusals before any work."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from attn_jax_rocm_sink._config import GRADIENTS, Config, config_of
from engine_fakes import CSRC, Fakes

ENGINES = ("host", "cuda", "ck")
B, H, K, S, T, D = 2, 4, 2, 3, 5, 16
GUARD = 64
JUNK = 1e30


@dataclass
class Case:
    """One configuration and the shapes of its buffers."""

    config: Config
    shapes: dict[str, jax.ShapeDtypeStruct]


def make(direction: str, *, sinks: bool = False, bias: bool = False, lengths: bool = False, batch: int = B, **attributes: Any) -> Case:
    half, single = np.dtype("float16"), np.dtype("float32")
    shapes = {"q": (batch, H, S, D), "k": (batch, K, T, D), "v": (batch, K, T, D)}
    structs = {name: jax.ShapeDtypeStruct(shape, half) for name, shape in shapes.items()}
    if lengths:
        structs["kv_lengths"] = jax.ShapeDtypeStruct((batch,), np.int64)
    if sinks:
        structs["sinks"] = jax.ShapeDtypeStruct((H,), single)
    if bias:
        structs["bias"] = jax.ShapeDtypeStruct((1, H, S, T), half)
    out, rows = jax.ShapeDtypeStruct((batch, H, S, D), half), jax.ShapeDtypeStruct((batch, H, S), single)
    results = {"out": out, "lse": rows, "row_max": rows, "row_sum": rows}
    operands = dict(structs)
    if direction == "backward":
        operands |= results | {"dout": out}
        results = {f"d{name}": structs[name] for name in ("q", "k", "v")}
        results |= {f"d{name}": jax.ShapeDtypeStruct(structs[name].shape, single) for name in ("sinks", "bias") if name in structs}
    options = {"causal": True, "window_left": -1, "window_right": -1, "scale": 0.25, "dropout_p": 0.0} | attributes
    return Case(config_of(operands, results, options), operands | results)


def memory(fakes: Fakes, engine: str, direction: str, case: Case) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """Arrays of the call, each with a guard behind it, results full of junk; the names of operands and results."""
    operands, results = fakes.buffers(engine, direction, case.config)
    rng = np.random.default_rng(0)
    found = {}
    for name in (*operands, *results):
        struct = case.shapes[name]
        dtype = np.float32 if name == "bias" and engine != "ck" else struct.dtype
        size = int(np.prod(struct.shape))
        whole = np.full(size + GUARD, np.nan if np.dtype(dtype).kind == "f" else -1, dtype)
        if name in results:
            whole[:size] = JUNK if dtype == np.float32 else np.nan
        elif name == "kv_lengths":
            whole[:size] = T
        else:
            whole[:size] = rng.standard_normal(size) if name not in ("lse", "row_max", "row_sum") else np.abs(rng.standard_normal(size)) + 1
        found[name] = whole
    return found, operands, results


def adjusted(engine: str, case: Case) -> Case:
    """The bias is float32 but for CK, which reads it in the dtype of q."""
    case.config.bias_dtype = 2 if engine == "ck" else 0
    return case


@pytest.fixture(autouse=True)
def _bound(fakes: Fakes) -> None:
    fakes.handle.fake_cuda_set(0, 0, 0)
    fakes.handle.attn_jax_rocm_sink_cuda_bind.argtypes = [ctypes.c_void_p]
    fakes.handle.attn_jax_rocm_sink_cuda_bind(fakes.handle.attn_cuda_interface_v1())
    fakes.set_aiter()
    fakes.take_log()


def test_the_python_and_the_c_configuration_have_the_same_members() -> None:
    text = re.sub(r"//[^\n]*", "", (CSRC / "config.h").read_text())
    body = text[text.index("struct Config {") :]
    body = body[body.index("{") + 1 : body.index("};")]
    names = [re.sub(r"\[\d+\]", "", name) for line in re.findall(r"\w+ ([^;]+);", body) for name in re.split(r",\s*", line.strip())]
    assert names == [field[0] for field in Config._fields_]


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_follow_two_predicates_forward_and_backward(fakes: Fakes, engine: str) -> None:
    kept = {"host": 2, "cuda": 2, "ck": 2}[engine]
    for sinks, bias in itertools.product((False, True), repeat=2):
        forward, backward = (adjusted(engine, make(direction, sinks=sinks, bias=bias)).config for direction in ("forward", "backward"))
        inputs, _ = fakes.buffers(engine, "forward", forward)
        again, gradients = fakes.buffers(engine, "backward", backward)
        assert again[: len(inputs)] == inputs and ("sinks" in inputs, "bias" in inputs) == (sinks, bias)
        auxiliary = [name for name in again if name not in ("q", "k", "v", "dout")]
        assert len(auxiliary) == kept + sinks + bias == len(set(auxiliary))
        assert ("dsinks" in gradients, "dbias" in gradients) == (sinks, bias)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_null_pointer_is_refused_before_anything_runs(fakes: Fakes, engine: str, direction: str) -> None:
    case = adjusted(engine, make(direction, sinks=True, bias=True))
    arrays, operands, results = memory(fakes, engine, direction, case)
    workspace = np.zeros(fakes.plan(engine, direction, case.config)[""][1] + 256, np.uint8)
    before = {name: arrays[name].tobytes() for name in results}
    for name in (*operands, *results):
        refusal = fakes.run(engine, direction, case.config, {**arrays, name: None}, workspace)
        expected = "sinks are required for softmax learnable" if name == "sinks" else f"{name} is required"
        assert refusal.startswith(expected) and "null" in refusal, refusal
    assert fakes.take_log() == [] and before == {name: arrays[name].tobytes() for name in results}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_vanilla_call_reads_no_sink_that_it_is_given(fakes: Fakes, engine: str) -> None:
    case = make("forward")
    arrays, _, results = memory(fakes, engine, "forward", case)
    workspace = np.zeros(fakes.plan(engine, "forward", case.config)[""][1] + 256, np.uint8)
    assert fakes.run(engine, "forward", case.config, arrays, workspace) == ""
    plain = {name: arrays[name].tobytes() for name in results}
    assert fakes.run(engine, "forward", case.config, arrays | {"sinks": np.full(H, np.nan, np.float32)}, workspace) == ""
    assert plain == {name: arrays[name].tobytes() for name in results}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_is_a_function_of_the_configuration(fakes: Fakes, engine: str) -> None:
    sizes = set()
    for direction, sinks, bias, batch in itertools.product(("forward", "backward"), (False, True), (False, True), (1, B)):
        case = adjusted(engine, make(direction, sinks=sinks, bias=bias, batch=batch))
        plan = fakes.plan(engine, direction, case.config)
        assert plan == fakes.plan(engine, direction, case.config)
        end = 0
        for name, (offset, size) in plan.items():
            if name:
                assert offset % 256 == 0 and offset >= end and size > 0
                end = offset + size
        assert plan[""][1] >= end and plan[""][1] % 256 == 0
        sizes.add(plan[""][1])
    assert sizes == {0} if engine == "host" else len(sizes) > 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"bias": True}, {"sinks": True, "bias": True}, {"lengths": True, "sinks": True}])
def test_runs_stay_within_the_plan_and_their_buffers(fakes: Fakes, engine: str, direction: str, options: dict[str, bool]) -> None:
    case = adjusted(engine, make(direction, **options))
    arrays, _, results = memory(fakes, engine, direction, case)
    size = fakes.plan(engine, direction, case.config)[""][1]
    raw = np.full(size + 256 + GUARD, 0x5A, np.uint8)
    start = -raw.ctypes.data % 256
    workspace = raw[start : start + size + GUARD]
    assert fakes.run(engine, direction, case.config, arrays, workspace, size) == ""
    assert (workspace[size:] == 0x5A).all()
    first = {name: arrays[name].tobytes() for name in results}
    for name, array in arrays.items():
        rest = array[-GUARD:]
        assert (np.isnan(rest) if rest.dtype.kind == "f" else rest == -1).all(), name
    for name in results:
        assert not np.isnan(arrays[name][:-GUARD].astype(np.float32)).any(), name
        arrays[name][:-GUARD] = -JUNK if arrays[name].dtype == np.float32 else np.inf
    assert fakes.run(engine, direction, case.config, arrays, workspace, size) == ""
    assert first == {name: arrays[name].tobytes() for name in results}, "a result that is added to what was there"
    if size > 0:
        refusal = fakes.run(engine, direction, case.config, arrays, workspace, size - 1)
        assert refusal == f"the workspace has {size - 1} bytes and this call needs {size}"


@pytest.mark.parametrize("engine", ENGINES)
def test_dsinks_of_a_batch_is_the_sum_of_its_items(fakes: Fakes, engine: str) -> None:
    """Sinks are read by query head: a batch has one buffer of H numbers, behind which lie NaNs."""
    case = adjusted(engine, make("backward", sinks=True))
    arrays, _, _ = memory(fakes, engine, "backward", case)
    workspace = np.zeros(fakes.plan(engine, "backward", case.config)[""][1] + 256, np.uint8)
    assert fakes.run(engine, "backward", case.config, arrays, workspace) == ""
    whole = arrays["dsinks"][:H].copy()
    one = adjusted(engine, make("backward", sinks=True, batch=1))
    total = np.zeros(H)
    for item in range(B):
        part = {}
        for name, array in arrays.items():
            shape = case.shapes[name].shape
            body = array[:-GUARD].reshape(shape)
            part[name] = array.copy() if name in ("sinks", "dsinks") else np.ascontiguousarray(body[item : item + 1])
        assert fakes.run(engine, "backward", one.config, part, workspace) == ""
        total += part["dsinks"][:H]
    assert np.abs(whole).min() > 0
    np.testing.assert_allclose(whole, total, rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_other_problems_are_refused_with_reasons(fakes: Fakes, engine: str) -> None:
    case = make("forward")
    case.config.kv_heads = 3
    assert fakes.ask(engine, "supports", "forward", case.config) == "heads=4 (supported: a multiple of kv_heads=3)"
    absent = make("backward")
    absent.config.gradients = GRADIENTS["dsinks"]
    assert fakes.ask(engine, "supports", "backward", absent.config) == "a gradient of absent sinks"
    with pytest.raises(ValueError, match=f"engine {engine} does not run this call: a gradient of absent sinks"):
        fakes.plan(engine, "backward", absent.config)


def test_head_dims_that_an_int32_cannot_address_are_refused(fakes: Fakes) -> None:
    case = make("forward")
    case.config.queries = case.config.keys = 2**27
    assert "an array of 2^31 elements or more" in fakes.ask("ck", "supports", "forward", case.config)
