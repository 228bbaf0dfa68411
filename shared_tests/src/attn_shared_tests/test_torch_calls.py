"""The public torch functions as objects and as calls: copies, pickles, the two ways to a kernel, and checks that are never skipped."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from attn_spec import Call, get_op
from attn_spec.testing.runner import Runner

from attn_shared_tests.torch_calls import EVERY, Data, Operator, outputs_of, same, same_results, tensors, torch_device, with_torch

pytestmark = pytest.mark.attn_framework("torch")


def check_both_ways(function: Operator, device: str, call: Call) -> None:
    """A call that a mode watches goes through torch's dispatcher, another one does not; bytes and graphs agree."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    plain = Data(call, device).results(function)
    assert not seen
    with Watching():
        watched = Data(call, device).results(function)
    assert any("_backward" in name for name in seen) and any("_backward" not in name and "aten" not in name for name in seen), seen
    same_results(watched, plain, "under a dispatch mode")

    class Sub(torch.Tensor):
        pass

    data = Data(call, device)
    data.inputs = {name: tensor.detach().as_subclass(Sub).requires_grad_(name in call.wrt) for name, tensor in data.inputs.items()}
    same_results(data.results(function), plain, "tensors of a subclass")


def check_negated_view(softmax: Operator, device: str) -> None:
    """A view that torch negates lazily is read with its sign."""
    import torch

    values = torch.randn(3, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).to(device)
    view = values.conj().imag
    assert view.is_neg()
    same(softmax(view), softmax(view.clone().resolve_neg()), "negated view")


def check_no_check_is_skipped(attention: Operator, device: str) -> None:
    """After a good call of the same shapes, an option that equals a good one and is of another kind is still refused."""
    q, k, v = tensors(device, requires_grad=False)
    start = q.new_zeros(2).long()
    good: dict[str, Any] = {"causal": True, "window": (1, 1), "q_start": -1, "k_start": start, "dropout_p": 0.0}
    attention(q, k, v, **good)
    for change, error in (
        ({"causal": 1}, TypeError),
        ({"window": (True, 1)}, TypeError),
        ({"window": [1, -1]}, ValueError),
        ({"q_start": True}, TypeError),
        ({"q_start": start, "k_start": -1}, ValueError),
        ({"return_lse": 0}, TypeError),
        ({"dropout_p": -0.5}, ValueError),
        ({"dropout_seed": -1}, ValueError),
        ({"scale": float("nan")}, ValueError),
        ({"contract": "ordered-v0"}, LookupError),
        ({"contract": ["ordered-v1"]}, LookupError),
        ({"sinks": q.new_zeros(3)}, ValueError),
        ({"bias": q.new_zeros(2, 4, 6, 5)}, ValueError),
        ({"key_padding_mask": q.new_ones(2, 6)}, TypeError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                attention(q, k, v, **{**good, **change})
    for bad in (q[:, :3], q.double(), q.to_sparse(), q[0], "q"):
        with pytest.raises((TypeError, ValueError)):
            attention(bad, k, v, **good)


@pytest.mark.parametrize("name", EVERY)
def test_both_ways_to_a_kernel_agree(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], check_both_ways, EVERY[name])


def test_a_lazily_negated_view_is_read_with_its_sign(backend: Runner) -> None:
    with_torch(backend, EVERY["softmax"], check_negated_view)


def test_a_good_call_does_not_excuse_the_next(backend: Runner) -> None:
    with_torch(backend, EVERY["attention"], check_no_check_is_skipped)


def test_remembered_kinds_of_calls_are_bounded() -> None:
    """Ever new lengths, as in decode, take no more memory; each kind is checked until it is accepted, and then not again."""
    import torch
    from attn_reference.backend import BACKEND
    from attn_spec.torch import _acceptance

    asked = []

    class Asked(type(BACKEND)):  # type: ignore[misc]
        def reasons(self, problem: Any, engine: str | None = None) -> tuple[str, ...]:
            asked.append(problem.keys)
            return ()

    accept = _acceptance.Acceptance(Asked(), "pytorch")
    rows = torch.zeros(1, _acceptance._KINDS + 10)
    for keys in (*range(1, rows.shape[1]), 7, rows.shape[1] - 1):
        accept("joint_attn_softmax", {"scores": rows[:, :keys], "key_padding_mask": None}, {}, None, rows)
        assert len(accept._accepted) <= _acceptance._KINDS
    assert asked == [*range(1, rows.shape[1]), 7]


def test_operators_are_copied_and_pickled(backend: Runner) -> None:
    """A copy of a function, of its float32 twin and of an op is the function of the installed backend."""
    functions = backend.backend.operators(backend.engine)
    package = importlib.import_module(backend.backend.name)
    public = {f"{backend.backend.name}.{name}": getattr(package, name) for name in functions if hasattr(package, name)}
    copies: tuple[Callable[[Any], Any], ...] = (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)))
    for name, function in {**functions, **public}.items():
        for again in copies:
            assert again(function) == function, name
    call = EVERY["softmax"]
    op = get_op(call.op, device=backend.device, backend=f"{backend.backend.name}:{backend.engine}")
    inputs = Data(call, torch_device(backend)).inputs
    wanted = outputs_of(op, call, inputs)["probs"]
    for again in copies:
        found = again(op)
        assert found.trace == op.trace
        same(outputs_of(found, call, inputs)["probs"], wanted, "probs of a copy")
