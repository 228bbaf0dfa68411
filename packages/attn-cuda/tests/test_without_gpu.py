"""What must hold on a machine without a GPU: import, reasons, refusals, and a module that needs neither torch nor a CUDA installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attn_cuda
import pytest
import torch
from attn_cuda._extension import architecture_reason, extension, flag_reason
from attn_cuda.backend import BACKEND
from attn_spec import Problem, UnsupportedProblem, get_op
from attn_spec._errors import BackendUnavailable

ALL = "80-real,86-real,89-real,90a-real,100-real,120-real,120-virtual"


def _module_path() -> Path:
    module = extension()
    assert not isinstance(module, str), module
    assert module.__file__ is not None
    return Path(module.__file__)


def test_the_backend_is_usable_exactly_when_torch_has_a_cuda_device() -> None:
    reason = BACKEND.unavailable("cuda")
    usable = torch.version.cuda is not None and torch.cuda.is_available()
    assert (reason is None) == usable, reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_without_a_device_the_reason_names_cuda_and_asking_by_name_raises_it() -> None:
    reason = BACKEND.unavailable("cuda")
    assert reason is not None and "CUDA" in reason
    with pytest.raises(BackendUnavailable, match="attn_cuda is not usable here"):
        get_op("joint_attn_softmax", device="cuda", backend="attn_cuda")


def test_rocm_is_refused_by_name() -> None:
    problem = Problem(op="joint_attn_softmax", dtype="float32", device="rocm")
    assert BACKEND.reasons(problem) == ("device rocm (supported: cuda)",)


def test_a_cpu_tensor_is_refused_with_its_device() -> None:
    with pytest.raises(UnsupportedProblem, match=r"device cpu \(supported: cuda\)"):
        attn_cuda.joint_attn_softmax(torch.zeros(2, 3))


def test_the_registered_operators_refuse_cpu_tensors_too() -> None:
    scores = torch.zeros(2, 3)
    with pytest.raises(UnsupportedProblem, match="device cpu"):
        torch.ops.attn_cuda.joint_attn_softmax(scores, None, torch.float32)
    with pytest.raises(UnsupportedProblem, match="device cpu"):
        torch.ops.attn_cuda.joint_attn_softmax_backward(scores, scores, None, scores[:, 0], scores[:, 0])


def test_every_reason_is_listed() -> None:
    problem = Problem(op="attention", dtype="float64", device="cpu", contract="ordered-v2", features=frozenset({"dropout"}))
    reasons = "; ".join(BACKEND.reasons(problem))
    for part in ("device cpu", "contract ordered-v2", "dtype float64", "dropout"):
        assert part in reasons


@pytest.mark.parametrize("flags", ["--use_fast_math", "-O3 -use_fast_math", "-ftz=true", "--ftz=true", "-ftz true", "--prec-div=false"])
def test_a_build_with_flags_that_change_bits_is_refused(flags: str) -> None:
    reason = flag_reason(flags)
    assert reason is not None and "changes the bits that the contract fixes" in reason and flags in reason


@pytest.mark.parametrize("flags", ["-O3 -DNDEBUG --fmad=false", "-ftz=false --prec-div=true", ""])
def test_other_flags_are_not(flags: str) -> None:
    assert flag_reason(flags) is None


def test_this_build_has_no_such_flag_and_never_contracts() -> None:
    module = extension()
    assert not isinstance(module, str), module
    assert flag_reason(module.FLAGS) is None
    assert "--fmad=false" in module.FLAGS
    assert len(module.FINGERPRINT) == 64 and BACKEND.fingerprint("cuda") == module.FINGERPRINT


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120, 121, 130])
def test_the_default_build_runs_on(capability: int) -> None:
    assert architecture_reason(ALL, capability) is None


@pytest.mark.parametrize(
    ("built", "capability"), [(ALL, 75), (ALL, 110), ("90a-real", 100), ("90a-real", 89), ("90a-virtual", 100), ("86-real", 80)]
)
def test_a_missing_architecture_names_what_is_built_and_what_was_found(built: str, capability: int) -> None:
    reason = architecture_reason(built, capability)
    assert reason is not None
    assert built in reason and f"{capability // 10}.{capability % 10}" in reason


def test_the_module_links_neither_torch_nor_a_shared_cuda_runtime() -> None:
    content = _module_path().read_bytes()
    assert b"libstdc++" in content
    for library in (b"libtorch", b"libc10", b"libcudart.so"):
        assert library not in content, library


def test_the_module_loads_without_torch() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_cuda', {str(_module_path())!r})\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "assert len(module.FINGERPRINT) == 64\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_refused_arguments_are_named_before_anything_is_written() -> None:
    module = extension()
    assert not isinstance(module, str), module
    rows = (0, module.BFLOAT16, (0, 0, 1))
    with pytest.raises(RuntimeError, match="a size is out of range"):
        module.softmax_forward(0, 0, (1, 1, 1), 0, rows, None, 0, module.BFLOAT16, 0, 0)
    with pytest.raises(RuntimeError, match="neither float32 nor the dtype of the scores"):
        module.softmax_forward(0, 0, (1, 1, 1), 4, rows, None, 0, module.FLOAT16, 0, 0)
    with pytest.raises(RuntimeError, match="a pointer is null"):
        module.softmax_forward(0, 0, (1, 1, 1), 4, rows, None, 0, module.BFLOAT16, 0, 0)
