"""4-bit attention, contracts nvfp4-ordered-v1 and nvfp4-sm90-v1: bytes on every backend that has it, and what may not move them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call, QATConfig, get_op
from attn_spec._compare import difference
from attn_spec._errors import ContractViolation
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_same, assert_zero
from attn_spec.testing.inputs import Sizes, outputs_of, random_call, select
from attn_spec.testing.runner import Evaluate, Runner

CONTRACTS = ("nvfp4-ordered-v1", "nvfp4-sm90-v1")
CAUSAL = QATConfig.training(causal=True)
CONFIGS = {
    "training": QATConfig(),
    "fastvideo": QATConfig.fastvideo(),
    "rows": QATConfig(qkv_outer="row", p_outer="row"),
    "tiles, delta of the quantized P": QATConfig(qkv_outer="tile", high_precision_delta=False, p_outer="none"),
    "smooth keys": QATConfig(smooth_k=True, quantized_backward=False),
    "smooth both": QATConfig(smooth_q=True, smooth_k=True, v_axis="head_dim", qkv_outer=2048.0),
    "P as it is": QATConfig(quantize_p=False),
    "disabled": QATConfig(enabled=False),
}


@pytest.fixture
def reference() -> Evaluate:
    """attn_reference's definition: its compiled kernels do not have these operators."""
    return lambda call: get_backend("attn_reference").evaluate(call, engine="pytorch")


def qat_call(contract: str, config: QATConfig = CAUSAL, *, op: str = "qat_attention", seed: int = 0, **sizes: Any) -> Call:
    """bfloat16, gradients of everything; without a log-sum-exp where the keys are smoothed."""
    usual = {"kv_heads": 2, "queries": 5, "keys": 37, "head_dim": 16 if contract == CONTRACTS[0] else 64, "causal": False}
    found = random_call(op, "bfloat16", Sizes(**{**usual, **sizes}), seed, gradients=True)
    options, cotangents = {**found.options, "config": config}, dict(found.cotangents or {})
    if config.smooth_k:
        options["return_lse"] = False
        del cotangents["lse"]
    return replace(found, options=options, cotangents=cotangents, contract=contract)


def part(call: Call, **index: slice) -> Call:
    """The call on some queries ("q") and keys ("k")."""
    arrays = dict(call.arrays)
    for name, axis in (("q", "q"), ("k", "k"), ("v", "k")):
        arrays[name] = arrays[name][:, :, index[axis]]
    cotangents = {name: array[:, :, index["q"]] for name, array in (call.cotangents or {}).items()}
    return replace(call, arrays=arrays, cotangents=cotangents)


def check_items(evaluate: Evaluate, call: Call) -> None:
    whole = evaluate(call)
    for items in ([1], [1, 0], [0, 1, 1]):
        found = evaluate(select(call, items))
        for slot, item in enumerate(items):
            own = outputs_of(call, whole, item)
            assert_same(outputs_of(select(call, items), found, slot), own, f"item {item} in slot {slot} of {items}")


def check_padding(evaluate: Evaluate, call: Call) -> None:
    """Keys of NaN in front and in the middle, which the mask drops."""
    place = np.concatenate([np.arange(3, 20), np.arange(25, 25 + call.arrays["k"].shape[2] - 17)])
    mask, arrays = np.zeros((2, int(place[-1]) + 4), bool), dict(call.arrays)
    mask[:, place] = True
    for name in ("k", "v"):
        array = arrays[name]
        padded = np.full((*array.shape[:2], mask.shape[1], array.shape[3]), 0x7FC0, np.uint16).view(array.dtype)
        padded[:, :, place] = array
        arrays[name] = padded
    clean, found = evaluate(call), evaluate(replace(call, arrays={**arrays, "key_padding_mask": mask}))
    for name in ("dk", "dv"):
        assert_zero(found[name][:, :, ~mask[0]], name)
        found[name] = found[name][:, :, place]
    assert_same(found, clean, "padding")


def check_prefix(evaluate: Evaluate, call: Call) -> None:
    whole = evaluate(call)
    for count in (16, 21):
        found = evaluate(part(call, q=slice(0, count), k=slice(0, count)))
        assert_same(found, {name: whole[name][:, :, :count] for name in ("out", "lse", "dq")}, f"prefix {count}", ("out", "lse", "dq"))


def check_packed(evaluate: Evaluate, call: Call) -> None:
    whole = evaluate(call)
    for item in range(2):
        alone = select(call, [item])
        assert_same(outputs_of(alone, evaluate(alone), 0), outputs_of(call, whole, item), f"segment {item}")


def check_repetition(evaluate: Evaluate, call: Call) -> None:
    first = evaluate(call)
    assert_same(evaluate(call), first, "repetition")
    arrays = {name: np.ascontiguousarray(call.arrays[name].transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0) for name in ("q", "k", "v")}
    assert_same(evaluate(replace(call, arrays={**call.arrays, **arrays})), first, "another layout")


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_equal_the_reference(backend: Runner, reference: Evaluate, name: str, contract: str) -> None:
    config = CONFIGS[name]
    call = qat_call(contract, config, batch=1, sinks=not config.smooth_k, **({"head_dim": 32} if contract == CONTRACTS[0] else {}))
    backend.run(lambda evaluate: assert_same(evaluate(call), reference(call), name))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_bytes_of_causal_calls(backend: Runner, reference: Evaluate, contract: str) -> None:
    call = qat_call(contract, batch=1, queries=40, keys=40, causal=True, sinks=True)
    backend.run(lambda evaluate: assert_same(evaluate(call), reference(call), "causal"))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_items_stand_alone(backend: Runner, contract: str) -> None:
    backend.run(check_items, qat_call(contract, QATConfig()))


def test_padding_moves_no_bit(backend: Runner) -> None:
    backend.run(check_padding, qat_call(CONTRACTS[0], QATConfig()))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_later_tokens_move_no_bit(backend: Runner, contract: str) -> None:
    backend.run(check_prefix, qat_call(contract, batch=1, queries=40, keys=40, causal=True))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_packed_equals_alone(backend: Runner, contract: str) -> None:
    backend.run(check_packed, qat_call(contract, QATConfig(), op="qat_attention_varlen", queries=6, keys=21))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_same_call_same_bits(backend: Runner, contract: str) -> None:
    backend.run(check_repetition, qat_call(contract, QATConfig(), batch=1))


def test_the_configuration_stands_in_the_trace() -> None:
    config = QATConfig.fastvideo()
    op = get_op("qat_attention", backend="attn_reference:pytorch", config=config)
    assert op.trace.config == config.fingerprint and op.trace.contract == CONTRACTS[0]
    assert get_op("qat_attention", backend="attn_reference:pytorch").trace.config == QATConfig().fingerprint
    assert get_op("attention").trace.config is None
    with pytest.raises(ValueError, match="attention takes no config"):
        get_op("attention", config=config)


def smooths_over_the_batch(evaluate: Evaluate) -> Evaluate:
    """The mean of the keys over all items."""

    def faulty(call: Call) -> dict[str, np.ndarray]:
        config = replace(call.options["config"], qkv_outer="row" if call.arrays["q"].shape[0] > 1 else "none")
        return evaluate(replace(call, options={**call.options, "config": config}))

    return faulty


def blocks_over_removed_keys(evaluate: Evaluate) -> Evaluate:
    """Blocks of V along stored keys: here a call whose padded keys are zeros that stay."""

    def faulty(call: Call) -> dict[str, np.ndarray]:
        if "key_padding_mask" not in call.arrays:
            return evaluate(call)
        arrays = {name: array for name, array in call.arrays.items() if name != "key_padding_mask"}
        kept = call.arrays["key_padding_mask"][0]
        for name in ("k", "v"):
            arrays[name] = arrays[name].copy()
            arrays[name][:, :, ~kept] = np.zeros((), np.uint16).view(arrays[name].dtype)
        return evaluate(replace(call, arrays=arrays))

    return faulty


def scales_over_later_tokens(evaluate: Evaluate) -> Evaluate:
    """The outer scale of a call grows with its length."""

    def faulty(call: Call) -> dict[str, np.ndarray]:
        config = replace(call.options["config"], qkv_outer=float(call.arrays["k"].shape[2]))
        return evaluate(replace(call, options={**call.options, "config": config}))

    return faulty


@pytest.mark.parametrize(
    ("check", "fault", "problem"),
    (
        (check_items, smooths_over_the_batch, qat_call(CONTRACTS[0], QATConfig())),
        (check_padding, blocks_over_removed_keys, qat_call(CONTRACTS[0], QATConfig())),
        (check_prefix, scales_over_later_tokens, qat_call(CONTRACTS[0], batch=1, queries=24, keys=24, causal=True)),
    ),
    ids=("items", "padding", "prefix"),
)
def test_the_clause_catches(reference: Evaluate, check: Callable[..., None], fault: Any, problem: Call) -> None:
    with pytest.raises(ContractViolation):
        check(fault(reference), problem)


def test_the_contracts_differ(reference: Evaluate) -> None:
    found = [reference(qat_call(contract, batch=1, head_dim=64, causal=True)) for contract in CONTRACTS]
    assert not difference(found[0]["lse"], found[1]["lse"]).equal
