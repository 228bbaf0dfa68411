"""A kernel call as a primitive of JAX: the platform that it is lowered for, not the machine that traces it, decides on the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from attn_spec import UnsupportedProblem
from jax.extend.core import Primitive
from jax.interpreters import mlir

from attn_jax_rocm_sink import _ffi
from attn_jax_rocm_sink._engines import ENGINES, handlers_of
from attn_jax_rocm_sink._ffi import HANDLERS, Handlers
from attn_jax_rocm_sink._signature import Signature

__all__ = ["PLATFORMS", "call", "require_usable", "traits"]

PLATFORMS = ("cpu", "cuda", "rocm")
"""JAX's names of the platforms that an engine may be registered for."""

_PACKAGE = "attn_jax_rocm_sink"


def call(signature: Signature, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The results that ``signature`` names, on arrays of one device.

    Its attribute ``engine`` names handlers, or a contract, for which each platform has handlers of its own.
    """
    return dict(zip(signature.results, _kernel.bind(*operands.values(), signature=signature), strict=True))


def traits(engine: str) -> Handlers:
    """What holds for the handlers of an attribute ``engine`` on every platform."""
    return HANDLERS[next(iter(_serving(engine).values()))]


def require_usable(signature: Signature, platform: str) -> str:
    """The handlers of a call on a platform. Raises UnsupportedProblem, with every reason, where there are none.

    Where JAX has the platform they must be able to run; elsewhere it is enough that their workspace can be planned.
    """
    engine = dict(signature.attributes)["engine"]
    serving = _serving(engine)
    if platform not in serving:
        engines = ", ".join(f"{other} by engine {_public(handlers)}" for other, handlers in serving.items())
        refusal = f"lowering for platform {platform} (supported: {engines}; any platform by engine xla)"
        state = _unusable(engine) if engine in HANDLERS else None
        raise UnsupportedProblem(_PACKAGE, [refusal] if state is None else [refusal, state])
    handlers = serving[platform]
    reason = _unusable(handlers) if _is_here(platform) else ENGINES[_public(handlers)].unplannable()
    if reason is not None:
        raise UnsupportedProblem(_PACKAGE, [f"lowering for platform {platform}, engine {_public(handlers)}: {reason}"])
    return handlers


def _serving(engine: str) -> dict[str, str]:
    """Handlers by platform."""
    if engine in HANDLERS:
        return {HANDLERS[engine].platform.lower(): engine}
    found: dict[str, str] = {}
    for name, one in ENGINES.items():
        if one.exact and engine in one.capabilities.contracts:
            handlers = handlers_of(name, engine)
            found.setdefault(HANDLERS[handlers].platform.lower(), handlers)
    return found


def _public(handlers: str) -> str:
    return handlers.removesuffix("_sm90")


def _unusable(handlers: str) -> str | None:
    """Why the handlers do not run on this machine, or None."""
    engine = ENGINES[_public(handlers)]
    reason = engine.unavailable()
    return engine.sm90_unavailable() if reason is None and handlers != engine.name else reason


def _is_here(platform: str) -> bool:
    try:
        jax.local_devices(backend=platform)
    except RuntimeError:
        return False
    return True


def _engine_call(signature: Signature, handlers: str, platform: str, *values: jax.Array) -> tuple[jax.Array, ...]:
    operands = signature.named(values)
    attributes = dict(signature.attributes) | {"engine": handlers}
    try:
        found = _ffi.call(signature.direction, operands, signature.structs(operands), attributes)
    except _ffi.NoPlan as error:
        raise UnsupportedProblem(
            _PACKAGE, [f"lowering for platform {platform}, engine {_public(handlers)}: its workspace cannot be planned here: {error}"]
        ) from error
    return tuple(found.values())


def _lower(platform: str, context: mlir.LoweringRuleContext, *values: Any, signature: Signature) -> Any:
    handlers = require_usable(signature, platform)
    return mlir.lower_fun(partial(_engine_call, signature, handlers, platform), multiple_results=True)(context, *values)


def _refuse(context: mlir.LoweringRuleContext, *_: Any, signature: Signature) -> Any:
    """The rule of every other platform."""
    platforms: Sequence[str] = context.platforms or context.module_context.platforms
    require_usable(signature, next(platform for platform in platforms if platform not in PLATFORMS))


def _run(*values: jax.Array, signature: Signature) -> Sequence[jax.Array]:
    """The call outside of any trace, as under ``jax.disable_jit``."""
    with jax.disable_jit(False):
        return jax.jit(partial(_bound, signature))(*values)


def _bound(signature: Signature, *values: jax.Array) -> Sequence[jax.Array]:
    return list(_kernel.bind(*values, signature=signature))


def _types(*operands: Any, signature: Signature) -> list[Any]:
    """Types of the results: the same on all devices of a manual mesh axis, as those of ``jax.ffi.ffi_call``."""
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    structs = signature.structs(signature.named(operands)).values()
    return [jax.core.ShapedArray(struct.shape, struct.dtype, sharding=sharding) for struct in structs]


def _primitive() -> Primitive:
    primitive = Primitive("attn_jax_rocm_sink")
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_types)
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, partial(_lower, platform), platform=platform)
    mlir.register_lowering(primitive, _refuse)
    return primitive


_kernel = _primitive()
