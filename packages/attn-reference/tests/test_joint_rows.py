"""Joint attention of sm90-v1 with an engine's own copies of rows: the bytes of torch's operators, and who must not meet them."""

from __future__ import annotations

from typing import Any

import attn_reference
import pytest
import torch
from attn_reference.host import FUNCTIONS
from attn_spec.torch import Operators
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

CONTRACT = "sm90-v1"
MASK = torch.tensor([[True, False] * 4 + [True], [False] * 9, [True] * 9])


class Rows:
    """Copies one row after the other; ``calls`` are the names of those made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def joint_places(self, prompt_mask: Tensor, first: int, image: int) -> tuple[Tensor, Tensor]:
        self.calls.append("places")
        kept = torch.ones(prompt_mask.shape[0], first + image, dtype=torch.bool)
        for item, mask in enumerate(prompt_mask):
            kept[item, int(mask.sum()) : first] = False
        return prompt_mask, kept

    def join_rows(self, text: Tensor, image: Tensor, places: Tensor, first: int) -> Tensor:
        self.calls.append("join")
        joined = text.new_zeros(*text.shape[:2], first + image.shape[2], text.shape[3])
        for item, mask in enumerate(places):
            joined[item, :, : int(mask.sum())] = text[item, :, mask]
        joined[:, :, first:] = image
        return joined

    def part_rows(self, joined: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        self.calls.append("part")
        text = joined.new_zeros(*joined.shape[:2], places.shape[1], joined.shape[3])
        for item, mask in enumerate(places):
            text[item, :, mask] = joined[item, :, : int(mask.sum())]
        return text, joined[:, :, first:].clone()


def over(kernels: Any) -> Operators:
    """The operators of the host kernels with ``kernels`` for the rows."""
    found: Any = object.__new__(Operators)
    known: Any = FUNCTIONS["joint_attention"]
    vars(found).update(vars(known.__self__), _kernels=kernels)
    operators: Operators = found
    return operators


def results(function: Any, mask: Tensor | None) -> list[Tensor]:
    """Both results and the gradients of the six tensors; rows that the mask drops hold NaN, of the cotangents too."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, heads, rows, 64) for rows in (9, 20) for heads in (2, 1, 1)]
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    cotangents = [torch.randn(3, 2, rows, 64, generator=generator).to(torch.bfloat16) for rows in (9, 20)]
    if mask is not None:
        tensors[:3], cotangents[:1] = (
            [torch.where(mask[:, None, :, None], tensor, torch.nan) for tensor in some] for some in (tensors[:3], cotangents[:1])
        )
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = function(*leaves, prompt_mask=mask, contract=CONTRACT)
    return [*(tensor.detach() for tensor in out), *torch.autograd.grad(out, leaves, cotangents)]


def test_an_engine_may_copy_the_rows() -> None:
    rows = Rows()
    found, wanted = results(over(rows).joint_attention, MASK), results(attn_reference.joint_attention, MASK)
    assert rows.calls == ["places", "join", "join", "join", "part", *rows.calls[5:]]
    assert sorted(rows.calls[5:]) == ["join", "part", "part", "part"]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
        assert not one.isnan().any()
    assert wanted[1].count_nonzero() and not wanted[0][1].any()


def test_copies_are_for_masks_that_nothing_watches() -> None:
    rows = Rows()
    results(over(rows).joint_attention, None)
    with BaseTorchFunctionMode():
        results(over(rows).joint_attention, MASK)
    results(torch.compile(over(rows).joint_attention, fullgraph=True, backend="eager"), MASK)
    assert rows.calls == []


def test_lost_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: text that is not moved to its slots has other bytes."""
    rows = Rows()
    monkeypatch.setattr(rows, "join_rows", lambda text, image, places, first: Rows().join_rows(text, image, torch.ones_like(places), first))
    found, wanted = results(over(rows).joint_attention, MASK), results(attn_reference.joint_attention, MASK)
    assert not torch.equal(found[1].view(torch.int16), wanted[1].view(torch.int16))
