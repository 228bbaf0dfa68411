"""Eager calls like an earlier one, straight to a launch that was prepared then.

Checks, defaults and the layers between a public function and its kernel take longer than a small kernel runs. For a call on plain tensors
all of them depend on its kind alone: the names of its arguments, shapes, strides, dtypes, devices and alignment of its tensors, which of
them need a gradient, and its plain options. So an engine may prepare a kind once (``Kernels.prepare``); later calls of that kind run what
was prepared, with their own addresses, or for a gradient the recorded operation with their own tensors. The results are those of the long
way: the engine makes both of one launch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_spec.torch._operation import PLAIN, WATCHERS, Operation

if TYPE_CHECKING:
    from attn_spec.torch._public import Operators

__all__ = ["SPOILERS", "Describer", "Launches", "Remembered", "python_describer", "remembered"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Launch = Callable[[Any], Any]
"""A prepared call, to fresh results from the addresses of its tensors, in order; one that needs a gradient, from its values."""
Described = tuple[Hashable, list[int] | None] | None
"""A kind of calls, equal for those alone that one launch serves, and the addresses of one call's tensors; None for addresses where the call
needs a gradient."""

_KINDS = 4096
"""Kinds of calls that are remembered; then all are forgotten, so that ever new shapes take no memory."""
_ALIGNMENT = 16
"""Bytes of the widest access of a kernel; an address counts by its place within them."""
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})
SPOILERS: tuple[Callable[[], object], ...] = (*WATCHERS, torch._C._is_any_autocast_enabled)
"""While one of them answers true, every call goes the long way."""


class Describer(NamedTuple):
    """What a launch depends on, and the addresses of a call's tensors in order; None for a call that always goes the long way: one with
    something that is neither a plain dense tensor nor a plain value."""

    call: Callable[[str, torch.dtype | None, tuple[Any, ...], dict[str, Any]], Described]
    """From the name of a public function, the dtype of its result, arguments and keywords; None also while one of ``SPOILERS`` answers
    true."""
    values: Callable[[tuple[Any, ...]], Described]
    """From the values of an engine's own call."""


def python_describer() -> Describer:
    """A describer that takes nothing but torch."""
    return Describer(_describe_call, lambda values: _described(values, [], recorded=False))


def _describe_call(name: str, out_dtype: torch.dtype | None, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Described:
    if any(map(operator.call, SPOILERS)):
        return None
    kind: list[Any] = [name, out_dtype, len(arguments), *keywords]
    return _described((*arguments, *keywords.values()), kind, torch.is_grad_enabled())


class Remembered:
    """The prepared kinds of calls of one engine; None stands for a kind that the engine does not prepare.

    ``describer`` makes what describes the calls, when the first one is described.
    """

    def __init__(self, prepare: Callable[..., Any], describer: Callable[[], Describer] = python_describer) -> None:
        self.prepare = prepare
        self.launches: dict[Any, Launch | None] = {}
        self._describer = describer

    @cached_property
    def describe(self) -> Describer:
        return self._describer()

    def add(self, kind: Any, launch: Launch | None) -> None:
        if len(self.launches) >= _KINDS:
            self.launches.clear()
        self.launches[kind] = launch


class Launches:
    """Runs the launch that ``prepare`` makes of plain values and tensors; one is made for each kind of them.

    For an engine's own calls, which also those reach that come through autograd or torch's dispatcher.
    """

    def __init__(self, prepare: Callable[..., Launch], describer: Callable[[], Describer] = python_describer) -> None:
        self._remembered = Remembered(prepare, describer)

    def __call__(self, *values: Any) -> Any:
        remembered = self._remembered
        described = remembered.describe.values(values)
        if described is None:
            return remembered.prepare(*values)([value.data_ptr() for value in values if isinstance(value, Tensor)])
        kind, addresses = described
        launch = remembered.launches.get(kind)
        if launch is None:
            launch = cast("Launch", remembered.prepare(*values))
            remembered.add(kind, launch)
        return launch(addresses)


def remembered(
    function: Callable[Concatenate[Operators, Parameters], Result],
) -> Callable[Concatenate[Operators, Parameters], Result]:
    """``function`` of Operators with the short way in front of it."""
    name = function.__name__

    @wraps(function)
    def call(self: Operators, /, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        kinds = self._remembered
        if kinds is None or torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return function(self, *arguments, **keywords)
        described = kinds.describe.call(name, self._out_dtype, arguments, keywords)
        if described is None:
            return function(self, *arguments, **keywords)
        kind, addresses = described
        launch = kinds.launches.get(kind)
        if launch is not None:
            found: Result = launch((*arguments, *keywords.values()) if addresses is None else addresses)
            return found
        found = function(self, *arguments, **keywords)
        if kind not in kinds.launches:
            kinds.add(kind, _prepare(self, kinds, function, arguments, keywords, addresses is None))
        return found

    return call


def _described(values: tuple[Any, ...], kind: list[Any], recorded: bool) -> Described:
    """``kind`` and what ``values`` add to it; where calls are ``recorded``, also which tensors need a gradient. Types are part of a kind,
    since True equals 1, and zeros are texts, since 0.0 equals -0.0."""
    addresses: list[int] = []
    needs = False
    try:
        for value in values:
            what = type(value)
            if what in PLAIN:
                if value.is_neg():
                    return None
                address, gradient = value.data_ptr(), recorded and value.requires_grad
                addresses.append(address)
                needs = needs or gradient
                kind += (value.shape, value.stride(), value.dtype, value.device, address % _ALIGNMENT, gradient)
            elif what in _VALUES:
                kind += (what, value or str(value))
            elif what is tuple and _VALUES.issuperset(map(type, value)):
                kind += (what, *((type(member), member or str(member)) for member in value), what)
            else:
                return None
    except RuntimeError:  # sparse and nested tensors have no address or no strides
        return None
    return tuple(kind), None if needs else addresses


class _Noted:
    """Stands for an operation and notes its arguments. What it returns stands for the results."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], int]]) -> None:
        self._name, self._calls = name, calls

    def __call__(self, *arguments: Any, wanted: int = 0) -> tuple[None, None]:
        self._calls.append((self._name, arguments, wanted))
        return None, None


def _prepare(
    operators: Operators,
    kinds: Remembered,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    recorded: bool,
) -> Launch | None:
    """The launch of an accepted call, or None: the engine prepares none, or the operation takes other tensors than the caller's own.

    The call is made again with operations that only note their arguments, and with a tensor object of its own for every argument, so that
    one that is given twice is told apart.
    """
    own = [value.detach() if isinstance(value, Tensor) else value for value in (*arguments, *keywords.values())]
    calls: list[tuple[str, tuple[Any, ...], int]] = []
    noting: Any = object.__new__(type(operators))
    vars(noting).update(vars(operators), _operations={name: _Noted(name, calls) for name in operators._operations})
    function(noting, *own[: len(arguments)], **dict(zip(keywords, own[len(arguments) :], strict=True)))
    ((name, taken, wanted),) = calls
    given = own if recorded else [value for value in own if isinstance(value, Tensor)]
    places = {index: _place(value, given) for index, value in enumerate(taken) if isinstance(value, Tensor)}
    if None in places.values():
        return None
    order = cast("list[int]", list(places.values()))
    if recorded:
        return _recorded(operators._operations[name], taken, dict(zip(places, order, strict=True)), wanted)
    launch: Launch | None = kinds.prepare(name, taken, wanted)
    if launch is None or order == list(range(len(given))):
        return launch
    return lambda addresses: launch([addresses[place] for place in order])


def _recorded(operation: Operation, taken: tuple[Any, ...], places: dict[int, int], wanted: int) -> Launch:
    """The recorded operation with the arguments ``taken``, but those tensors of the caller's values that ``places`` names."""
    fixed = [None if index in places else value for index, value in enumerate(taken)]
    pairs = list(places.items())

    def record(values: tuple[Any, ...]) -> Any:
        filled = fixed.copy()
        for index, place in pairs:
            filled[index] = values[place]
        found = operation.record(*filled)
        return found if wanted == 0 else found[0] if wanted == 1 else tuple(found[:wanted])

    return record


def _place(value: Tensor, given: list[Any]) -> int | None:
    return next((place for place, other in enumerate(given) if other is value), None)
