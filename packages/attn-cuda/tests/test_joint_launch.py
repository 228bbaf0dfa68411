"""What the copies of joint attention's rows are given: tensors that can be read eight halves at a time, by their own addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_cuda import _joint_launch
from attn_cuda._joint_launch import JointKernels
from torch import Tensor

SHAPE = (2, 3, 5, 64)


def layouts() -> dict[str, tuple[Tensor, bool]]:
    """Tensors, and whether they must be copied first."""
    plain = torch.randn(SHAPE).to(torch.bfloat16)
    return {
        "plain": (plain, False),
        "heads side by side": (plain.transpose(1, 2).contiguous().transpose(1, 2), False),
        "one head for all": (plain[:, :1].expand(SHAPE), False),
        "no rows": (plain[:, :, :0], False),
        "columns apart": (plain.mT.contiguous().mT, True),
        "one value for all": (plain[:1, :1, :1, :1].expand(SHAPE), True),
        "begins at an odd half": (torch.zeros(plain.numel() + 1, dtype=plain.dtype)[1:].view(SHAPE).copy_(plain), True),
        "rows of 65 halves": (torch.zeros(2, 3, 5, 65, dtype=plain.dtype)[..., :64].copy_(plain), True),
    }


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("operation", ("join_rows", "part_rows"))
def test_kernels_read_eight_halves_at_a_time(name: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, copied = layouts()[name]
    calls: dict[str, tuple[Any, ...]] = {}
    names = ("join_rows", "part_rows")
    module = SimpleNamespace(**{known: lambda *values, known=known: calls.update({known: values}) for known in names})
    monkeypatch.setattr(_joint_launch, "module_for", lambda *tensors: module)
    monkeypatch.setattr(_joint_launch, "place", lambda tensor: (0, 7))
    monkeypatch.setattr(_joint_launch, "dtype_codes", lambda module: {torch.bfloat16: 1})
    places = torch.zeros(2, 2, 5 if operation == "join_rows" else 0, dtype=torch.int32)
    if operation == "join_rows":
        joined = JointKernels().join_rows(given, torch.zeros(2, 3, 4, 64, dtype=given.dtype), places, 16)
        assert joined.shape == (2, 3, 20, 64) and joined.is_contiguous()
    else:
        text, image = JointKernels().part_rows(given, places, 0)
        assert text.shape == (2, 3, 0, 64) and image.shape == given.shape and image.is_contiguous()
    device, stream, (*arrays, _, slots, rows) = calls[operation]
    assert (device, stream) == (0, 7) and (slots, rows) == (places[0].data_ptr(), places[1].data_ptr())
    address, _, shape, strides = arrays[0 if operation == "join_rows" else 2]
    assert shape == given.shape and strides[3] == 1 and address % 16 == 0
    assert not any(stride % 8 for stride in strides[:3])
    if operation == "join_rows":
        assert copied != (address == given.data_ptr())
