"""The backend object: what it says that it runs, why it does not, and what an import touches."""

import os
import re
import subprocess
import sys

import attn_triton
import numpy as np
import pytest
import torch
from attn_spec import Call, UnsupportedProblem, get_op
from attn_spec._errors import UnknownName
from attn_spec.testing.asserts import assert_bytes
from attn_triton import _configuration, _softmax_launch, backend
from attn_triton.backend import BACKEND


def python(code, **environment):
    """Standard output of a fresh process that does not interpret, unless told to."""
    variables = os.environ | {"TRITON_INTERPRET": "0"} | environment
    done = subprocess.run([sys.executable, "-c", code], check=False, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names():
    joint = {"joint_attention", "joint_attn_av_gemm", "joint_attn_qk_gemm", "joint_attn_softmax"}
    assert set(attn_triton.__all__) == {"__version__", "attention", "attention_varlen", "qat_attention", "qat_attention_varlen", *joint}
    assert set(attn_triton.__all__) - {"__version__"} == set(BACKEND.capabilities().operators)
    assert all(hasattr(attn_triton, name) for name in attn_triton.__all__)


def test_without_the_interpreter_cpu_tensors_are_refused_and_no_driver_starts():
    code = """
import torch, triton, attn_spec, attn_triton
from attn_triton.backend import BACKEND
assert not torch.cuda.is_initialized()
assert triton.runtime.driver._active is None
print(BACKEND.unavailable("cpu"))
try:
    attn_triton.joint_attn_softmax(torch.zeros(2, 3))
except attn_spec.UnsupportedProblem as error:
    print(error)
"""
    said = python(code, CUDA_VISIBLE_DEVICES="")
    assert said.count("set TRITON_INTERPRET=1 before the first import of attn_triton") == 2
    assert "can run it here" in said or "problem: joint_attn_softmax" in said


def test_the_wrong_device_says_why():
    absent = "rocm" if torch.version.cuda else "cuda"
    assert re.search(rf"built for \w+, not for {absent}", BACKEND.unavailable(absent))
    with pytest.raises(UnknownName, match="triton"):
        BACKEND.unavailable("cpu", "cutlass")


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "refused"),
    [("3.6.0", "2.4.0", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.5.2", False), ("3.9.0", "2.4.6", False), ("3.10.0", "2.4.6", False)],
)
def test_an_interpreter_that_cannot_loop_is_refused(monkeypatch, triton_version, numpy_version, refused):
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(backend.triton, "__version__", triton_version)
    monkeypatch.setattr(backend.numpy, "__version__", numpy_version)
    assert (BACKEND.unavailable("cpu") is not None) is refused


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    backend._no_gpu.cache_clear()
    try:
        assert BACKEND.unavailable("cuda") == "compute capability 7.5 (supported: 8.0 and newer)"
    finally:
        backend._no_gpu.cache_clear()


def test_what_it_lacks_is_refused_with_reasons():
    with pytest.raises(UnsupportedProblem, match="device meta"):
        attn_triton.joint_attn_softmax(torch.zeros(2, 3, device="meta"))
    with pytest.raises(TypeError, match="float64"):
        attn_triton.joint_attn_softmax(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one key"):
        attn_triton.joint_attn_softmax(torch.zeros(2, 0))
    with pytest.raises(LookupError, match="ordered-v1"):
        attn_triton.joint_attn_softmax(torch.zeros(2, 3), contract="ordered-v9")


def test_second_derivatives_are_refused_by_name(device):
    scores = torch.randn(2, 3, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(attn_triton.joint_attn_softmax(scores)[0, 0], scores, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), scores)


def test_fingerprint_names_the_real_build(device, monkeypatch):
    first = BACKEND.fingerprint(device)
    assert first == BACKEND.fingerprint(device)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", first)
    monkeypatch.setitem(_softmax_launch.CONFIGS, device, _configuration.Config(rows=2, num_warps=8))
    assert BACKEND.fingerprint(device) != first


def test_dispatcher_and_evaluation(device):
    op = get_op("joint_attn_softmax", device=device, backend="attn_triton")
    assert op.trace.selected_backend == "attn_triton:triton"
    scores = np.linspace(-3, 3, 600, dtype=np.float32).reshape(2, 300)
    call = Call("joint_attn_softmax", {"scores": scores}, {}, {"probs": np.ones_like(scores)}, ("scores",))
    found = BACKEND.evaluate(call, device=device)
    assert_bytes(op(torch.from_numpy(scores).to(device)).cpu().numpy(), found["probs"], "probs")
    assert found["dscores"].shape == scores.shape


def test_torch_library_checks(device):
    scores = torch.randn(2, 300, device=device, requires_grad=True)
    operator = torch.ops.attn_triton.joint_attn_softmax.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (scores, None, torch.float32), test_utils=checks)
