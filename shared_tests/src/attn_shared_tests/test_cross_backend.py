"""Every backend gives the bytes of the reference: on generated problems and on samples of real models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from attn_spec import Call
from attn_spec.testing import strategies
from attn_spec.testing.asserts import assert_same
from attn_spec.testing.cases import CASES
from attn_spec.testing.runner import Evaluate, Runner
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from attn_shared_tests import faulty
from attn_shared_tests.controls import control_id
from attn_shared_tests.test_forward import check_bytes

KINDS: dict[str, Callable[..., st.SearchStrategy[Call]]] = {
    "attention": strategies.attention_calls,
    "attention_varlen": strategies.varlen_calls,
    "joint_attn_softmax": strategies.softmax_calls,
    "products": strategies.gemm_calls,
    "joint_attention": strategies.joint_calls,
}
SAMPLES = [(name, case.dtypes[0]) for name, case in sorted(CASES.items(), key=lambda entry: entry[1].pairs)]
"""The smallest first: an engine that runs a sample of the tests runs that one, and all of them in the main job."""
relaxed = settings(suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_equal_the_reference(backend: Runner, reference: Evaluate, kind: str, gradient: bool) -> None:
    @relaxed
    @given(call=KINDS[kind](gradient=gradient))
    def on_every_problem(call: Call) -> None:
        backend.run(check_bytes, reference, call)

    on_every_problem()


@pytest.mark.parametrize(("case", "dtype"), SAMPLES, ids=[f"{case}-{dtype}" for case, dtype in SAMPLES])
def test_bytes_equal_the_reference_on_real_models(backend: Runner, reference: Evaluate, case: str, dtype: str) -> None:
    for sample in CASES[case].sample_calls(dtype, reference):
        backend.run(check_bytes, reference, sample.call)


@pytest.mark.parametrize(
    ("kind", "fault"),
    (
        ("attention", faulty.drops_the_sink),
        ("attention", faulty.ignores_masks),
        ("attention", faulty.ignores_the_bias),
        ("attention", faulty.aligns_causal_top_left),
        ("attention", faulty.widens_the_window),
        ("attention", faulty.tiles_by_batch_size),
        ("attention", faulty.rounds_twice),
        ("attention", faulty.repeats_one_dropout_seed),
        ("attention", faulty.returns_zeros),
        ("attention", faulty.forgets_the_group_sum),
        ("attention", faulty.drops_the_lse_gradient),
        ("attention_varlen", faulty.ignores_segments),
        ("attention_varlen", faulty.ignores_used_lengths),
        ("attention_varlen", faulty.leaves_rows_unwritten),
        ("joint_attn_softmax", faulty.pads_in_place),
        ("joint_attn_softmax", faulty.ignores_masks),
        ("joint_attention", faulty.ignores_masks),
        ("products", faulty.rounds_twice),
        ("products", faulty.stores_negative_zero),
    ),
    ids=control_id,
)
def test_the_generated_problems_catch(reference: Evaluate, kind: str, fault: faulty.Fault) -> None:
    broken = fault(reference)

    def differs(call: Call) -> bool:
        try:
            assert_same(broken(call), reference(call), call.op)
        except AssertionError:
            return True
        return False

    once = settings(
        derandomize=True, deadline=None, max_examples=300, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    find(KINDS[kind](), differs, settings=once)


def test_the_named_cases_catch(reference: Evaluate) -> None:
    for name, fault in (("gpt-oss-window", faulty.drops_the_sink), ("qwen3-8b-decode", faulty.tiles_by_query_count)):
        for sample in islice(CASES[name].sample_calls("bfloat16", reference), 1):
            with pytest.raises(AssertionError):
                assert_same(fault(reference)(sample.call), reference(sample.call), name)
