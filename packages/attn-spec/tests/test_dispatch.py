"""get_op: first usable in order, each one passed over with its reason, and no fallback from a name."""

from __future__ import annotations

import pytest
import torch
from attn_spec import QATConfig, UnsupportedProblem, get_op
from attn_spec._errors import BackendUnavailable, UnknownName
from doubles import Double, Install

SOFTMAX = "joint_attn_softmax"


def test_the_first_in_order_is_taken(install: Install) -> None:
    install(late=Double("late", place=2), soon=Double("soon", place=1))
    trace = get_op(SOFTMAX).trace
    assert trace.selected_backend == "soon:plain" and not trace.fallback and trace.prior_rejections == ()
    assert trace.contract == "ordered-v1" and trace.accumulator_precision == "float32" and trace.kernel_fingerprint == "soon cpu plain"
    assert trace.split_k is False and trace.tf32 is False and trace.reduction_order.startswith("softmax: tile256")


def test_each_one_passed_over_has_its_reason(install: Install) -> None:
    install(
        broken=ImportError("fast-math build"),
        gone=Double("gone", place=0, reason="no kernel image for sm_61"),
        good=Double("good", place=1),
    )
    trace = get_op(SOFTMAX).trace
    assert trace.selected_backend == "good:plain" and trace.fallback
    text = "\n".join(trace.prior_rejections)
    assert "fast-math build" in text and "gone:plain: no kernel image for sm_61" in text and "gone:other: no kernel image" in text


def test_a_later_op_does_not_inherit_a_fallback(install: Install) -> None:
    install(gone=Double("gone", place=0, reason="asleep"), good=Double("good", place=1))
    assert get_op(SOFTMAX).trace.fallback
    named = get_op(SOFTMAX, backend="good").trace
    assert not named.fallback and named.prior_rejections == ()
    install(good=Double("good"))
    again = get_op(SOFTMAX).trace
    assert not again.fallback and again.prior_rejections == ()


def test_a_backend_by_name_never_falls_back(install: Install) -> None:
    install(gone=Double("gone", reason="no driver"), good=Double("good", place=1))
    with pytest.raises(BackendUnavailable, match="gone is not usable here: no driver"):
        get_op(SOFTMAX, backend="gone")
    with pytest.raises(BackendUnavailable, match=r"device cuda \(supported: cpu\)"):
        get_op(SOFTMAX, device="cuda", backend="good")
    assert get_op(SOFTMAX, backend="good:other").trace.selected_backend == "good:other"


def test_an_operator_by_name_never_falls_back(install: Install) -> None:
    install(good=Double("good"), gone=Double("gone", reason="no driver"))
    for backend in ("good", "gone", "good:other"):
        with pytest.raises(UnsupportedProblem, match=r"operator attention \(supported: joint_attn_softmax\)") as caught:
            get_op("attention", backend=backend)
        assert caught.value.backend == backend and len(caught.value.reasons) == 1


def test_nobody_left_lists_every_rejection(install: Install) -> None:
    install(gone=Double("gone", reason="no driver"), good=Double("good"))
    with pytest.raises(UnsupportedProblem, match=r"good:plain: operator attention") as caught:
        get_op("attention")
    assert len(caught.value.reasons) == 4


@pytest.mark.parametrize(
    ("keywords", "message"),
    (
        ({"name": "atention"}, r"unknown operator 'atention'; known: joint_attn_qk_gemm, .*attention"),
        ({"name": SOFTMAX, "backend": "bad"}, r"unknown backend 'bad'; known: good"),
        ({"name": SOFTMAX, "backend": "good:bad"}, r"unknown engine of good 'bad'; known: plain, other"),
        ({"name": SOFTMAX, "contract": "ordered-v0"}, r"unknown contract 'ordered-v0'; known: ordered-v1, ordered-v2, sm90-v1"),
        ({"name": SOFTMAX, "device": "abacus"}, r"unknown device 'abacus'; known: cpu, cuda, rocm"),
    ),
)
def test_unknown_names_list_the_known_ones(install: Install, keywords: dict[str, str], message: str) -> None:
    install(good=Double("good"))
    with pytest.raises(UnknownName, match=message):
        get_op(**keywords)


def test_production_attention_is_outside_every_contract(install: Install) -> None:
    install(good=Double("good"))
    with pytest.raises(UnsupportedProblem, match="attn is production attention"):
        get_op("attn", contract="ordered-v1")
    with pytest.raises(UnsupportedProblem, match="operator attn"):
        get_op("attn")


def test_an_op_runs_and_names_what_it_lacks(install: Install) -> None:
    install(good=Double("good"))
    op = get_op(SOFTMAX)
    assert op(3) == 6 and op.forward(4) == 8 and "good:plain" in repr(op)
    with pytest.raises(UnsupportedProblem, match="has no forward_fp32"):
        op.forward_fp32(3)
    with pytest.raises(UnsupportedProblem, match="has no log-sum-exp"):
        op.forward_with_lse(3)


@pytest.mark.parametrize("call", ("__call__", "forward", "forward_with_lse", "forward_fp32"))
@pytest.mark.parametrize(("bound", "given"), ((None, "sm90-v1"), ("sm90-v1", None), ("sm90-v1", "ordered-v1")))
def test_a_call_runs_the_contract_of_its_trace(call: str, bound: str | None, given: str | None) -> None:
    op = get_op("attention", backend="attn_reference:pytorch", contract=bound)
    with pytest.raises(ValueError, match=f"bound to contract {op.trace.contract}; got contract={given!r}"):
        getattr(op, call)(*qkv(), contract=given)


def test_a_call_may_repeat_the_contract_and_the_config_of_its_trace() -> None:
    config = QATConfig(p_outer="row")
    op = get_op("qat_attention", backend="attn_reference:pytorch", config=config)
    expected = op(*qkv())
    assert op(*qkv(), contract=None, config=config).equal(expected)
    assert op.forward(*qkv(), contract="nvfp4-ordered-v1").equal(expected)
    with pytest.raises(ValueError, match=r"bound to config QATConfig\(.*p_outer='row'.*got config=QATConfig\(.*p_outer=2688"):
        op(*qkv(), config=QATConfig())


def qkv() -> list[torch.Tensor]:
    return list(torch.linspace(-1, 1, 3 * 2 * 64, dtype=torch.bfloat16).reshape(3, 1, 1, 2, 64))


def test_a_trace_is_plain_data(install: Install) -> None:
    install(good=Double("good"))
    assert get_op(SOFTMAX).trace.as_dict()["selected_backend"] == "good:plain"
