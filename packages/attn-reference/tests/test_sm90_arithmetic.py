"""The tensor-core step and ex2 of sm90-v1: samples of an H200, the statements of the text, the host kernels against the definition."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from attn_reference._host_kernels import HostKernels
from attn_reference._sm90_arithmetic import chain, ex2, halves
from attn_spec._sm90 import ex2_table, score_factor
from sm90_problems import DTYPES, same_bytes
from torch import Tensor

DATA = Path(__file__).parent / "data"
SAMPLES = DATA / "sm90_mma_k16_samples.npz"
MORE_SAMPLES = DATA / "sm90_register_and_ex2_samples.npz"
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VARIANTS = HostKernels.variants()


def samples() -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """a, b, c and the GPU's result."""
    with np.load(SAMPLES) as stored:
        for name, dtype in NAMES.items():
            for spread in (0, 4):
                a, b, c, d = (torch.from_numpy(stored[f"{name}_{spread}_{part}"]) for part in "ABCD")
                yield f"{name} {spread}", a.view(dtype), b.view(dtype), c, d


def test_the_step_gives_the_bits_of_the_gpu() -> None:
    count = 0
    for name, a, b, c, d in samples():
        assert same_bytes(chain(a, b, c), d), name
        count += d.numel()
    assert count == 4 * 8192


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_compiled_step_gives_the_bits_of_the_gpu(variant: str) -> None:
    for name, a, b, c, d in samples():
        for index in range(len(a)):
            assert same_bytes(HostKernels(variant, 1).sm90_chain(a[index], b[index], c[index]), d[index]), name


@pytest.mark.parametrize("name", NAMES)
def test_steps_with_a_register_operand_give_the_bits_of_the_gpu(name: str) -> None:
    with np.load(MORE_SAMPLES) as stored:
        a, b, c, d = (torch.from_numpy(stored[f"{name}_register_{part}"]) for part in "ABCD")
    a, b = a.view(NAMES[name]), b.view(NAMES[name])
    assert same_bytes(chain(a, b, c), d)
    for variant in VARIANTS:
        assert same_bytes(HostKernels(variant, 1).sm90_chain(a, b, c), d), variant


@pytest.mark.parametrize("name", ("ex2", "ex2_random"))
def test_ex2_gives_the_bits_of_the_gpu(name: str) -> None:
    with np.load(MORE_SAMPLES) as stored:
        x, y = (torch.from_numpy(stored[f"{name}_{part}"]) for part in "xy")
    assert x.numel() >= 8192
    assert same_bytes(ex2(x), y)
    assert not same_bytes(torch.exp2(x), y)


def test_other_roundings_are_not_the_gpu_s() -> None:
    """The exact sum of a step, rounded once, differs from the samples."""
    for name, a, b, c, d in samples():
        exact = (a.double().unsqueeze(-1) * b.double().unsqueeze(-3)).sum(-2) + c.double()
        assert not same_bytes(exact.float(), d), name


def operands(seed: int, kind: str, dtype: torch.dtype, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    bits = torch.randint(-(2**15), 2**15, shape, generator=g).to(torch.int16).view(dtype)
    if kind == "spread":
        return (x * torch.exp2(torch.randint(-6, 7, shape, generator=g).float())).to(dtype)
    if kind == "zeros of both signs":
        return torch.where(torch.rand(shape, generator=g) < 0.7, torch.where(x < 0, -0.0, 0.0), x).to(dtype)
    if kind == "any finite bits":
        return torch.where(torch.isfinite(bits), bits, torch.zeros((), dtype=dtype))
    if kind == "subnormal":
        return (x * torch.finfo(dtype).tiny).to(dtype)
    if kind == "infinite and NaN":
        special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])[torch.randint(4, shape, generator=g)]
        return torch.where(torch.rand(shape, generator=g) < 0.05, special, x).to(dtype)
    if kind == "all near the top of a binade":
        return torch.full(shape, 2 - torch.finfo(dtype).eps, dtype=dtype)
    assert kind == "normal"
    return x.to(dtype)


KINDS = (
    "normal",
    "spread",
    "zeros of both signs",
    "any finite bits",
    "subnormal",
    "infinite and NaN",
    "all near the top of a binade",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_chain_is_the_definition_s(kind: str, dtype: torch.dtype) -> None:
    a, b = operands(0, kind, dtype, 7, 40), operands(1, kind, dtype, 40, 70)
    g = torch.Generator().manual_seed(2)
    for start in (
        torch.zeros(7, 70),
        -torch.zeros(7, 70),
        torch.randn(7, 70, generator=g) * torch.exp2(torch.randint(-140, 40, (7, 70)).float()),
    ):
        expected = chain(a, b, start)
        for variant in VARIANTS:
            assert same_bytes(HostKernels(variant, 1).sm90_chain(a, b, start), expected), variant


def test_zero_products_change_nothing() -> None:
    """Padding of D, masked keys and skipped steps: a step of zeros keeps every c, and turns -0 into +0."""
    c = operands(3, "any finite bits", torch.float16, 64, 64).float() * torch.exp2(torch.randint(-120, 100, (64, 64)).float())
    a, zeros = operands(4, "spread", torch.bfloat16, 64, 16), torch.zeros(16, 64, dtype=torch.bfloat16)
    assert same_bytes(chain(a, zeros, c), c + 0.0)
    assert same_bytes(chain(a, -zeros, c), c + 0.0)
    assert same_bytes(chain(a, zeros, torch.full((64, 64), -0.0)), torch.zeros(64, 64))
    b = operands(5, "spread", torch.bfloat16, 64, 48).transpose(0, 1)
    wide = torch.cat((operands(6, "spread", torch.bfloat16, 64, 48), torch.zeros(64, 40, dtype=torch.bfloat16)), dim=1)
    padded = torch.cat((b, operands(7, "normal", torch.bfloat16, 40, 64)))
    assert same_bytes(chain(wide, padded), chain(wide[:, :48], b))


def test_a_chain_never_holds_minus_zero() -> None:
    a, b = operands(8, "zeros of both signs", torch.bfloat16, 64, 16), operands(9, "zeros of both signs", torch.bfloat16, 16, 64)
    found = chain(a, b, torch.full((64, 64), -0.0))
    assert not bool(((found == 0) & torch.signbit(found)).any())


def test_the_table_of_ex2() -> None:
    table = ex2_table()
    assert hashlib.sha256(table.tobytes()).hexdigest() == "47c476952278c8122c812567ce204ce4741f5bfd6dc2801f0fb9a85e8876fcf8"
    exact = np.exp2((np.arange(1 << 23) - (1 << 23)) / (1 << 23)).astype(np.float32)
    difference = table.view(np.int32) - exact.view(np.int32)
    assert difference.min() == -2
    assert difference.max() == 1
    assert 0.60 < (difference != 0).mean() < 0.61
    assert table[0] == 0.5
    assert bool((np.diff(table) >= 0).all())


def test_ex2_at_its_edges() -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-9, 1e-9, -1, -126, -126.5, -127, -1e30, 1, 127, 128, 1e30, inf, -inf, nan])
    expected = torch.tensor([1, 1, 1, 1, 1, 0.5, 2.0**-126, 0, 0, 0, 2, 2.0**127, inf, inf, inf, 0, nan])
    assert same_bytes(ex2(x), expected)


def test_ex2_truncates_and_scales() -> None:
    g = torch.Generator().manual_seed(0)
    index = torch.randint(1, (1 << 23) - 1, (4096,), generator=g)
    grid = -index.double() / (1 << 23)
    found = ex2(grid.float())
    assert same_bytes(found, torch.tensor(ex2_table())[(1 << 23) - index])
    between = (grid - 2.0**-24).float()
    small = between > -0.5
    assert same_bytes(ex2(between[small]), found[small])
    for whole in (1, 7, 100):
        large = torch.arange(1, 1 << 23, 4099).double() / (1 << 23)
        base = ex2(-large.float())
        kept = (whole + large).float().double() == whole + large
        assert same_bytes(ex2(-(whole + large[kept]).float()), base[kept] * 2.0**-whole)
    positive = torch.arange(1, (1 << 23) - 2, 4099)
    last = torch.tensor([1.0, 2.0]) - torch.tensor([2.0**-24, 2.0**-23])
    assert same_bytes(ex2(last), torch.tensor([2.0, 4.0]) * (1 - 2.0**-24))
    beside = torch.tensor(ex2_table())[positive + 1] * 2
    assert same_bytes(ex2(positive.float() / (1 << 23)), beside)


def test_halves() -> None:
    x = torch.arange(16.0)
    assert halves(x, 8).tolist() == [8, 10, 12, 14, 16, 18, 20, 22]
    rounded = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert halves(rounded).item() == 2**24 + 2


def test_the_factor_of_scores() -> None:
    assert np.float32(score_factor(0.125)).view(np.int32) == 0x3E38AA3B
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-39):
        with pytest.raises(ValueError, match=r"scale \* log2\(e\) to be a normal positive float32; got scale="):
            score_factor(scale)
