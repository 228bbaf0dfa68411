"""Launches that are remembered by the kind of their call, so that the next call of the kind fills in addresses and starts its kernels.

Triton binds, inspects and looks up every argument at every launch, and the launch functions compute most of them: for a decode step that
takes longer than its kernels. Calls of one kind have the same shapes, strides, dtypes, alignments and options; they differ in nothing but
the addresses of their tensors.

Source: a compiled kernel is started as in Triton's tutorial on fused softmax, ``kernel[grid](*arguments)``, constants included.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from attn_spec.torch import AttentionInputs
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Kinds", "Launches", "kind_of", "options_of", "tensors_of"]

_NAMES = tuple(field.name for field in fields(AttentionInputs))
tensors_of = attrgetter(*_NAMES[: _NAMES.index("causal")])
"""The tensors of a call of attention, absent ones as None."""
options_of = attrgetter(*_NAMES[_NAMES.index("causal") :])

_ALIGNMENT = 16
"""Bytes: what Triton compiles in about an address is whether they divide it."""
Grid = tuple[int, int, int]
_PLACE = 512
"""Bytes to whose multiples workspace is aligned, as torch aligns memory of its own on a GPU."""
_MOST = 4096
"""Kinds that are remembered; then all are forgotten, so that ever new shapes take no memory."""


def kind_of(tensors: Sequence[Tensor | None], *options: Hashable) -> Hashable:
    """All that launches depend on but addresses; ``tensors`` are on one device, the first one is present.

    Which of them lie at the same address is part of it.
    """
    kind, addresses = [*options], []
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            kind += (tensor.shape, tensor.stride(), tensor.dtype, address % _ALIGNMENT, addresses.index(address))
    assert tensors[0] is not None
    return (*kind, tensors[0].device)


@dataclass(frozen=True)
class _Place:
    """An argument that changes: where it is, and the number of the tensor that it is, or its members if it is a tuple."""

    index: int
    tensor: int = -1
    descriptor: dict[str, Any] | None = None
    members: _Arguments | None = None


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a launch with the places that differ from call to call."""

    fixed: tuple[Any, ...]
    places: tuple[_Place, ...]

    def filled(self, tensors: Sequence[Tensor | None], addresses: Sequence[int]) -> list[Any]:
        found = list(self.fixed)
        for place in self.places:
            if place.members is not None:
                found[place.index] = tuple(place.members.filled(tensors, addresses))
            elif place.descriptor is not None:
                # without the checks of the constructor, which the first call of the kind passed
                descriptor = object.__new__(TensorDescriptor)
                vars(descriptor).update(place.descriptor, base=tensors[place.tensor])
                found[place.index] = descriptor
            else:
                found[place.index] = addresses[place.tensor]
        return found


class Launches:
    """Starts kernels as Triton does, and keeps how.

    Args:
        tensors: all those of the call that a kernel may be given; without any, or where they are not on a GPU, nothing is kept.
        config: how the kernels are configured.
    """

    def __init__(self, tensors: Sequence[Tensor | None] = (), config: Any = None) -> None:
        addresses = [tensor.data_ptr() if tensor is not None and tensor.is_cuda else 0 for tensor in tensors]
        self.config = config
        self._numbers = {address: number for number, address in enumerate(addresses) if address}
        self._given = len(addresses)
        self._offsets: list[int] = []
        self._bytes = 0
        self._held: list[Tensor] = []
        self._steps: list[tuple[Any, Grid, _Arguments]] = []
        self.complete = bool(self._numbers)
        """Whether ``again`` does all of the call: no kernel was given a tensor that is none of ``tensors`` and no workspace."""

    def workspace(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for ``size`` elements that only the kernels of one call see; ``again`` takes as much anew."""
        found = torch.empty(size, dtype=dtype, device=device)
        if self.complete and size:
            self._numbers[found.data_ptr()] = self._given + len(self._offsets)
            self._offsets.append(self._bytes)
            self._bytes += -(-found.nbytes // _PLACE) * _PLACE
            self._held.append(found)  # until the call ends, so that its address is no other tensor's
        return found

    def __call__(self, kernel: Any, programs: int | tuple[int, int], *arguments: Any, **options: Any) -> None:
        """``kernel[(programs,)](*arguments, **options)``, or with a grid of two axes."""
        first, second = programs if isinstance(programs, tuple) else (programs, 1)
        compiled = kernel[first, second](*arguments, **options)
        if compiled is None:  # an interpreted kernel
            self.complete = False
        if self.complete:
            constants = (options[name] for name in kernel.arg_names[len(arguments) :])
            self._steps.append((compiled, (first, second, 1), self._template((*arguments, *constants))))

    def end(self) -> None:
        """The call is over: its memory is let go, and no kernel is started any more but by ``again``."""
        self._held.clear()
        self._numbers.clear()

    def again(self, tensors: Sequence[Tensor | None]) -> None:
        """The same launches for other tensors of the same kind, in the order of the first ones, with absent ones where those were."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._bytes:
            assert tensors[0] is not None
            workspace = torch.empty(self._bytes, dtype=torch.uint8, device=tensors[0].device)
            first = workspace.data_ptr()
            addresses += [first + offset for offset in self._offsets]
        for compiled, grid, arguments in self._steps:
            compiled[grid](*arguments.filled(tensors, addresses))

    def _template(self, arguments: tuple[Any, ...]) -> _Arguments:
        fixed, places = list(arguments), []
        for index, argument in enumerate(arguments):
            place = None
            if isinstance(argument, Tensor):
                place = _Place(index, self._number(argument))
            elif isinstance(argument, TensorDescriptor):
                members = {name: value for name, value in vars(argument).items() if name != "base"}
                place = _Place(index, self._number(argument.base), members)
            elif isinstance(argument, tuple):
                place = _Place(index, members=self._template(argument))
            if place is not None:
                fixed[index] = None
                places.append(place)
        return _Arguments(tuple(fixed), tuple(places))

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(tensor.data_ptr(), -1)
        self.complete = self.complete and number >= 0
        return number


class Kinds:
    """Launches of the kinds of calls so far."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Launches] = {}

    def get(self, kind: Hashable, config: Any) -> Launches | None:
        """Those of a call of the kind that had the same object as configuration."""
        launches = self._launches.get(kind)
        return launches if launches is not None and launches.config is config else None

    def keep(self, kind: Hashable, launches: Launches) -> None:
        """``launches``, which have ended, are those of all calls of the kind, if they are complete."""
        launches.end()
        if launches.complete:
            if len(self._launches) >= _MOST:
                self._launches.clear()
            self._launches[kind] = launches
