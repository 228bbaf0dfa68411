"""Capabilities: every reason at once, and no reason when the problem must run."""

from __future__ import annotations

from dataclasses import replace

from attn_spec import Capabilities, OperatorSupport, Problem

SUPPORT = OperatorSupport(frozenset({"causal", "sinks"}), dtypes=("float32", "bfloat16"), max_head_dim=128)
CAPABILITIES = Capabilities(("cpu",), {"attention": SUPPORT})
PROBLEM = Problem(op="attention", dtype="float32", head_dim=64, value_dim=64, features=frozenset({"causal"}))


def test_a_supported_problem_has_no_reason() -> None:
    assert CAPABILITIES.reasons(PROBLEM) == ()


def test_every_reason_is_listed() -> None:
    problem = replace(
        PROBLEM, dtype="float16", device="cuda", contract="sm90-v1", value_dim=256, features=frozenset({"causal", "window", "bias"})
    )
    assert CAPABILITIES.reasons(problem) == (
        "device cuda (supported: cpu)",
        "contract sm90-v1 (supported: ordered-v1)",
        "dtype float16 (supported: float32, bfloat16)",
        "head_dim=256 (supported: up to 128)",
        "bias, window (supported: causal, sinks)",
    )


def test_an_operator_that_is_absent_is_a_reason() -> None:
    assert CAPABILITIES.reasons(replace(PROBLEM, op="joint_attention")) == ("operator joint_attention (supported: attention)",)


def test_a_contract_that_does_not_cover_the_operator_is_a_reason() -> None:
    """A backend that has a contract runs it for the operators that the contract covers, and for no other."""
    softmax = OperatorSupport()
    backend = Capabilities(("cpu",), {"attention": SUPPORT, "joint_attn_softmax": softmax}, contracts=("ordered-v1", "ordered-v2"))
    covered = Problem(op="joint_attn_softmax", dtype="float32", contract="ordered-v2")
    assert backend.reasons(covered) == ()
    assert backend.reasons(replace(PROBLEM, contract="ordered-v2")) == ("contract ordered-v2 for attention (it covers joint_attn_softmax)",)
    older = replace(backend, contracts=("ordered-v1",))
    assert older.reasons(covered) == ("contract ordered-v2 (supported: ordered-v1)",)


def test_each_option_alone_is_noticed() -> None:
    """A backend that declares nothing refuses each option; none is dropped."""
    bare = Capabilities(("cpu",), {"attention": OperatorSupport()})
    for feature in ("causal", "window", "sinks", "bias", "dropout", "gradient", "key_padding_mask", "kv_lengths", "q_start", "k_start"):
        (reason,) = bare.reasons(replace(PROBLEM, features=frozenset({feature})))
        assert reason == f"{feature} (supported: no options)"


def test_a_problem_prints_its_sizes_and_features() -> None:
    assert str(PROBLEM) == "attention B=1 H=1 K=1 S=1 T=1 D=64 V=64 float32 cpu ordered-v1 causal"
