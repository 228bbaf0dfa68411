"""Dropout: a counter-based mask that depends on seed and place alone, shared by forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.asserts import assert_bytes, assert_same, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.problems import QKV
from attn_shared_tests.test_forward import check_bytes

SEED = 0x0123456789ABCDEF


def _call(p: float = 0.48, seed: int = SEED, **keywords: Any) -> Call:
    return problems.attention(**{"queries": 20, "keys": 30, "dropout_p": p, "dropout_seed": seed, "wrt": QKV, **keywords})


def kept(evaluate: Evaluate, p: float, seed: int, **sizes: int) -> np.ndarray:
    """Which pairs survive, read from the output of one-hot values and equal scores: bool [B, H, S, T]."""
    call = _call(
        p,
        seed,
        **{"batch": 2, "heads": 4, "kv_heads": 1, "queries": 24, "keys": 24, "head_dim": 24, **sizes},
        causal=False,
        scale=0.0,
        wrt=(),
    )
    one_hot = np.broadcast_to(np.eye(call.arrays["k"].shape[2], dtype=np.float32), call.arrays["v"].shape).copy()
    return evaluate(problems.edited(call, v=one_hot))["out"] > 0


def philox(seed: int, counters: np.ndarray) -> np.ndarray:
    """Word 0 of Philox4x32-10 for counters uint64 [n, 4] below 2^32."""
    c0, c1, c2, c3 = (counters[:, word].astype(np.uint64) for word in range(4))
    low, k0, k1 = np.uint64(0xFFFFFFFF), np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0


def check_mask(evaluate: Evaluate, p: float, seed: int) -> None:
    """Pair (b, h, i, j) is kept iff its Philox word reaches floor(p * 2^32)."""
    found = kept(evaluate, p, seed)
    counters = np.stack(np.meshgrid(*(np.arange(size, dtype=np.uint64) for size in found.shape), indexing="ij"), axis=-1).reshape(-1, 4)
    expected = philox(seed, counters) >= np.uint64(math.floor(p * 2**32))
    assert (found.reshape(-1) == expected).all(), f"{int((found.reshape(-1) != expected).sum())} pairs differ"


def check_statistics(evaluate: Evaluate) -> None:
    """Keep rate within five sigma; heads, batch items and seeds do not agree more than chance allows."""
    p = 0.25
    one, other = kept(evaluate, p, 1), kept(evaluate, p, 2)
    sigma = math.sqrt(p * (1 - p) / one.size)
    assert abs(one.mean() - (1 - p)) < 5 * sigma, f"keep rate {one.mean()}"
    agreement, chance = (one == other).mean(), (1 - p) ** 2 + p**2
    assert abs(agreement - chance) < 5 * math.sqrt(chance * (1 - chance) / one.size), f"two seeds agree on {agreement}"
    for left, right, what in ((one[0], one[1], "batch items"), (one[:, 0], one[:, 1], "heads")):
        assert abs((left == right).mean() - chance) < 5 * math.sqrt(chance * (1 - chance) / left.size), f"{what} share a mask"


def check_adjoint(evaluate: Evaluate) -> None:
    """out is linear in v, so <dv, v> = <dout, out> iff backward uses the mask of forward."""
    call = _call()
    call = replace(call, cotangents={"out": (call.cotangents or {})["out"]})
    found = evaluate(call)
    left = float((found["dv"].astype(np.float64) * call.arrays["v"]).sum())
    right = float(((call.cotangents or {})["out"].astype(np.float64) * found["out"]).sum())
    assert abs(left - right) < 1e-4 * (abs(left) + abs(right)), f"{left} against {right}"


def check_extremes(evaluate: Evaluate) -> None:
    """p = 0 is no dropout byte for byte; p = 1 gives zeros, zero gradients and the plain LSE."""
    plain = evaluate(problems.edited(_call(), drop=("dropout_p", "dropout_seed")))
    assert_same(evaluate(_call(0.0)), plain, "p = 0")
    call = _call(1.0)
    call = replace(call, cotangents={"out": (call.cotangents or {})["out"]})
    everything = evaluate(call)
    for name in ("out", "dq", "dk", "dv"):
        assert_zero(everything[name], f"p = 1: {name}")
    assert_bytes(everything["lse"], plain["lse"], "p = 1: lse")


def check_lse(evaluate: Evaluate) -> None:
    call = _call(with_sinks=True)
    plain = evaluate(problems.edited(call, drop=("dropout_p", "dropout_seed")))
    found = evaluate(call)
    assert_bytes(found["lse"], plain["lse"], "lse with dropout")
    assert (found["out"] != plain["out"]).any(), "dropout changes nothing"


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("p", (0.1, 0.48, 1.0))
def test_dropout_gives_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, p: float, dtype: str) -> None:
    wrt = (*QKV, "sinks", "bias")
    backend.run(check_bytes, reference, _call(p, dtype=dtype, with_sinks=True, bias_shape=(1, 4, 1, 30), wrt=wrt))


@pytest.mark.parametrize("seed", (0, SEED, 2**64 - 1))
@pytest.mark.parametrize("p", (0.1, 0.5))
def test_the_mask_is_philox(backend: Runner, p: float, seed: int) -> None:
    backend.run(check_mask, p, seed)


def test_masks_look_random(backend: Runner) -> None:
    backend.run(check_statistics)


def test_backward_uses_the_mask_of_forward(backend: Runner) -> None:
    backend.run(check_adjoint)


def test_no_dropout_and_full_dropout(backend: Runner) -> None:
    backend.run(check_extremes)


def test_lse_does_not_know_dropout(backend: Runner) -> None:
    backend.run(check_lse)


@pytest.mark.parametrize(
    ("seed", "counter", "word"),
    (
        (0, (0, 0, 0, 0), 0x6627E8D5),
        (2**64 - 1, (0xFFFFFFFF,) * 4, 0x408F276D),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
    ),
)
def test_the_philox_of_these_tests_gives_known_answers(seed: int, counter: tuple[int, ...], word: int) -> None:
    assert philox(seed, np.array([counter], np.uint64))[0] == word


def redraws_in_backward(evaluate: Evaluate) -> Evaluate:
    def faulty_evaluate(call: Call) -> dict[str, np.ndarray]:
        found = evaluate(call)
        other = evaluate(problems.edited(call, dropout_seed=1)) if call.wrt else found
        return found | {name: other[name] for name in found if name.startswith("d")}

    return faulty_evaluate


def ignores_dropout(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(problems.edited(call, drop=("dropout_p", "dropout_seed")))


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_mask, faulty.repeats_one_dropout_seed, (0.5, SEED)),
        (check_mask, ignores_dropout, (0.5, SEED)),
        (check_statistics, faulty.repeats_one_dropout_seed, ()),
        (check_adjoint, redraws_in_backward, ()),
        (check_extremes, ignores_dropout, ()),
        (check_lse, ignores_dropout, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)
