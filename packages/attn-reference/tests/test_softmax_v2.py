"""``joint_attn_softmax`` of ordered-v2: its exp, the row against the text taken one number at a time, the host variants and accuracy."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import scalar_law
import torch
from attn_reference import _host_kernels
from attn_reference._host_kernels import HostKernels
from attn_reference._pytorch_kernels import KERNELS as DEFINITION
from attn_reference._softmax_v2 import TILE, exp
from float_bits import bits, differing, same_bits
from torch import Tensor

F = np.float32
INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _hex(value: int) -> np.float32:
    return np.array(value, np.uint32).view(F)[()]


def _scalar_exp(x: np.float32) -> np.float32:
    """The contract's text with the C library's fmaf."""
    if np.isnan(x):
        return x
    if x < _hex(0xC2ADFADD):
        return F(0)
    n = F(scalar_law.fma(x, _hex(0x3FB8AA3B), _hex(0x4B400000)) - _hex(0x4B400000))
    r = scalar_law.fma(n, F(-_hex(0xB102E308)), scalar_law.fma(n, F(-_hex(0x3F317218)), x))
    p = _hex(0x3AB51226)
    for c in (0x3C091CEA, 0x3D2AAC79, 0x3E2AAA49, 0x3EFFFFFE, 0x3F800000, 0x3F800000):
        p = scalar_law.fma(p, r, _hex(c))
    return F(np.ldexp(p, int(n)))


def _scalar_row(scores: np.ndarray) -> np.ndarray:
    """P of one row without specials, tile by tile."""
    tiles = [np.append(part, np.full(TILE - len(part), -np.inf, F)) for part in (scores[i : i + TILE] for i in range(0, len(scores), TILE))]
    state, found = (F(-np.inf), F(0)), []
    for tile in tiles:
        top = tile.max()
        weights = np.array([_scalar_exp(F(x - top)) if x > -np.inf else F(0) for x in tile])
        found.append((top, weights))
        slots = weights.copy()
        while len(slots) > 1:
            slots = (slots[: len(slots) // 2] + slots[len(slots) // 2 :]).astype(F)
        m = max(state[0], top)
        first = state[0] == -np.inf
        s = slots[0] if first else F(F(state[1] * _scalar_exp(F(state[0] - m))) + F(slots[0] * _scalar_exp(F(top - m))))
        state = (m, s)
    parts = [np.array([F(e * F(_scalar_exp(F(top - state[0])) / state[1])) for e in weights]) for top, weights in found]
    return np.concatenate(parts)[: len(scores)]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, size: float = 4.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def test_exp_accuracy() -> None:
    x = torch.cat([torch.linspace(-86.98, 0, 400_001), -torch.logspace(-30, 1, 100_001)])
    exact = torch.exp(x.double())
    ulp = torch.exp2(torch.frexp(exact)[1].double() - 24)
    assert ((exp(x).double() - exact).abs() / ulp).max() < 0.89


def test_exp_exact_points() -> None:
    x = torch.tensor([0.0, -0.0, -86.98996734619141, -86.98997497558594, -200.0, -1e30, -INF, NAN])
    found = exp(x)
    assert found[:2].tolist() == [1.0, 1.0]
    assert bits(found[2]).item() == 0x00B50521
    assert bits(found[3:7]).tolist() == [0, 0, 0, 0]
    assert found[7].isnan()


def test_exp_is_never_subnormal_nor_above_one() -> None:
    found = exp(-torch.linspace(0, 90, 2_000_001))
    assert found.max() == 1.0
    assert found[found > 0].min() >= 2.0**-125.5


def test_exp_is_the_text() -> None:
    x = -90 * torch.rand(3000, generator=torch.Generator().manual_seed(0))
    by_text = torch.tensor([float(_scalar_exp(F(value))) for value in x.tolist()])
    assert differing(exp(x), by_text) == 0


def test_a_separately_rounded_step_is_noticed() -> None:
    """Negative control: an exp that differs in a last bit is not this one."""
    x = -20 * torch.rand(3000, generator=torch.Generator().manual_seed(1))
    assert differing(torch.exp(x), exp(x)) > 30


@pytest.mark.parametrize("keys", (1, 700, 1024, 1025, 2500))
def test_rows_are_the_text(engine: ModuleType, keys: int) -> None:
    scores = _random(2, keys, seed=keys)
    found = engine.joint_attn_softmax(scores, contract="ordered-v2")
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(np.stack([_scalar_row(row) for row in scores.numpy()]))
    assert same_bits(found, wanted)
    assert keys == 1 or not same_bits(engine.joint_attn_softmax(scores), wanted), "negative control: ordered-v1"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", (1, 1023, 1024, 1025, 3000))
def test_agrees_with_float64(engine: ModuleType, keys: int, dtype: torch.dtype) -> None:
    scores, upstream = _random(3, 2, keys, dtype=dtype), _random(3, 2, keys, seed=1, dtype=dtype)
    leaf = scores.clone().requires_grad_()
    probs = engine.joint_attn_softmax(leaf, contract="ordered-v2")
    (gradient,) = torch.autograd.grad(probs, leaf, upstream)
    exact_leaf = scores.double().requires_grad_()
    exact = torch.softmax(exact_leaf, -1)
    (wanted,) = torch.autograd.grad(exact, exact_leaf, upstream.double())
    step, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert probs.dtype == gradient.dtype == dtype
    assert bool(((probs.detach().double() - exact).abs() <= (0.5 * step + 3e-6) * exact + tiny).all())
    assert bool(((gradient.double() - wanted).abs() <= 0.5 * step * wanted.abs() + 3e-6 * exact.abs().amax() + tiny).all())


def test_three_ulp_where_the_differences_are_exact(engine: ModuleType) -> None:
    """Scores on a grid of 1/64: every difference is exact, and what remains are exp, sums, division and product."""
    scores = (_random(4, 4096, size=256.0).round() / 64).clamp(-12, 12)
    found, exact = engine.joint_attn_softmax(scores, contract="ordered-v2").double(), torch.softmax(scores.double(), -1)
    assert ((found - exact).abs() / torch.exp2(torch.frexp(exact)[1].double() - 24)).max() < 3.0


@pytest.mark.parametrize("special", [NAN, INF])
def test_special_score_spoils_its_row_only(engine: ModuleType, special: float) -> None:
    scores = _random(3, 2600)
    scores[:, 5] = -INF
    spoiled = scores.clone()
    spoiled[1, 2400] = special
    clean, dirty = (engine.joint_attn_softmax(rows, contract="ordered-v2") for rows in (scores, spoiled))
    assert same_bits(dirty[0::2], clean[0::2])
    assert dirty[1].isnan().sum() == 2599
    assert not bits(dirty[:, 5]).any()


@pytest.mark.parametrize("value", [-1e30, -1000.0, torch.finfo(torch.float32).min])
def test_large_finite_scores_are_numbers(engine: ModuleType, value: float) -> None:
    assert bool((engine.joint_attn_softmax(torch.full((1, 2048), value), contract="ordered-v2") == 1 / 2048).all())


@pytest.mark.parametrize("variant", [] if _host_kernels.unavailable() else HostKernels.variants())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_host_variant_is_the_definition(variant: str, dtype: torch.dtype) -> None:
    host = HostKernels(variant=variant)
    for seed, (keys, size) in enumerate(((5, 4.0), (1024, 60.0), (1025, 1e-40), (3100, 4.0), (2048, 1e30))):
        scores, dprobs = _random(2, 3, keys, seed=seed, dtype=dtype, size=size), _random(2, 3, keys, seed=9, dtype=dtype)
        scores[0, 0, : keys // 2], scores[0, 1], scores[1, 0, keys // 3] = -INF, -INF, NAN
        mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(seed)) < 0.7
        for kept in (None, mask):
            wanted = DEFINITION.softmax_v2_forward(scores, kept, dtype)
            found = host.softmax_v2_forward(scores, kept, dtype)
            assert same_bits(found[0], wanted[0]) and same_bits(found[2], wanted[2]), (keys, size)
            gradients = [kernels.softmax_v2_backward(dprobs, scores, kept, *wanted[1:]) for kernels in (host, DEFINITION)]
            assert same_bits(*gradients), (keys, size)
