"""The C++ headers, compiled by g++, against the contract's text written in numpy, known answers and float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from attn_spec import include_dir
from attn_spec._arrays import bfloat16, from_float32, to_float32
from attn_spec._sm90 import ex2_table
from attn_spec.testing.asserts import assert_bytes

F32 = np.float32
SOURCE = Path(__file__).with_name("headers.cpp")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


def bits(value: int) -> np.float32:
    return np.array(value, np.uint32).view(F32)[()]


def compile_with(*flags: str, target: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is missing: these tests compile the contract's headers"
    command = [compiler, *FLAGS, *flags, f"-I{include_dir()}", str(SOURCE), "-o", str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("headers") / "headers.so"
    built = compile_with(target=target)
    assert built.returncode == 0, built.stderr
    found = ctypes.CDLL(str(target))
    found.lse.restype = found.sum_of_tile.restype = found.max_of_tile.restype = ctypes.c_float
    found.lse.argtypes = [ctypes.c_float, ctypes.c_float]
    found.philox.restype = ctypes.c_uint32
    found.philox.argtypes = [ctypes.c_uint64, *[ctypes.c_uint32] * 4]
    return found


def mapped(function: object, *arrays: np.ndarray, dtypes: tuple[type, ...] = (np.float32,)) -> list[np.ndarray]:
    """Outputs of ``function(in..., out..., n)``."""
    inputs = [np.ascontiguousarray(array) for array in arrays]
    outputs = [np.empty(inputs[0].shape, dtype) for dtype in dtypes]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*inputs, *outputs)]
    function(*pointers, ctypes.c_int64(inputs[0].size))  # type: ignore[operator]
    return outputs


def exp_model(x: np.ndarray) -> np.ndarray:
    """exp of the contract, each numpy operation one rounding."""
    with np.errstate(invalid="ignore", under="ignore"):
        safe = np.where((x < -104) | np.isnan(x), F32(0), x)
        n = np.floor(safe * bits(0x3FB8AA3B) + F32(0.5))
        r = (safe - n * bits(0x3F317200)) - n * bits(0x35BFBE8E)
        p = np.full(x.shape, F32(1 / 5040))
        for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1, 1):
            p = p * r + F32(c)
        low = n < -126
        scaled = p * np.ldexp(F32(1), np.where(low, n + 64, n).astype(np.int32)).astype(F32)
        result = np.where(low, scaled * F32(2.0**-64), scaled)
        return np.where(np.isnan(x), x, np.where(x < -104, F32(0), result)).astype(F32)


def ln_model(z: np.ndarray) -> np.ndarray:
    """ln of the contract."""
    k = (z.view(np.uint32) >> 23).astype(np.int32) - 127
    f = ((z.view(np.uint32) & 0x7FFFFF) | 0x3F800000).view(F32)
    high = f >= bits(0x3FB504F3)
    f, k = np.where(high, f * F32(0.5), f), (k + high).astype(F32)
    t = f - F32(1)
    w = t * t
    p = np.full(z.shape, bits(0x3D9021BB))
    for c in (0xBDEBD1B8, 0x3DEF251A, 0xBDFE5D4F, 0x3E11E9BF, 0xBE2AAE50, 0x3E4CCEAC, 0xBE7FFFFC, 0x3EAAAAAA):
        p = p * t + bits(c)
    y = (t * w) * p
    y = y + k * bits(0xB95E8083)
    y = y - F32(0.5) * w
    y = t + y
    return y + k * bits(0x3F318000)


def tree_model(slots: np.ndarray) -> np.float32:
    half = 128
    while half:
        slots = slots[:half] + slots[half : 2 * half]
        half //= 2
    return slots[0]


def midpoints(values: np.ndarray) -> np.ndarray:
    """Around every rounding tie of a half type: the tie and its two float32 neighbours, both signs, and the ends."""
    ordered = np.unique(values[np.isfinite(values) & (values >= 0)]).astype(np.float64)
    ties = ((ordered[:-1] + ordered[1:]) / 2).astype(F32)
    around = np.concatenate([ties, np.nextafter(ties, F32(0)), np.nextafter(ties, F32(np.inf))])
    ends = np.array([0.0, 1e-45, 65504, 65519.996, 65520, 65536, 3.3895314e38, 3.3961775e38, 3.4028235e38, np.inf, np.nan], F32)
    positive = np.concatenate([around, ends])
    return np.concatenate([positive, -positive])


def test_every_half_and_bfloat16_converts_exactly(library: ctypes.CDLL) -> None:
    every = np.arange(65536, dtype=np.uint16)
    (half,) = mapped(library.half_to_float, every)
    assert_bytes(half, every.view(np.float16).astype(F32), "float16")
    (brain,) = mapped(library.brain_to_float, every)
    assert_bytes(brain, to_float32(every.view(bfloat16)), "bfloat16")


def test_float32_rounds_to_nearest_even_at_every_tie(library: ctypes.CDLL) -> None:
    every = np.arange(65536, dtype=np.uint16)
    values = midpoints(every.view(np.float16).astype(F32))
    (half,) = mapped(library.float_to_half, values, dtypes=(np.uint16,))
    with np.errstate(over="ignore"):
        assert_bytes(half.view(np.float16), values.astype(np.float16), "float16")
    values = midpoints(to_float32(every.view(bfloat16)))
    (brain,) = mapped(library.float_to_brain, values, dtypes=(np.uint16,))
    assert_bytes(brain.view(bfloat16), from_float32(values, "bfloat16"), "bfloat16")


def test_a_conversion_and_back_is_the_identity(library: ctypes.CDLL) -> None:
    every = np.arange(65536, dtype=np.uint16)
    for there, back, dtype in (
        (library.half_to_float, library.float_to_half, np.dtype(np.float16)),
        (library.brain_to_float, library.float_to_brain, bfloat16),
    ):
        (wide,) = mapped(there, every)
        (again,) = mapped(back, wide, dtypes=(np.uint16,))
        assert_bytes(again.view(dtype), every.view(dtype), str(dtype))


def test_exp_is_the_text_of_the_contract(library: ctypes.CDLL) -> None:
    x = -np.arange(0, 0x42D20000, 9973, dtype=np.uint32).view(F32)
    x = np.concatenate([x, np.array([0, -0.0, -104, -104.00001, -87.3, -87.4, -103.9, -1e30, -np.inf, np.nan], F32)])
    (found,) = mapped(library.exp_all, x)
    assert_bytes(found, exp_model(x), "exp")
    assert found.max() <= 1 or np.isnan(found.max())
    normal = np.isfinite(x) & (x > -87)
    exact = np.exp(x[normal].astype(np.float64))
    ulp = np.spacing(exact.astype(F32)).astype(np.float64)
    assert (np.abs(found[normal] - exact) / ulp).max() < 1.25
    assert 0 < found[x == F32(-103.9)][0] < 1e-44, "subnormal results are kept"


def test_ln_is_the_text_of_the_contract(library: ctypes.CDLL) -> None:
    z = np.arange(0x3F800000, 0x7F800000, 99991, dtype=np.uint32).view(F32)
    (found,) = mapped(library.ln_all, z)
    assert_bytes(found, ln_model(z), "ln")
    exact = np.log(z.astype(np.float64))
    assert (np.abs(found - exact) <= 1.5 * np.spacing(np.maximum(exact, 1e-30).astype(F32))).all()
    ends = np.array([1, np.inf, np.nan], F32)
    assert_bytes(mapped(library.ln_all, ends)[0], np.array([0, np.inf, np.nan], F32), "ends")


def test_a_tile_is_summed_by_halves(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        slots = rng.standard_normal(256).astype(F32)
        work = slots.copy()
        found = library.sum_of_tile(ctypes.c_void_p(work.ctypes.data))
        assert F32(found).tobytes() == tree_model(slots).tobytes()
    sums = {F32(np.cumsum(slots, dtype=F32)[-1]), tree_model(slots)}
    assert len(sums) == 2, "a sequential sum has other bits"


@pytest.mark.parametrize("place", (0, 1, 127, 128, 255))
def test_the_maximum_of_a_tile_propagates_nan(library: ctypes.CDLL, place: int) -> None:
    slots = np.arange(256, dtype=F32)
    assert library.max_of_tile(ctypes.c_void_p(slots.copy().ctypes.data)) == 255
    slots[place] = np.nan
    assert np.isnan(library.max_of_tile(ctypes.c_void_p(slots.ctypes.data)))


def test_states_merge_left_to_right(library: ctypes.CDLL) -> None:
    inf = np.inf
    left_max, left_sum = np.array([-inf, -inf, -80, 1, 2, np.nan], F32), np.array([0, 0, 2, 1.5, 1, 1], F32)
    right_max, right_sum = np.array([-inf, -80, -inf, 3, 1, 0], F32), np.array([0, 2, 0, 1.25, 3, 1], F32)
    peak, total = mapped(library.merge_all, left_max, left_sum, right_max, right_sum, dtypes=(np.float32, np.float32))
    assert_bytes(peak, np.array([-inf, -80, -80, 3, 2, np.nan], F32), "maximum")
    expected = [F32(0), F32(2), F32(2)]
    expected.append(F32(1.5) * exp_model(np.array([-2], F32))[0] + F32(1.25) * exp_model(np.array([0], F32))[0])
    expected.append(F32(1) + F32(3) * exp_model(np.array([-1], F32))[0])
    assert_bytes(total, np.array([*expected, np.nan], F32), "sum: empty states merge to empty, and one of them is copied")


def test_log_sum_exp_of_a_row(library: ctypes.CDLL) -> None:
    assert library.lse(-np.inf, 0.0) == -np.inf
    assert F32(library.lse(0.25, 3.0)).tobytes() == (F32(0.25) + ln_model(np.array([3], F32))[0]).tobytes()


def test_a_zero_score_gradient_is_positive(library: ctypes.CDLL) -> None:
    p, dp, delta = np.array([0, 1, 0.5], F32), np.array([-1, 2, 1], F32), np.array([1, 2, 3], F32)
    assert_bytes(mapped(library.gradient_all, p, dp, delta)[0], np.array([0, 0, -1], F32), "dS")


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    (
        ((0, 0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, 0xD16CFE09),
    ),
)
def test_philox_known_answers(library: ctypes.CDLL, counter: tuple[int, ...], key: int, word: int) -> None:
    assert library.philox(key, *counter) == word


def test_a_fast_math_build_is_refused(tmp_path: Path) -> None:
    built = compile_with("-ffast-math", target=tmp_path / "fast.so")
    assert built.returncode != 0 and "fast-math build cannot keep the bits" in built.stderr


def test_ex2_is_the_text_of_sm90_v1(library: ctypes.CDLL) -> None:
    """The table below zero, the point beside it above, whole steps, and the ends."""
    table = ex2_table()
    inf, nan = np.inf, np.nan
    x = np.array([0.0, -0.0, 1e-40, -1, -126, -126.5, -inf, 127, 128, inf, nan], F32)
    expected = np.array([1, 1, 1, 0.5, 2.0**-126, 0, 0, 2.0**127, inf, inf, nan], F32)
    step = np.arange(1, 1 << 23, 40503)
    below, above = -(step / 2.0**23), np.append(step[:-1], (1 << 23) - 1) / 2.0**23
    beside = np.append(table, F32(1 - 2.0**-24))[np.append(step[:-1], (1 << 23) - 1) + 1]
    cases = (
        (x, expected),
        (below.astype(F32), table[(1 << 23) - step]),
        (above.astype(F32), beside * F32(2)),
        ((below[below > -0.5] - 2.0**-24).astype(F32), table[(1 << 23) - step[below > -0.5]]),
        ((np.floor(below * 2**10) / 2**10 - 7).astype(F32), ex2_of_multiples(table, np.floor(below * 2**10).astype(int)) * F32(2.0**-7)),
    )
    for arguments, values in cases:
        found = np.empty(arguments.shape, F32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (arguments, table, found)]
        library.ex2_all(*pointers, ctypes.c_int64(arguments.size))
        assert_bytes(found, values.astype(F32), "ex2")


def ex2_of_multiples(table: np.ndarray, n: np.ndarray) -> np.ndarray:
    """ex2 at n / 2^10 for n in [-2^10, 0)."""
    return table[(1 << 23) + n * (1 << 13)]


def test_the_step_is_the_text_of_sm90_v1(library: ctypes.CDLL) -> None:
    """Known sums: truncation of every term to one unit, a product that is not renormalised, the sum toward zero, zeros, and the ends."""
    rows = (
        # c, a, b, result
        (1.0, {0: 2.0**-24}, {0: 1.0}, 1.0),
        (1.0, {0: -(2.0**-26)}, {0: 1.0}, 1.0),  # below the unit 2^-25: lost
        (1.0, {0: -(2.0**-25)}, {0: 1.0}, 1 - 2.0**-24),
        (1.0, {0: 1.5, 1: -(2.0**-24)}, {0: 1.5, 1: 1.0}, 3.25 - 2.0**-22),  # 1.5 * 1.5 has exponent 0: unit 2^-25
        (2.0**-20, {0: 1.0, 1: -1.0}, {0: 32.0, 1: 32.0}, 2.0**-20),
        (2.0**-21, {0: 1.0, 1: -1.0}, {0: 32.0, 1: 32.0}, 0.0),
        (-0.0, {}, {}, 0.0),
        (-3.0, {}, {}, -3.0),
        (0.0, {0: 2.0**64}, {0: 2.0**64}, np.inf),
        (0.0, {0: -(2.0**127)}, {0: 1.5}, -1.5 * 2.0**127),
        (1.0, {0: np.inf}, {0: 0.0}, np.nan),
        (-np.inf, {0: np.inf}, {0: 1.0}, np.nan),
        (2.0**-149, {0: 2.0**-100}, {0: 2.0**-48}, 3 * 2.0**-149),
    )
    a, b = (np.zeros((len(rows), 16), F32) for _ in range(2))
    for index, row in enumerate(rows):
        for operand, terms in ((a, row[1]), (b, row[2])):
            for place, value in terms.items():
                operand[index, place] = value
    c, found = np.array([row[0] for row in rows], F32), np.empty(len(rows), F32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (c, a, b, found)]
    library.step_all(*pointers, ctypes.c_int64(len(rows)))
    assert_bytes(found, np.array([row[3] for row in rows], F32), "steps")


def test_logical_keys_before_a_stored_one(library: ctypes.CDLL) -> None:
    for stored in ([], [0], [3], [0, 1, 4, 9, 10], list(range(2, 40, 3))):
        positions = np.array(stored, np.int32)
        for key in range(45):
            found = library.keys_before(ctypes.c_void_p(positions.ctypes.data), len(stored), key)
            assert found == sum(position < key for position in stored), (stored, key)
    assert library.keys_before(None, 5, 3) == 3
