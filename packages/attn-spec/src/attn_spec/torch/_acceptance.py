"""The checks in front of every call: arguments first (TypeError, ValueError), then the backend's capabilities (UnsupportedProblem)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_spec._errors import UnsupportedProblem
from attn_spec._registry import runners
from attn_spec._validation import describe
from attn_spec.torch._arguments import check_one_device, refuse_forward_mode
from attn_spec.torch._arrays import info
from attn_spec.torch._operation import PLAIN

if TYPE_CHECKING:
    from attn_spec.torch._backend import TorchBackend

__all__ = ["Acceptance"]

_KINDS = 4096
"""Kinds of calls that are remembered; then all are forgotten, so that ever new shapes take no memory."""


class Acceptance:
    """The checks of one engine. They read shapes, dtypes, layouts, devices and options alone, so an accepted kind of call is remembered by
    all of these and not checked again; a refused one never is."""

    def __init__(self, backend: TorchBackend, engine: str) -> None:
        self._backend, self._engine = backend, engine
        self._accepted: set[Any] = set()

    def __call__(
        self,
        op: str,
        arrays: dict[str, Tensor | None],
        options: dict[str, Any],
        contract: str | None,
        *differentiable: Tensor | None,
        caller: str | None = None,
    ) -> None:
        """``caller`` is the public function, where that is not the operator."""
        gradient = False
        if torch.is_grad_enabled():
            for tensor in differentiable:
                gradient = gradient or getattr(tensor, "requires_grad", False)
        kind = None if torch.compiler.is_compiling() else _kind(op, arrays, options, contract, gradient)
        if kind is not None and kind in self._accepted:
            refuse_forward_mode(caller or op, differentiable)
            return
        self._check(op, arrays, options, contract, gradient, differentiable, caller or op)
        if kind is not None:
            if len(self._accepted) >= _KINDS:
                self._accepted.clear()
            self._accepted.add(kind)

    def _check(
        self,
        op: str,
        arrays: dict[str, Tensor | None],
        options: dict[str, Any],
        contract: str | None,
        gradient: bool,
        differentiable: tuple[Tensor | None, ...],
        caller: str,
    ) -> None:
        described = {name: info(caller, name, tensor) for name, tensor in arrays.items()}
        refuse_forward_mode(caller, differentiable)
        problem = describe(op, described, options, contract=contract, gradient=gradient, caller=caller)
        check_one_device(caller, arrays)
        reasons = self._backend.reasons(problem, self._engine)
        if reasons:
            raise UnsupportedProblem(self._backend.name, reasons, problem, runners(problem, without=self._backend.name))


def _kind(op: str, arrays: dict[str, Tensor | None], options: dict[str, Any], contract: str | None, gradient: bool) -> Any:
    """Everything that the checks read, or None for a call that is always checked: it has something that is no plain tensor, or an option
    that is no plain value. Types are part of it, since True equals 1 and only one of them is a start or a flag."""
    values = tuple(options.values())
    window = options.get("window")
    types = tuple(map(type, (contract, *values, *(window if type(window) is tuple else ()))))
    if not _VALUES.issuperset(types):
        return None
    kind: list[Any] = [op, contract, gradient, *options, *values, *types, *arrays]
    for tensor in arrays.values():
        if tensor is None:
            kind.append(None)
        elif type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
            kind += (tensor.shape, tensor.dtype, tensor.device)
        else:
            return None
    return tuple(kind)


_VALUES = frozenset({type(None), bool, int, float, str, tuple})
