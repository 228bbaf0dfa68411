"""The entry-point object, the default engine, production attention, and the operators as torch sees them."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import attn_reference
import numpy as np
import pytest
import torch
from attn_reference import pytorch
from attn_reference.backend import BACKEND
from attn_spec import Call, Problem, UnsupportedProblem
from attn_spec._errors import UnknownName
from attn_spec._operators import QAT
from float_bits import same_bits

PUBLIC = ("attention", "attention_varlen", "joint_attention", "joint_attn_av_gemm", "joint_attn_qk_gemm", "joint_attn_softmax")


def test_public_names() -> None:
    for name in (*PUBLIC, "attention_fp32", "qat_attention", "nvfp4", "pytorch", "__version__"):
        assert hasattr(attn_reference, name)
    for name in PUBLIC:
        assert getattr(attn_reference, name).__doc__ == getattr(pytorch, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'attentoin'"):
        attn_reference.attentoin  # noqa: B018


def test_entry_point_imports_first() -> None:
    """The entry-point module may be the first import of the package."""
    code = "from attn_reference.backend import BACKEND; print(BACKEND.name, *BACKEND.engines, sorted(BACKEND.operators('pytorch'))[0])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["attn_reference", "host", "pytorch", "attention"]


def test_every_engine_lists_the_operators_and_only_pytorch_production() -> None:
    assert set(PUBLIC) < set(BACKEND.capabilities("pytorch").operators)
    assert set(BACKEND.capabilities("pytorch").operators) - set(BACKEND.capabilities("host").operators) == {"attn", *QAT}
    with pytest.raises(UnknownName, match="known: host, pytorch"):
        BACKEND.capabilities("triton")


def test_reasons() -> None:
    assert BACKEND.reasons(Problem(op="attention", dtype="float32"), "pytorch") == ()
    assert BACKEND.reasons(Problem(op="attention", dtype="float64"), "pytorch") == (
        "dtype float64 (supported: float32, bfloat16, float16)",
    )
    assert BACKEND.reasons(Problem(op="attention", dtype="float32", device="cuda"), "host") == ("device cuda (supported: cpu)",)
    if not torch.cuda.is_available():
        for device in ("cuda", "rocm"):
            assert len(BACKEND.reasons(Problem(op="attention", dtype="float32", device=device), "pytorch")) == 1


def test_fingerprint_is_of_the_sources() -> None:
    first = BACKEND.fingerprint("cpu", "pytorch")
    assert len(first) == 64 and first == BACKEND.fingerprint("cpu", "pytorch")


def test_evaluate_is_the_public_call(engine: ModuleType) -> None:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((1, 2, 4, 8)).astype(np.float32) for name in ("q", "k", "v")}
    call = Call("attention", arrays, {"return_lse": True}, cotangents={"out": np.ones((1, 2, 4, 8), dtype=np.float32)}, wrt=("q", "v"))
    found = BACKEND.evaluate(call, engine=engine.__name__.rsplit(".", 1)[1])
    assert set(found) == {"out", "lse", "dq", "dv"}
    out = engine.attention(*(torch.from_numpy(array) for array in arrays.values()))
    assert same_bits(torch.from_numpy(found["out"]), out)


def test_default_engine_has_the_bits(engine: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=draw) for _ in range(3))
    assert same_bits(attn_reference.attention(q, k, v), engine.attention(q, k, v))
    assert same_bits(attn_reference.attention(q=q, k=k, v=v), engine.attention(q, k, v))
    scores = torch.randn(3, 300, generator=draw)
    assert same_bits(attn_reference.joint_attn_softmax(scores), engine.joint_attn_softmax(scores))


def test_another_contract_is_refused(engine: ModuleType) -> None:
    q = torch.randn(1, 1, 2, 4)
    assert same_bits(engine.attention(q, q, q, contract="ordered-v1"), engine.attention(q, q, q))
    with pytest.raises(LookupError, match="ordered-v9"):
        engine.attention(q, q, q, contract="ordered-v9")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.randn(1, 3, 4, 8)}, ValueError, "3 query heads and 2 kv heads"),
        ({"q": torch.randn(1, 2, 4, 8, dtype=torch.float64)}, TypeError, "float64; supported: float32, bfloat16, float16"),
        ({"v": torch.randn(1, 2, 6, 8)}, ValueError, "keys must agree"),
        ({"window": (-1, 0)}, ValueError, "window sides"),
        ({"scale": float("nan")}, ValueError, "finite number"),
        ({"key_padding_mask": torch.ones(1, 4)}, TypeError, "must be bool"),
        ({"kv_lengths": torch.tensor([9])}, ValueError, r"\[0, 4\]"),
        ({"dropout_p": 1.5}, ValueError, r"\[0, 1\]"),
    ],
)
def test_bad_input(engine: ModuleType, change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {name: torch.randn(1, 2, 4, 8) for name in ("q", "k", "v")}
    with pytest.raises(error, match=message):
        engine.attention(**{**arguments, **change})


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_production_attention_is_bottom_right(queries: int, keys: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 4, queries, 8, generator=draw),
        torch.randn(1, 2, keys, 8, generator=draw),
        torch.randn(1, 2, keys, 8, generator=draw),
    )
    attn = BACKEND.operators("pytorch")["attn"]
    for causal in (True, False):
        rows = slice(max(0, queries - keys), None) if causal else slice(None)
        torch.testing.assert_close(
            attn(q, k, v, causal=causal)[:, :, rows], pytorch.attention(q, k, v, causal=causal)[:, :, rows], rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match="keys must agree"):
        attn(q, k, v[:, :, 1:])


def test_operators_pass_opcheck(engine: ModuleType) -> None:
    namespace = getattr(torch.ops, engine.__name__.replace(".", "_"))
    scores = torch.randn(2, 3, 20, requires_grad=True)
    q, k = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 1, 5, 4, requires_grad=True)
    torch.library.opcheck(namespace.joint_attn_softmax.default, (scores, torch.ones(2, 20, dtype=torch.bool), torch.float32))
    torch.library.opcheck(namespace.joint_attn_qk_gemm.default, (q, k, 0.5, torch.float32))
    options = (None,) * 12 + (True, 0.5, -1, -1, 0.0, torch.float32)
    torch.library.opcheck(namespace.attention.default, (q, k, k.detach().clone().requires_grad_(), *options))


def test_compiled_call_has_the_bits(engine: ModuleType) -> None:
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return engine.attention(x, x, x) * 2

    def by_default(x: torch.Tensor) -> torch.Tensor:
        return attn_reference.attention(x, x, x) * 2

    for function in (doubled, by_default):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert same_bits(compiled(q), doubled(q))


def test_unsupported_problem_names_who_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKEND, "unavailable", lambda device, engine=None: "switched off for this test")
    with pytest.raises(UnsupportedProblem, match="switched off for this test"):
        pytorch.joint_attn_softmax(torch.zeros(3, 1, 41))  # of a shape that no other test has had accepted
