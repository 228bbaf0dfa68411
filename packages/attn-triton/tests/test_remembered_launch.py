"""Remembered launches give kernels what Triton's own launch of the same call gives them, and only to calls of the same kind."""

from typing import NamedTuple

import pytest
import torch
from attn_triton import _remembered_launch
from attn_triton._remembered_launch import Kinds, Launches, kind_of
from triton.tools.tensor_descriptor import TensorDescriptor

NAMES = ("arrays", "tiles", "count", "out", "WIDTH", "FLAG")


class Arrays(NamedTuple):
    q: torch.Tensor
    row: int
    mask: torch.Tensor | None


class Kernel:
    """A kernel and its compiled form that note the grid and, as names or plain values, the arguments of every launch."""

    arg_names = NAMES

    def __init__(self, compiles=True):
        self.compiles, self.launches = compiles, []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            constants = (options[name] for name in NAMES[len(arguments) :] if name in options)
            self.launches.append((tuple(grid) + (1,) * (3 - len(grid)), flat((*arguments, *constants))))
            return self if self.compiles else None

        return launch


def flat(value):
    if isinstance(value, tuple):
        return tuple(map(flat, value))
    if isinstance(value, TensorDescriptor):
        return flat(value.base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape), value.padding
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Remote(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def tensors(rows=3, width=16):
    return tuple(torch.zeros(rows, width).as_subclass(Remote) for _ in range(3))


def call(launch, kernel, q, k, out):
    tiles = TensorDescriptor(k, list(k.shape), list(k.stride()), [1, 16])
    launch(kernel, 7, Arrays(q, q.stride(0), None), tiles, 5, out, WIDTH=16, FLAG=True, num_warps=4)


def test_the_second_call_gives_the_same_but_for_addresses():
    kernel, first, second = Kernel(), tensors(), tensors()
    launches = Launches(first)
    call(launches, kernel, *first)
    assert launches.complete
    launches.again(second)
    again = kernel.launches[-1]
    call(Launches(), kernel, *second)
    assert again == kernel.launches[-1] and len(kernel.launches) == 3
    assert again != kernel.launches[0]


def test_one_tensor_may_be_two_arguments():
    kernel = Kernel()
    (q, _, out), (other, _, result) = tensors(), tensors()
    launches = Launches((q, q, out))
    call(launches, kernel, q, q, out)
    launches.again((other, other, result))
    again = kernel.launches[-1]
    call(Launches(), kernel, other, other, result)
    assert launches.complete and again == kernel.launches[-1]


def test_workspace_is_taken_anew():
    def work(launches, q, k, out):
        first, second = (launches.workspace(8, torch.float32, torch.device("cpu")) for _ in range(2))
        launches(kernel, (7, 2), Arrays(q, 5, first), second, 5, out, WIDTH=16, FLAG=first is None, num_warps=4)
        launches(kernel, 3, Arrays(q, 5, second), first, 5, out, WIDTH=16, FLAG=True, num_warps=4)
        return first, second

    kernel, (q, k, out), (other, _, result) = Kernel(), tensors(), tensors()
    launches = Launches((q, k, out))
    held = [tensor.data_ptr() for tensor in work(launches, q, k, out)]
    first = kernel.launches[-2:]
    assert launches.complete
    Kinds().keep("kind", launches)
    launches.again((other, k, result))
    places = {q.data_ptr(): other.data_ptr(), out.data_ptr(): result.data_ptr()}
    places |= dict(zip(held, (kernel.launches[-2][1][0][2], kernel.launches[-2][1][1]), strict=True))
    assert len(set(places.values())) == len(places) == 4
    assert kernel.launches[-2:] == [(grid, renamed(arguments, places)) for grid, arguments in first]


def renamed(value, places):
    return tuple(renamed(member, places) for member in value) if isinstance(value, tuple) else places.get(value, value)


def test_the_address_of_a_workspace_is_no_other_tensors():
    """One that its user lets go, and then memory of the same size that is none of the call's."""
    q, k, out = tensors()
    launches = Launches((q, k, out))
    launches.workspace(1 << 20, torch.float32, torch.device("cpu"))
    call(launches, Kernel(), q, k, out)
    assert launches.complete
    launches(Kernel(), 7, torch.empty(1 << 20), num_warps=4, **dict.fromkeys(NAMES[1:]))
    assert not launches.complete


def test_tensors_of_the_first_call_are_let_go():
    first = tensors()
    launches = Launches(first)
    call(launches, Kernel(), *first)
    held = {id(tensor) for tensor in first}
    assert not any(id(value) in held for *_, arguments in launches._steps for value in arguments.fixed)
    assert not any("base" in (place.descriptor or {}) for *_, arguments in launches._steps for place in arguments.places)


@pytest.mark.parametrize("case", ("a copy", "an interpreted kernel", "no tensors", "no GPU"))
def test_other_launches_are_not_kept(case):
    q, k, out = tensors()
    known = {"a copy": (q, k.clone(), out), "no tensors": ()}.get(case, (q, k, out))
    if case == "no GPU":
        known = [tensor.as_subclass(torch.Tensor) for tensor in known]
    launches, kinds = Launches(known), Kinds()
    call(launches, Kernel(compiles=case != "an interpreted kernel"), q, k, out)
    kinds.keep("kind", launches)
    assert not launches.complete and kinds.get("kind", None) is None


def test_kinds_are_told_apart():
    base = torch.zeros(65)
    q, k, _ = tensors()
    kinds = [
        kind_of((q, k)),
        kind_of((q, None)),
        kind_of((q, q)),
        kind_of((q, k), True),
        kind_of((q, k), False),
        kind_of((q.bfloat16(), k)),
        kind_of((q, torch.zeros(16, 3).T)),
        kind_of((q, torch.zeros(4, 16))),
        kind_of((q, base[1:49].view(3, 16))),
        kind_of((q.to("meta"), k.to("meta"))),
    ]
    assert len(set(kinds)) == len(kinds)
    assert kind_of(tensors()[:2]) == kind_of((q, base[:48].view(3, 16))) == kinds[0]


def test_another_configuration_is_another_kind():
    launches, kinds = Launches(tensors(), first := object()), Kinds()
    kinds.keep("kind", launches)
    assert kinds.get("kind", first) is launches and kinds.get("kind", object()) is None and kinds.get("other", first) is None


def test_ever_new_kinds_take_no_memory(monkeypatch):
    monkeypatch.setattr(_remembered_launch, "_MOST", 3)
    kinds = Kinds()
    for kind in range(8):
        kinds.keep(kind, Launches(tensors()))
        assert kinds.get(kind, None) is not None
    assert sum(kinds.get(kind, None) is not None for kind in range(8)) <= 3
