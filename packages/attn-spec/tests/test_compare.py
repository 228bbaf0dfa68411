"""Comparison: bytes as integers. It must notice what a tolerance or a NaN would hide."""

from __future__ import annotations

import numpy as np
import pytest
from attn_spec import bfloat16
from attn_spec._arrays import from_float32
from attn_spec._compare import difference, digest
from attn_spec._errors import ContractViolation
from attn_spec.testing.asserts import assert_bytes, assert_close, assert_same, assert_zero

NAN, INF = np.float32("nan"), np.float32("inf")


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_equal_bytes_are_equal_and_every_nan_is_one() -> None:
    payload = np.array([0x7FC00001, 0xFFC12345, 0x3F800000], np.uint32).view(np.float32)
    assert difference(payload, _f32(NAN, NAN, 1)).equal
    assert difference(_f32(INF, -INF), _f32(INF, -INF)).equal
    assert digest(payload) == digest(_f32(NAN, NAN, 1))


@pytest.mark.parametrize(
    ("left", "right"),
    (
        (_f32(0.0), _f32(-0.0)),
        (_f32(NAN), _f32(1)),
        (_f32(1), _f32(NAN)),
        (_f32(NAN), _f32(INF)),
        (_f32(INF), _f32(-INF)),
        (_f32(1), np.nextafter(_f32(1), _f32(2))),
        (_f32(1e-45), _f32(0)),
        (_f32(1, 2), _f32(1)),
        (_f32(1), np.array([1.0])),
        (from_float32(_f32(1), "bfloat16"), from_float32(_f32(1), "float16")),
    ),
    ids=range(10),
)
def test_a_difference_is_noticed(left: np.ndarray, right: np.ndarray) -> None:
    assert not difference(left, right).equal
    assert digest(left) != digest(right)
    with pytest.raises(ContractViolation):
        assert_bytes(left, right, "x")


def test_a_difference_says_where_and_how_far() -> None:
    right = np.zeros((2, 3), np.float32)
    left = right.copy()
    left[1, 2], left[1, 1] = np.float32(1e-45), np.float32(-3e-45)
    found = difference(left, right)
    assert (found.mismatched, found.max_ulp, found.first) == (2, 2, (1, 1))
    assert "2 elements differ, by up to 2 ulp; first at [1, 1]: 0x80000002 against 0x00000000" in found.text()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_distance_counts_representable_numbers(dtype: str) -> None:
    one = from_float32(_f32(1), dtype)
    bits = one["bfloat16"] if one.dtype == bfloat16 else one.view(f"u{one.dtype.itemsize}")
    far = (bits + 5).astype(bits.dtype).view(one.dtype)
    assert difference(far, one).max_ulp == 5


def test_closeness_fails_on_zeros_and_on_nan_either_way() -> None:
    expected = np.array([1.0, 2.0, -np.inf])
    assert_close(_f32(1, 2, -INF), expected, "x", tolerance=1e-6)
    for wrong in (_f32(0, 0, 0), _f32(1, NAN, -INF), _f32(1, 2, INF), _f32(1, 2.1, -INF)):
        with pytest.raises(ContractViolation, match="elements off"):
            assert_close(wrong, expected, "x", tolerance=1e-6)
    with pytest.raises(ContractViolation):
        assert_close(_f32(1), np.array([np.nan]), "x", tolerance=1.0)


def test_results_must_have_the_same_names() -> None:
    assert_same({"out": _f32(1)}, {"out": _f32(1)}, "x")
    with pytest.raises(ContractViolation, match=r"results \['out'\] against \['lse', 'out'\]"):
        assert_same({"out": _f32(1)}, {"out": _f32(1), "lse": _f32(1)}, "x")


def test_zero_means_positive_zero() -> None:
    assert_zero(_f32(0, 0), "x")
    with pytest.raises(ContractViolation):
        assert_zero(_f32(0, -0.0), "x")
