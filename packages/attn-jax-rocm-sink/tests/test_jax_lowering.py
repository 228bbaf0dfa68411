"""Calls that are lowered for GPUs and other platforms on a machine without one: the platform decides the engine, not the machine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attn_jax_rocm_sink import _engines, _ffi, attention
from attn_spec import UnsupportedProblem
from engine_fakes import Fakes
from jax_calls import SM90, bits, jax_arrays, make_call, sm90_call
from test_jax_export import exported

ENGINE_OF = {"cpu": "host", "cuda": "cuda", "rocm": "hip"}
TARGET = re.compile(r"@attn_jax_rocm_sink_(host|cuda|hip|ck|host_sm90|cuda_sm90)_(forward|backward)")


def abroad(handlers: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes run on the CPU; here they stand for the engine of a platform that JAX lacks."""
    monkeypatch.setitem(_ffi.HANDLERS, handlers, dataclasses.replace(_ffi.HANDLERS[handlers], platform=platform))


@pytest.fixture
def cuda_abroad(fake_cuda: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    abroad("cuda", "CUDA", monkeypatch)


def both_passes(arrays: Mapping[str, jax.Array], **options: Any) -> Any:
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}
    out, pullback = jax.vjp(lambda part: attention(**{**arrays, **part}, **options), moving)
    return out, pullback(jnp.ones_like(out))[0]


def operands(*features: str, width: int = 8, dtype: str = "bfloat16") -> dict[str, jax.Array]:
    arrays = jax_arrays(make_call(*features, dtype=dtype))
    return arrays | {name: jnp.tile(arrays[name][..., :1], width) for name in ("q", "k", "v")}  # head dims that every engine takes


def text_for(platforms: list[str], arrays: Mapping[str, jax.Array], gradient: bool = True, **options: Any) -> str:
    function = both_passes if gradient else attention
    return str(exported(lambda given: function(**{"arrays": given} if gradient else given, **options), arrays, platforms).mlir_module())


def check(text: str, engine: str, sinks: bool, directions: tuple[str, ...] = ("forward", "backward")) -> None:
    """One call of the engine for each direction, with sinks where they were given, and none of another engine."""
    assert sorted(TARGET.findall(text)) == sorted((engine, direction) for direction in directions)
    for direction in directions:
        line = next(line for line in text.splitlines() if f"@{_ffi.target(engine, direction)}(" in line)
        names = line.split('operands = "')[1].split('"')[0].split(" ")
        assert {"q", "k", "v"} <= set(names) and ("sinks" in names) == sinks
    assert ("dsinks" in text) == (sinks and "backward" in directions)


@pytest.mark.parametrize("named", [False, True], ids=["by platform", "named"])
@pytest.mark.parametrize("features", [(), ("sinks",)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("platform", ENGINE_OF)
@pytest.mark.usefixtures("cuda_abroad")
def test_a_platform_gets_its_own_engine(platform: str, features: tuple[str, ...], named: bool) -> None:
    engine = ENGINE_OF[platform] if named else None
    check(text_for([platform], operands(*features), engine=engine), ENGINE_OF[platform], bool(features))
    check(text_for([platform], operands(*features), gradient=False, engine=engine), ENGINE_OF[platform], bool(features), ("forward",))


@pytest.mark.usefixtures("cuda_abroad")
def test_one_program_for_several_platforms_has_the_engine_of_each_and_runs_here() -> None:
    arrays = operands("sinks")
    program = exported(both_passes, arrays, ["cpu", "cuda", "rocm"])
    text = str(program.mlir_module())
    assert sorted(TARGET.findall(text)) == sorted((engine, each) for engine in ENGINE_OF.values() for each in ("forward", "backward"))
    found, expected = jax.tree.leaves(program.call(arrays)), jax.tree.leaves(jax.jit(both_passes)(arrays))
    assert len(found) == len(expected) == 5
    for a, b in zip(found, expected, strict=True):
        assert bits(a).tobytes() == bits(b).tobytes()


def test_the_workspace_of_the_hip_engine_needs_no_hip() -> None:
    line = next(line for line in text_for(["rocm"], operands("sinks")).splitlines() if "@attn_jax_rocm_sink_hip_backward(" in line)
    assert "tensor<768xui8>" in line, "delta and dsink of 40 rows and the sums of 8 heads, each rounded up to 256 bytes"


@pytest.mark.parametrize("features", [(), ("sinks",)], ids=["no sinks", "sinks"])
def test_rocm_code_calls_the_ck_engine_when_it_is_named(fake_ck: Fakes, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    abroad("ck", "ROCM", monkeypatch)
    check(text_for(["rocm"], operands(*features), engine="ck"), "ck", bool(features))


def test_a_contract_of_some_platforms_is_refused_on_the_others(fake_sm90: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    abroad("cuda_sm90", "CUDA", monkeypatch)
    arrays = jax_arrays(sm90_call("window and sinks"))
    for platform, handlers in {"cpu": "host_sm90", "cuda": "cuda_sm90"}.items():
        check(text_for([platform], arrays, contract=SM90), handlers, True)
    with pytest.raises(UnsupportedProblem, match=r"platform rocm \(supported: cpu by engine host, cuda by engine cuda; any"):
        text_for(["rocm"], arrays, contract=SM90)


@pytest.mark.parametrize("platforms", [["tpu"], ["cpu", "tpu"], ["rocm", "tpu", "cpu"]], ids=" ".join)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_platform_without_an_engine_is_refused_by_name(platforms: list[str], gradient: bool) -> None:
    supported = r"supported: cpu by engine host, cuda by engine cuda, rocm by engine hip; any platform by engine xla"
    with pytest.raises(UnsupportedProblem, match=rf"lowering for platform tpu \({supported}\)"):
        text_for(platforms, operands("sinks"), gradient)
    assert not TARGET.search(text_for(platforms, operands("sinks"), gradient, engine="xla"))


@pytest.mark.parametrize(("engine", "home"), [("host", "cpu"), ("cuda", "cuda"), ("hip", "rocm"), ("ck", "rocm")])
def test_an_engine_of_another_platform_is_refused(engine: str, home: str) -> None:
    for platform in {"cpu", "cuda", "rocm", "tpu"} - {home}:
        for platforms in ([platform], [home, platform]) if engine in ("host", "hip") else ([platform],):
            with pytest.raises(UnsupportedProblem, match=rf"lowering for platform {platform} \(supported: {home} by engine {engine};"):
                text_for(platforms, operands("sinks"), engine=engine)


@pytest.mark.usefixtures("cuda_abroad")
def test_what_the_engine_of_a_platform_lacks_is_refused_where_it_is_lowered() -> None:
    arrays = operands()
    dropout = {"dropout_p": 0.5, "dropout_seed": 1}
    assert TARGET.findall(text_for(["cpu"], arrays, False, **dropout)) == [("host", "forward")]
    with pytest.raises(UnsupportedProblem, match=r"attn_jax_rocm_sink:cuda .*\n.*forward: dropout \(not supported\)"):
        text_for(["cuda"], arrays, **dropout)
    assert TARGET.findall(text_for(["cpu"], operands(width=300), False)) == [("host", "forward")]
    with pytest.raises(UnsupportedProblem, match=r"attn_jax_rocm_sink:hip .*\n.*head_dim=300 \(supported: 0 to 256\)"):
        text_for(["rocm"], operands(width=300))


def test_a_workspace_that_cannot_be_planned_here_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(*_: Any) -> Any:
        raise _ffi.NoPlan("there is no device")

    absent = dataclasses.replace(_engines.ENGINES["cuda"], unplannable=lambda: "attn-cuda is absent")
    monkeypatch.setitem(_engines.ENGINES, "cuda", absent)
    with pytest.raises(UnsupportedProblem, match="platform cuda, engine cuda: attn-cuda is absent"):
        text_for(["cuda"], operands())
    monkeypatch.setattr(_ffi, "plan", no_device)
    with pytest.raises(UnsupportedProblem, match="platform rocm, engine hip: its workspace cannot be planned here: there is no device"):
        text_for(["rocm"], operands())


@pytest.mark.parametrize("contract", ["ordered-v1", SM90])
def test_engines_of_one_contract_keep_the_same_results_for_backward(contract: str) -> None:
    """A trace that suits every platform has one list of residuals."""
    engines = [name for name, engine in _engines.ENGINES.items() if engine.exact and contract in engine.capabilities.contracts]
    serving = [_ffi.HANDLERS[_engines.handlers_of(name, contract)] for name in engines]
    assert len({(one.kept, one.partial_dropout, one.static_alignment) for one in serving}) == 1 and len(serving) > 1


def test_a_call_outside_of_jit_runs() -> None:
    arrays = operands("sinks")
    with jax.disable_jit():
        found = attention(**arrays)
    assert bits(found).tobytes() == bits(attention(**arrays)).tobytes()
