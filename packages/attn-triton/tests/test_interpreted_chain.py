"""The chains that interpreted kernels run, against the C library's FMA, on values built to break an addition that rounds twice; what they
read; and the blocks that they read."""

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch
from attn_triton._interpreted_chain import _chain
from attn_triton._interpreter import bfloat16_by_shift
from attn_triton._problem import MAX_BLOCK_KEYS, MAX_HEAD_DIM, Sizes, block_sides
from triton import language as tl
from triton.runtime import interpreter

FMAF = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6").fmaf
FMAF.restype, FMAF.argtypes = ctypes.c_float, [ctypes.c_float] * 3
ULP = 2.0**-23


def ties(rng, rows, steps, columns, exponent):
    """A product is half of the last bit of an addend near 2^exponent, a little more or a little less."""
    acc = np.ldexp(1 + rng.integers(0, 4, (rows, columns)) * ULP, exponent)
    a = (1 + rng.integers(0, 3, (rows, steps)) * ULP) * rng.choice((-1.0, 1.0), (rows, steps))
    return acc, a, np.ldexp(1 - rng.integers(0, 3, (steps, columns)) * ULP / 2, exponent - 24)


def subnormal_ties(rng, rows, steps, columns):
    """The same with results below the normal numbers, whose last bit is 2^-149."""
    acc = rng.integers(0, 2**23, (rows, columns)) * 2.0**-149
    _, a, b = ties(rng, rows, steps, columns, 0)
    return acc, a * 2.0**-75, b * 2.0**24 * 2.0**-75


def random_bits(rng, rows, steps, columns):
    return [rng.integers(0, 2**32, shape, np.uint32).view(np.float32) for shape in ((rows, columns), (rows, steps), (steps, columns))]


KINDS = {
    "ties": lambda *shape: ties(*shape, 3),
    "large ties": lambda *shape: ties(*shape, 127),
    "least normal ties": lambda *shape: ties(*shape, -125),
    "subnormal ties": subnormal_ties,
    "random bits": random_bits,
}


def inputs(kind, seed):
    acc, a, b = KINDS[kind](np.random.default_rng(seed), 12, 6, 20)
    return [np.asarray(values, np.float32) for values in (acc, a, b)]


def by_elements(acc, a, b, terms, step):
    found = acc.copy()
    for row, column in np.ndindex(acc.shape):
        for index in np.flatnonzero(terms[row]):
            found[row, column] = step(float(a[row, index]), float(b[index, column]), float(found[row, column]))
    return found


def differing(found, expected):
    """Elements that differ in a bit; every NaN is one value."""
    return int(((found.view(np.int32) != expected.view(np.int32)) & ~(np.isnan(found) & np.isnan(expected))).sum())


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_the_fma_of_the_c_library(kind, masked):
    for seed in range(10):
        acc, a, b = inputs(kind, seed)
        terms = np.random.default_rng(seed).random(a.shape) < 0.7 if masked else np.ones(a.shape, bool)
        with np.errstate(all="ignore"):
            found = _chain(acc, a, b, terms if masked else None)
        assert differing(found, by_elements(acc, a, b, terms, FMAF)) == 0


@pytest.mark.parametrize("kind", ("ties", "large ties", "subnormal ties"))
def test_rounding_twice_is_noticed(kind):
    """Control: the float64 sum, rounded again."""
    acc, a, b = inputs(kind, 0)
    terms = np.ones(a.shape, bool)
    assert differing(by_elements(acc, a, b, terms, lambda x, y, z: np.float32(x * y + z)), by_elements(acc, a, b, terms, FMAF)) > 20


def test_every_bfloat16_is_read_as_it_is():
    stored = np.arange(1 << 16, dtype=np.uint16)
    with bfloat16_by_shift():
        found = interpreter._convert_float(stored, tl.bfloat16, tl.float32, None)
    expected = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(found, expected.view(np.uint32))


@pytest.mark.parametrize(
    ("queries", "group", "keys", "expected"),
    ((1, 1, 5000, (16, MAX_BLOCK_KEYS)), (1, 1, 3, (16, 16)), (30, 2, 300, (64, 512)), (4096, 4, 4096, (256, 256)), (0, 1, 0, (16, 16))),
)
def test_blocks_hold_what_there_is(monkeypatch, queries, group, keys, expected):
    sizes = Sizes(1, 1, group, queries, keys, 0, 0, 1.0)
    monkeypatch.setattr("attn_triton._problem.INTERPRETED", True)
    assert block_sides(sizes, 256, 256) == expected
    assert expected[0] * expected[1] <= 1 << 16 and expected[1] * MAX_HEAD_DIM <= tl.TRITON_MAX_TENSOR_NUMEL
    monkeypatch.setattr("attn_triton._problem.INTERPRETED", False)
    assert block_sides(sizes, 64, 32) == (64, 32)
