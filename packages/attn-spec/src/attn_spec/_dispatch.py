"""``get_op``: choose a backend for an operator, with the reasons for every one that was passed over."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

from attn_spec._backend import Backend
from attn_spec._capabilities import Capabilities
from attn_spec._contract import contract as find_contract
from attn_spec._contract import contract_reasons, default_contract
from attn_spec._errors import BackendUnavailable, UnknownName, UnsupportedProblem
from attn_spec._operators import OPERATORS, PRODUCTION, QAT, operator
from attn_spec._qat import QATConfig
from attn_spec._registry import get_backend, in_order, load, parse
from attn_spec._trace import Trace

__all__ = ["Op", "get_op"]


class Op:
    """One operator of one backend: callable, with ``forward``, ``forward_fp32`` and ``forward_with_lse`` where they apply, and its
    ``trace``. A call may name its contract and config again, but no others: the trace says what every call ran."""

    def __init__(self, name: str, backend: Backend, engine: str, trace: Trace, config: QATConfig | None = None) -> None:
        functions = backend.operators(engine)
        self.name, self.trace = name, trace
        self._config = config
        self._function: Callable[..., Any] = functions[name]
        self._float32 = functions.get(f"{name}.forward_fp32")
        if config is not None:
            self._function = partial(self._function, config=config)
        self._is_default = trace.contract == default_contract(name, "float32", 1, trace.platform.split()[0])
        if not self._is_default:
            self._function = partial(self._function, contract=trace.contract)
            self._float32 = None if self._float32 is None else partial(self._float32, contract=trace.contract)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if "contract" in keywords or "config" in keywords:
            self._check_bound(keywords)
        return self._function(*arguments, **keywords)

    forward = __call__

    def forward_fp32(self, *arguments: Any, **keywords: Any) -> Any:
        """The same arithmetic with a float32 result, whatever the input dtype."""
        if self._float32 is None:
            raise UnsupportedProblem(self.trace.selected_backend, [f"{self.name} has no forward_fp32"])
        self._check_bound(keywords)
        return self._float32(*arguments, **keywords)

    def forward_with_lse(self, *arguments: Any, **keywords: Any) -> Any:
        """``(out, lse)`` of attention."""
        if "return_lse" not in OPERATORS[self.name].options:
            raise UnsupportedProblem(self.trace.selected_backend, [f"{self.name} has no log-sum-exp"])
        return self(*arguments, **keywords, return_lse=True)

    def _check_bound(self, keywords: dict[str, Any]) -> None:
        """ValueError for a contract or a config that is not that of the trace."""
        contract = keywords.get("contract", self.trace.contract)
        if contract != self.trace.contract and not (contract is None and self._is_default):
            raise ValueError(
                f"{self.name}: this op is bound to contract {self.trace.contract}; got contract={contract!r} (get_op takes the contract)"
            )
        if self._config is not None and keywords.get("config", self._config) != self._config:
            raise ValueError(
                f"{self.name}: this op is bound to config {self._config}; got config={keywords['config']} (get_op takes the config)"
            )

    def __repr__(self) -> str:
        return f"<{self.name} of {self.trace.selected_backend}, contract {self.trace.contract}>"


def get_op(
    name: str, *, device: str = "cpu", backend: str | None = None, contract: str | None = None, config: QATConfig | None = None
) -> Op:
    """The operator ``name`` for ``device`` ("cpu", "cuda", "rocm").

    Without ``backend`` the first usable one in the device's order is taken and each one passed over stands with its reasons in
    ``.trace.prior_rejections``.
    A backend (``"NAME"`` or ``"NAME:engine"``) or contract asked for by name never falls back. ``config`` (4-bit attention only; default
    ``QATConfig()``) is bound to the operator, and its fingerprint stands in the trace. Raises UnknownName, BackendUnavailable or
    UnsupportedProblem.
    """
    operator(name)
    if config is not None and name not in QAT:
        raise ValueError(f"get_op: {name} takes no config; the operators that do: {', '.join(QAT)}")
    if config is not None and not isinstance(config, QATConfig):
        raise TypeError(f"get_op: config must be a QATConfig; got {type(config).__name__}")
    config = QATConfig() if config is None and name in QAT else config
    if name == PRODUCTION:
        if contract is not None:
            raise UnsupportedProblem(
                "attn", [f"contract {contract} (attn is production attention, outside every contract; use 'attention')"]
            )
        wanted = "none"
    else:
        wanted = default_contract(name, "float32", 1, device) if contract is None else contract
        find_contract(wanted)
    if backend is not None:
        chosen = get_backend(backend)
        engine = chosen.engine(parse(backend)[1])
        lacks = _lacks(chosen.capabilities(engine), name, wanted)
        if lacks:
            raise UnsupportedProblem(backend, lacks)
        reasons = _rejections(chosen, engine, name, wanted, device)
        if reasons:
            raise BackendUnavailable(backend, "; ".join(reasons))
        return _op(name, chosen, engine, wanted, device, (), config)
    rejected: list[str] = []
    candidates = in_order(device)
    for candidate in candidates:
        loaded = load(candidate)
        if loaded.backend is None:
            rejected.append(f"{candidate}: {loaded.error}")
            continue
        for engine in loaded.backend.engines:
            reasons = _rejections(loaded.backend, engine, name, wanted, device)
            if not reasons:
                return _op(name, loaded.backend, engine, wanted, device, tuple(rejected), config)
            rejected.append(f"{candidate}:{engine}: {'; '.join(reasons)}")
    if not candidates:
        raise UnknownName("device", device, ("cpu", "cuda", "rocm"))
    raise UnsupportedProblem(f"no installed backend runs {name} on {device}; attn", rejected)


def _lacks(capabilities: Capabilities, name: str, contract: str) -> list[str]:
    """The operator or contract that a backend does not have, on any device."""
    absent = [] if name in capabilities.operators else [f"operator {name} (supported: {', '.join(capabilities.operators)})"]
    return [*absent, *contract_reasons(name, contract, capabilities.contracts)]


def _rejections(backend: Backend, engine: str, name: str, contract: str, device: str) -> tuple[str, ...]:
    capabilities = backend.capabilities(engine)
    reasons = _lacks(capabilities, name, contract)
    if device not in capabilities.devices:
        reasons.append(f"device {device} (supported: {', '.join(capabilities.devices)})")
    if not reasons:
        state = backend.unavailable(device, engine)
        reasons.extend([] if state is None else [state])
    return tuple(reasons)


def _op(name: str, backend: Backend, engine: str, contract: str, device: str, rejected: tuple[str, ...], config: QATConfig | None) -> Op:
    arithmetic = None if name == PRODUCTION else find_contract(contract)
    trace = Trace(
        op=name,
        selected_backend=f"{backend.name}:{engine}",
        contract=contract,
        reduction_order=arithmetic.reduction_order if arithmetic else "not stated",
        accumulator_precision=arithmetic.accumulator_precision if arithmetic else "not stated",
        split_k=arithmetic.split_k if arithmetic else None,
        tf32=arithmetic.tf32 if arithmetic else None,
        kernel_fingerprint=backend.fingerprint(device, engine),
        platform=f"{device} {platform.machine()}",
        fallback=bool(rejected),
        prior_rejections=rejected,
        config=None if config is None else config.fingerprint,
    )
    return Op(name, backend, engine, trace, config)
