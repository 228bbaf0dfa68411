"""Triton's AMD code objects of the production kernels, launched by the production code in the interpreter: the bytes of the definition."""

from __future__ import annotations

from collections.abc import Callable

import attention_calls as calls
import pytest
import torch
from attn_reference._pytorch_kernels import KERNELS
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes
from attn_spec.torch import to_numpy
from attn_triton import _attention_backward_launch, _attention_launch, _pairs_launch, _products_launch, _softmax_kernel, _softmax_launch
from device_code import TARGETS
from interpreter import Device
from triton_execution import executing

Play = Callable[[str], Device]


def test_the_kernels_are_compiled() -> None:
    assert not _softmax_kernel.INTERPRETED, "TRITON_INTERPRET=1 is set: these tests need compiled kernels"


def equal(names: str, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Zeros of a row maximum may have either sign, since that shows nowhere; no other result may."""
    for name, one, law in zip(names.split(), found, expected, strict=True):
        shift = 0.0 if name == "row_max" else -0.0  # the identity, but for the sign of a zero
        assert_bytes(to_numpy(one + shift), to_numpy(law + shift), name)


def test_the_sign_of_a_zero_is_compared() -> None:
    zero, minus = torch.zeros(2), -torch.zeros(2)
    equal("row_max", (minus,), (zero,))
    for name in ("out", "dq"):
        with pytest.raises(ContractViolation):
            equal(name, (minus,), (zero,))


@pytest.mark.parametrize(
    ("target", "dtype", "masked"),
    [(TARGETS[0], torch.float32, False), (TARGETS[1], torch.bfloat16, True), (TARGETS[2], torch.float32, True)],
    ids=str,
)
def test_softmax(play: Play, target: str, dtype: torch.dtype, masked: bool) -> None:
    scores, upstream = calls.normal(3, 2, 300, seed=1, dtype=dtype), calls.normal(3, 2, 300, seed=2, dtype=dtype)
    mask = calls.kept(300, batch=3) if masked else None
    scores[1, 0, 7], scores[2, 1] = torch.nan, -torch.inf
    with executing(play(target), _softmax_launch) as launches:
        probs, row_max, row_sum = _softmax_launch.softmax_forward(scores, mask, dtype)
        dscores = _softmax_launch.softmax_backward(upstream, scores, mask, row_max, row_sum)
    assert [name for name, _ in launches] == ["softmax_forward", "softmax_backward"]
    assert all(module.executed("v_exp") == 0 and module.executed("v_mfma") == 0 for _, module in launches)
    expected = KERNELS.softmax_forward(scores, mask, dtype)
    equal("probs row_max row_sum", (probs, row_max, row_sum), expected)
    equal("dscores", (dscores,), (KERNELS.softmax_backward(upstream, scores, mask, *expected[1:]),))


def test_order_of_workgroups_moves_no_bit(play: Play) -> None:
    device, scores = play("gfx942"), calls.normal(9, 300, seed=1, dtype=torch.bfloat16)
    found = []
    for seed in (0, 1, 2):
        device.set_order(seed)
        with executing(device, _softmax_launch):
            found.append(_softmax_launch.softmax_forward(scores, None, torch.bfloat16))
    equal("probs row_max row_sum", found[1], found[0])
    equal("probs row_max row_sum", found[2], found[0])


def test_products(play: Play) -> None:
    q, k = calls.normal(1, 2, 5, 40, seed=1, dtype=torch.bfloat16), calls.normal(1, 1, 70, 40, seed=2, dtype=torch.bfloat16)
    with executing(play("gfx90a"), _products_launch):
        scores = _products_launch.qk_gemm_forward(q, k, 0.3, torch.float32)
    equal("scores", (scores,), (KERNELS.qk_gemm_forward(q, k, 0.3, torch.float32),))


ATTENTION = {
    "causal groups with sinks": (
        "gfx942",
        {"heads": 4, "kv_heads": 2, "queries": 40, "keys": 70, "head_dim": 32, "causal": True, "sinks": calls.normal(4, seed=5)},
    ),
    "bias and padding": (
        "gfx950",
        {"queries": 33, "keys": 40, "head_dim": 16, "key_mask": calls.kept(40), "bias": calls.normal(1, 2, 33, 40, seed=8)},
    ),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(play: Play, kind: str) -> None:
    target, options = ATTENTION[kind]
    call = calls.inputs(dtype=torch.bfloat16, **options)
    with executing(play(target), _pairs_launch) as launches:
        found = _attention_launch.attention_forward(call, call.v.dtype)
    assert {name for name, _ in launches} == {"pair_products", "tile_states", "merge_states", "to_probabilities", "row_sums"}
    equal("out lse row_max row_sum", found, KERNELS.attention_forward(call, call.v.dtype))


def test_attention_backward(play: Play) -> None:
    target, options = ATTENTION["causal groups with sinks"]
    call = calls.inputs(dtype=torch.bfloat16, **options)
    dout, dlse = calls.normal(*call.q.shape, seed=3, dtype=call.v.dtype), calls.normal(*call.row_shape, seed=4)
    state, needs = KERNELS.attention_forward(call, call.v.dtype)[2:], frozenset({"q", "k", "v", "sinks"})
    with executing(play(target), _pairs_launch, _attention_backward_launch):
        found = _attention_backward_launch.attention_backward(call, dout, dlse, *state, needs)
    expected = KERNELS.attention_backward(call, dout, dlse, *state, needs)
    assert found.keys() == expected.keys()
    equal(" ".join(expected), tuple(found[name] for name in expected), tuple(expected.values()))
