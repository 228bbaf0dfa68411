"""The short way of an operation to its kernel gives what the dispatcher gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_spec.torch._operation import Operation
from torch import Tensor

NAMESPACE = "attn_test_operation"


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x / 4


def first_alone(arguments: tuple[Any, ...], wanted: int) -> tuple[Tensor]:
    assert wanted == 1
    return (arguments[0] / 2,)


def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is kept."""


def gradient(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
    return first / 2 + second / 4


def rule(operator: Any) -> Any:
    def mapped(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Any, Any]:
        return operator(x.movedim(in_dims[0], 0)), (0, 0)  # type: ignore[arg-type]

    return mapped


@pytest.fixture(scope="module")
def operation() -> Iterator[Operation]:
    """x -> x / 2, x / 4, with a way to x / 2 alone."""
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define("parts(Tensor x) -> (Tensor, Tensor)")
    library.impl("parts", parts, "CompositeExplicitAutograd")
    yield Operation(getattr(torch.ops, NAMESPACE).parts.default, parts, 1, (setup, gradient), rule, first_alone)
    library._destroy()


@pytest.mark.parametrize(("wanted", "results"), ((0, 2), (1, 1)))
def test_only_a_caller_that_wants_no_more_gets_the_first_results_alone(operation: Operation, wanted: int, results: int) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert len(operation(x, wanted=wanted)) == results
    assert torch.equal(operation(x, wanted=wanted)[0], x / 2)


@pytest.mark.parametrize("wanted", (0, 1))
@pytest.mark.parametrize("axis", (0, 1))
def test_the_rule_of_a_map_gets_every_result(operation: Operation, wanted: int, axis: int) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    found = torch.vmap(lambda row: operation(row, wanted=wanted)[0], in_dims=axis)(x)
    assert torch.equal(found, (x / 2).movedim(axis, 0))
    grads = torch.vmap(torch.func.grad(lambda row: operation(row, wanted=wanted)[0].sum()), in_dims=axis)(x)
    assert torch.equal(grads, torch.full_like(grads, 0.5))
