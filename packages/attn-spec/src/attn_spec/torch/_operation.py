"""One operator of an engine as callers reach it: through torch's dispatcher where something watches, else straight to the kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["PLAIN", "WATCHERS", "Gradient", "Operation", "unseen", "watched"]

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types that are nothing but a dense tensor."""

Gradient = tuple[Callable[..., None], Callable[..., Any]]
"""``setup(ctx, inputs, output)``, and the gradient formula of ``ctx`` and the cotangents."""


WATCHERS: tuple[Callable[[], object], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._are_functorch_transforms_active,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
)
"""True of one of them: a mode, a transform of torch.func, a tracer or the profiler sees operator calls."""


def watched() -> bool:
    """Whether operator calls must be visible, to a compiler or one of ``WATCHERS``."""
    return torch.compiler.is_compiling() or any(map(operator.call, WATCHERS))


def unseen(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing can tell a call on ``tensors`` from one of other operators with the same results."""
    return not watched() and all(type(tensor) in PLAIN and not tensor.is_neg() for tensor in tensors)


class Operation:
    """A torch.library operator with a short way to its kernel.

    The dispatcher and the autograd wrapper of torch.library cost more than a small kernel. So a call on plain tensors that nothing watches
    runs ``kernel`` itself, recorded by an autograd function with the same gradient formula when a gradient is asked for. Transforms of
    torch.func, which torch.library's wrapper refuses, meet an autograd function too. Results, errors and saved tensors are always the same.

    Args:
        registered: the torch.library operator.
        kernel: its implementation, with the same arguments.
        tensors: how many arguments, from the first, are tensors or None; the rest are plain values.
        gradient: the formula that is registered too.
        rule: makes the rule of torch.vmap from this operation.
        inference: the first results alone, from the tuple of arguments and how many are wanted, for plain calls without a gradient that
            want no more; default ``kernel``.
    """

    def __init__(
        self,
        registered: Any,
        kernel: Callable[..., Any],
        tensors: int,
        gradient: Gradient,
        rule: Callable[[Callable[..., Any]], Any],
        inference: Callable[..., Any] | None = None,
    ) -> None:
        self._registered, self._kernel, self._tensors = registered, kernel, tensors
        self._inference = inference
        self.vmap = rule(self)
        setup, formula = gradient
        members = {"setup_context": staticmethod(setup), "backward": staticmethod(formula)}
        name = str(registered.name()).replace("::", "_")
        recorded = _function(name, {**members, "forward": staticmethod(kernel)})
        # Function.apply inspects the signature of forward, which takes 20 us; its base does not.
        self._record: Callable[..., Any] = super(torch.autograd.Function, recorded).apply  # type: ignore[misc]
        self._transformed = _function(name, {**members, "forward": staticmethod(registered), "vmap": staticmethod(self.vmap)})

    def __call__(self, *arguments: Any, wanted: int = 0) -> Any:
        """Results of the operator: all, or if some are ``wanted`` at least as many, the first ones."""
        if watched():
            return self._visible(*arguments)
        needs = False
        for tensor in arguments[: self._tensors]:
            if tensor is not None:
                if type(tensor) not in PLAIN or tensor.is_neg():
                    return self._registered(*arguments)
                needs = needs or tensor.requires_grad
        if needs and torch.is_grad_enabled():
            return self.record(*arguments)
        return self._inference(arguments, wanted) if wanted and self._inference else self._kernel(*arguments)

    def record(self, *arguments: Any) -> Any:
        """All results, with a graph for the gradients. For plain tensors, one of which needs a gradient, while nothing watches."""
        return self._record(*arguments)

    def _visible(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return self._registered(*arguments)
        return self._transformed.apply(*arguments)


def _function(name: str, members: dict[str, Any]) -> type[torch.autograd.Function]:
    return type(name, (torch.autograd.Function,), members)
