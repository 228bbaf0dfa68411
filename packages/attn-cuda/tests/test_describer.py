"""Describers: which values are of one kind, read in Python and in compiled code; and the layout of results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attn_cuda._arrays import allocator
from attn_cuda._describer import describer
from attn_spec.torch._remembered import python_describer
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64)


def test_both_describers_tell_the_same_calls_apart() -> None:
    """Of each pair of calls both say alike whether they are of one kind, and give the same addresses."""
    tensors = [torch.empty(2, 1, 6), torch.empty(12)[::2], torch.empty(0, 3), torch.tensor(1.0), torch.ones(2, 2, dtype=torch.bool)]
    tensors += [torch.empty(6, dtype=dtype) for dtype in _DTYPES]
    tensors += [
        torch.empty(7)[1:],
        torch.empty(3, 2),
        torch.empty(2, 3).t(),
        torch.empty(1, 3).expand(2, 3),
        torch.nn.Parameter(torch.empty(6)),
    ]
    plain: list[Any] = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**62,
        0.0,
        -0.0,
        1.0,
        "",
        "ordered-v1",
        (1, 0),
        (1, 0.0),
        (1, -0.0),
        (True, 0),
        (None, 0),
    ]
    plain += [(), torch.float16, torch.float32]
    values = [
        *((value,) for value in (*tensors, *plain)),
        (tensors[0], 1),
        (1, tensors[0]),
        (tensors[0], tensors[0]),
        ("ab", "c"),
        ("a", "bc"),
    ]
    in_python, compiled = python_describer(), describer()
    kinds: list[list[Any]] = [[], []]
    for value in values:
        for found, one in zip(kinds, (in_python, compiled), strict=True):
            described = one.values(value)
            assert described is not None
            assert described[1] == [tensor.data_ptr() for tensor in value if isinstance(tensor, Tensor)]
            found.append(described[0])
    for first in range(len(values)):
        for second in range(len(values)):
            assert (kinds[0][first] == kinds[0][second]) == (kinds[1][first] == kinds[1][second]), (values[first], values[second])
    assert len(set(kinds[0])) == len(set(kinds[1])) == len(values) - 1  # a parameter is of the kind of the float32 tensor of its shape


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_both_describers_leave_the_same_values_alone() -> None:
    class Tagged(Tensor):
        pass

    class Whole(int):
        pass

    one = torch.ones(2, 2)
    values = [one.as_subclass(Tagged), torch._neg_view(one), one.to_sparse(), one.to_sparse_csr(), one.to_mkldnn(), Whole(1), [1]]
    values += [torch.nested.nested_tensor([one[0], one[0, :1]]), {"a": 1}, b"", object(), (1, (2, 3)), (1, one)]
    for value in values:
        assert python_describer().values((value,)) is None, value
        assert describer().values((value,)) is None, value
    assert describer().values((2**70,)) != describer().values((2**71,)) or describer().values((2**70,)) is None
    for error in ((), (one, one)):
        with pytest.raises(TypeError):
            describer().values(*error)
    with pytest.raises(TypeError):
        describer().values([one])  # type: ignore[arg-type]
    refused = describer().call("attention", None, (one,), {"contract": "\ud800"})
    assert refused is None or describer() == python_describer()


def test_results_are_laid_out_as_torch_lays_out_new_tensors() -> None:
    for shape in itertools.product((0, 1, 2, 5), repeat=4):
        for few in (shape, shape[1:], shape[3:], ()):
            found = allocator(few, torch.float16, torch.device("cpu"))()
            assert (found.shape, found.stride(), found.dtype) == (few, torch.empty(few).stride(), torch.float16)
            assert found.untyped_storage().nbytes() == 2 * found.numel()
