"""A build or a machine that cannot run the kernels is passed over with its reason, and the other backends stay usable."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from attn_cuda import _extension
from attn_cuda.backend import BACKEND
from attn_spec import Problem, backends, get_op
from attn_spec._errors import BackendUnavailable
from attn_spec._registry import explain

GOOD: dict[str, Any] = {
    "FLAGS": "-O3 --fmad=false",
    "ARCHITECTURES": "80-real,90a-real",
    "SM90": True,
    "SOFTMAX_TILE": 256,
    "PROBE_NAMES": "subnormal product,division",
    "FINGERPRINT": "0" * 64,
}
Machine = Callable[..., None]


def _raises(error: Exception) -> Callable[[int], int]:
    def function(device: int) -> int:
        raise error

    return function


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """``machine(load=error, **attributes)``: an NVIDIA GPU of compute capability 9.0 and a module that loads with these attributes, or
    fails to load."""
    caches = (_extension.extension, _extension.build_reason, _extension.device_reason)
    imported = importlib.import_module

    def install(load: Exception | None = None, **attributes: Any) -> None:
        build, module = ModuleType("attn_cuda._build"), ModuleType("attn_cuda._cuda")
        vars(build).update(MISSING=None)
        vars(module).update({**GOOD, "capability": lambda device: 90, "probe": lambda device: 0, **attributes})

        def importing(name: str, package: str | None = None) -> ModuleType:
            if name == "attn_cuda._cuda" and load is not None:
                raise load
            return {"attn_cuda._build": build, "attn_cuda._cuda": module}.get(name) or imported(name, package)

        monkeypatch.setattr(importlib, "import_module", importing)
        for cache in caches:
            cache.cache_clear()

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield install
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "fast math": ({"FLAGS": "-O3 --use_fast_math"}, "built with 'use_fast_math', which changes the bits"),
    "flush to zero": ({"FLAGS": "-O3 -ftz=true"}, "built with 'ftz=true', which changes the bits"),
    "another tile": ({"SOFTMAX_TILE": 128}, "built with softmax tile 128 and contract ordered-v1 needs 256"),
    "missing architecture": ({"ARCHITECTURES": "100-real"}, "holds code for 100-real and the device has compute capability 9.0"),
    "no kernel image": (
        {"probe": _raises(RuntimeError("attn_cuda_probe: no kernel image is available for execution on the device (code 209)"))},
        "cannot run on device 0: attn_cuda_probe: no kernel image is available",
    ),
    "old driver": (
        {
            "capability": _raises(
                RuntimeError("attn_cuda_capability: CUDA driver version is insufficient for CUDA runtime version (code 35)")
            )
        },
        "cannot run on device 0: attn_cuda_capability: CUDA driver version is insufficient",
    ),
    "failed load": ({"load": ImportError("libstdc++.so.6: undefined symbol")}, "does not load: libstdc++.so.6: undefined symbol"),
    "inexact arithmetic": ({"probe": lambda device: 2}, "does not compute IEEE arithmetic on device 0: division"),
}


def test_a_good_build_is_chosen(machine: Machine) -> None:
    machine()
    trace = get_op("joint_attn_softmax", device="cuda").trace
    assert trace.selected_backend == "attn_cuda:cuda" and not trace.fallback and trace.kernel_fingerprint == GOOD["FINGERPRINT"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_build_or_machine_is_passed_over_with_its_reason(machine: Machine, fault: str) -> None:
    attributes, reason = FAULTS[fault]
    machine(**attributes)
    trace = get_op("joint_attn_softmax", device="cuda").trace
    assert trace.selected_backend != "attn_cuda:cuda" and trace.fallback
    passed_over = [line for line in trace.prior_rejections if line.startswith("attn_cuda:cuda: ")]
    assert len(passed_over) == 1 and reason in passed_over[0], trace.prior_rejections
    with pytest.raises(BackendUnavailable, match="attn_cuda is not usable here"):
        get_op("joint_attn_softmax", device="cuda", backend="attn_cuda")
    answers = explain(Problem(op="joint_attn_softmax", dtype="float32", device="cuda", keys=4))
    assert reason in "; ".join(answers["attn_cuda:cuda"]) and answers["attn_reference:pytorch"] == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_build_leaves_the_cpu_alone(machine: Machine, fault: str) -> None:
    machine(**FAULTS[fault][0])
    assert {"attn_cuda", "attn_reference"} <= set(backends())
    op = get_op("joint_attn_softmax")
    assert op.trace.selected_backend.startswith("attn_reference:") and not op.trace.fallback
    assert torch.equal(op(torch.zeros(1, 2)), torch.full((1, 2), 0.5))


def test_torch_without_a_device_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is older than torch's own runtime shows as no device."""
    machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKEND.unavailable("cuda") == "torch finds no CUDA device"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "has no CUDA" in str(BACKEND.unavailable("cuda"))


def test_each_device_is_judged_by_itself(machine: Machine) -> None:
    machine(ARCHITECTURES="90a-real", capability=lambda device: (90, 80)[device])
    assert _extension.device_reason(0) is None
    assert "compute capability 8.0" in str(_extension.device_reason(1))


def tensor_core_problem(**changes: Any) -> Problem:
    values = {"op": "attention", "dtype": "bfloat16", "device": "cuda", "contract": "sm90-v1", "head_dim": 128, "value_dim": 128, **changes}
    return Problem(**values)


def test_hopper_runs_attention_of_its_contract_with_gradients(machine: Machine) -> None:
    machine()
    features = frozenset({"causal", "window", "sinks", "kv_lengths", "q_start", "k_start", "return_lse", "gradient"})
    assert BACKEND.reasons(tensor_core_problem(features=features)) == ()
    assert BACKEND.reasons(tensor_core_problem(op="attention_varlen", head_dim=64, value_dim=64)) == ()
    joint = tensor_core_problem(op="joint_attention", features=frozenset({"prompt_mask", "gradient"}))
    assert BACKEND.reasons(joint) == ()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            {"head_dim": 256, "value_dim": 256},
            "head_dim=256 with contract sm90-v1 (supported: 64, 128; attn_triton: 256 too; others: ordered-v1)",
        ),
    ],
)
def test_what_the_hopper_kernels_lack_is_refused_with_its_reason(machine: Machine, problem: dict[str, Any], reason: str) -> None:
    machine()
    assert reason in BACKEND.reasons(tensor_core_problem(**problem))


def test_other_builds_and_devices_refuse_the_contract_of_hopper(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(SM90=False, ARCHITECTURES="80-real")
    assert "was built for 80-real, without 90a" in "; ".join(BACKEND.reasons(tensor_core_problem()))
    machine()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "compute capability 10.0 (contract sm90-v1 needs an NVIDIA GPU of compute capability 9.0" in "; ".join(
        BACKEND.reasons(tensor_core_problem())
    )
