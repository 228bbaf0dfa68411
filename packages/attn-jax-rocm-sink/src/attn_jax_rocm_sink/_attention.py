"""The public call: checks on shapes, dtypes and options first, then the engine's capabilities, then the kernels."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attn_spec import Problem, UnsupportedProblem
from attn_spec._errors import UnknownName
from attn_spec._sm90 import CONTRACT as SM90
from attn_spec._sm90 import score_factor
from attn_spec._validation import ArrayInfo, describe

from attn_jax_rocm_sink import _xla
from attn_jax_rocm_sink._arrays import (
    are_seed_words,
    check_known,
    info,
    integers,
    is_integer,
    number,
    platform,
    seed_words,
    without_key_type,
)
from attn_jax_rocm_sink._engines import ENGINES, Engine, handlers_of, select
from attn_jax_rocm_sink._ffi import HANDLERS
from attn_jax_rocm_sink._vjp import Inputs, attention_with_lse

__all__ = ["attention", "forward_fp32"]

NAME = "attn_jax_rocm_sink"

Outputs = jax.Array | tuple[jax.Array, jax.Array]
_INT32_MAX = 2**31 - 1
_OPTIONS = ("causal", "scale", "window", "dropout_p", "dropout_seed", "return_lse")
_STATIC = ("causal", "scale", "window", "dropout_p", "return_lse")
_INTEGERS = ("kv_lengths", "q_start", "k_start")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: jax.Array | None = None,
    kv_lengths: int | jax.Array | None = None,
    q_start: int | jax.Array | None = None,
    k_start: int | jax.Array | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    return_lse: bool = False,
    contract: str | None = None,
    engine: str | None = None,
) -> Outputs:
    """Softmax attention with softmax sinks, O(S) memory; works under jit, grad, vmap, scan and checkpoint.

    Args:
        q: [B, H, S, D]; k: [B, K, T, D]; v: [B, K, T, V]; one dtype of float32, bfloat16, float16; H a multiple of K.
        causal: key j is visible to query i iff ``k_start + j <= q_start + i`` (bottom-right by default; ``q_start=0`` is top-left).
        scale: a number known when traced; None is 1/sqrt(D); 0.0 and negative values are used as they are (sm90-v1: positive ones alone).
        key_padding_mask: bool [B, T], True keeps the key. Dropped keys are compacted away.
        kv_lengths: used keys of each batch item, an integer or int32 or int64 [B] (traced or not); default T.
        q_start: position of query 0, int or [B]; default ``k_start + kv_lengths - S``.
        k_start: position of stored key 0, int or [B], at least 0 (rolling caches); default 0.
        window: ``(left, right)`` positions visible besides the diagonal one; None for no bound.
        sinks: [H] logits after scaling, any of the three dtypes; -inf is no sink, 0 is off-by-one softmax.
        bias: [B|1, H|1, S|1, T|1], added after scaling; -inf masks.
        dropout_p: probability that a pair is dropped after normalisation; it needs ``dropout_seed``.
        dropout_seed: 64-bit integer, a scalar integer array, uint32 [2], low word first, or a key of ``jax.random`` of two words, typed or
            not; the arrays may be traced.
        return_lse: also return the log-sum-exp.
        contract: "ordered-v1", which None is, or "sm90-v1": tensor-core attention of halves, head dims 64 and 128, on Hopper GPUs, and its
            bits on a CPU (256 too).
        engine: "host", "cuda" or "hip"; None takes the one of the platform that the call is lowered for, whatever machine traces it. Only
            when named, and outside every contract: "ck", and "xla" (plain jax.numpy on any device, [B, H, S, T] memory, traced lengths and
            positions are not checked: they are clamped).

    Returns:
        ``out`` [B, H, S, V] in the dtype of v, or ``(out, lse)`` with lse float32 [B, H, S], natural logarithm, sink included. A row
        without a visible key is +0 with lse -inf (with a sink: the sink). Gradients (q, k, v, sinks, bias) have the dtype of their input;
        the reverse mode is first order only.

    Raises:
        TypeError, ValueError: bad dtype, shape, device or option. UnsupportedProblem: no engine of this package runs it, or, when it is
        lowered, none of that platform does. JaxRuntimeError with INVALID_ARGUMENT: traced lengths or positions out of range, found when
        engine "host" runs; kernels of a GPU cannot raise and clamp them.

    Source: docs/contracts/ordered-v1.md, section 3; docs/contracts/sm90-v1.md.
    """
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "causal": causal,
        "scale": scale,
        "key_padding_mask": key_padding_mask,
        "kv_lengths": kv_lengths,
        "q_start": q_start,
        "k_start": k_start,
        "window": window,
        "sinks": sinks,
        "bias": bias,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "return_lse": return_lse,
        "contract": contract,
        "engine": engine,
    }
    return _run(arguments, None)


def forward_fp32(*arguments: Any, **keywords: Any) -> Outputs:
    """``attention`` with a float32 result, whatever the input dtype."""
    bound = inspect.signature(attention).bind(*arguments, **keywords)
    bound.apply_defaults()
    return _run(bound.arguments, "float32")


def _run(arguments: dict[str, Any], out_dtype: str | None) -> Outputs:
    check_known("attention", **{name: arguments[name] for name in _STATIC})
    for name in ("contract", "engine"):
        if not isinstance(arguments[name], str | None):
            raise TypeError(f"attention: {name} must be a string or None; got {arguments[name]!r}")
    arguments["scale"] = number("attention", "scale", arguments["scale"])
    arguments["dropout_seed"] = without_key_type(arguments["dropout_seed"])
    for name in _INTEGERS:
        arguments[name] = _one_for_each(arguments[name], arguments["q"])
    problem = _check(arguments)
    named = arguments["engine"]
    engine = problem.contract if named is None else handlers_of(named, problem.contract)
    if arguments["dropout_p"] > 0.0 and arguments["dropout_seed"] is None:
        raise ValueError("attention: dropout_p > 0 needs dropout_seed: JAX has no default generator to draw one from")
    left, right = (-1 if side is None else int(side) for side in (arguments["window"] or (None, None)))
    scale = 1.0 / math.sqrt(problem.head_dim) if arguments["scale"] is None else arguments["scale"]
    if problem.contract == SM90:
        score_factor(scale)
    batch, keys = problem.batch, problem.keys
    q_start = arguments["q_start"]
    top_left = engine in HANDLERS and HANDLERS[engine].static_alignment and is_integer(q_start) and q_start == 0
    inputs = Inputs(
        q=jnp.asarray(arguments["q"]),
        k=jnp.asarray(arguments["k"]),
        v=jnp.asarray(arguments["v"]),
        key_padding_mask=_optional(arguments["key_padding_mask"]),
        kv_lengths=integers("kv_lengths", arguments["kv_lengths"], batch, 0, keys),
        q_start=integers("q_start", None if top_left else q_start, batch, -_INT32_MAX, _last_start(problem.queries)),
        k_start=integers("k_start", arguments["k_start"], batch, 0, _last_start(keys)),
        sinks=_optional(arguments["sinks"]),
        bias=_optional(arguments["bias"]),
        dropout_seed=seed_words(arguments["dropout_seed"]) if arguments["dropout_p"] > 0.0 else None,
        causal=bool(arguments["causal"]),
        scale=float(scale if problem.contract == SM90 else np.float32(scale)),
        window_left=left,
        window_right=right,
        dropout_p=float(arguments["dropout_p"]),
        out_dtype=out_dtype or problem.dtype,
        engine=engine,
        top_left=top_left,
    )
    run = _xla.attention_with_lse if engine == _xla.NAME else attention_with_lse
    out, lse = run(inputs)
    return (out, lse) if arguments["return_lse"] else out


def _check(arguments: dict[str, Any]) -> Problem:
    arrays = {name: arguments[name] for name in ("q", "k", "v", "key_padding_mask", *_INTEGERS, "sinks", "bias")}
    options = {name: arguments[name] for name in _OPTIONS}
    if are_seed_words(options["dropout_seed"]):
        del options["dropout_seed"]
    for name in _INTEGERS:
        if is_integer(arrays[name]) or isinstance(arrays[name], bool):
            options[name] = arrays.pop(name)
    named = arguments["engine"]
    if named is not None and named != _xla.NAME and named not in ENGINES:
        raise UnknownName(f"engine of {NAME}", named, (*ENGINES, _xla.NAME))
    device = platform(arrays, ENGINES[named].capabilities.devices[0] if named in ENGINES else None)
    described: dict[str, ArrayInfo | None] = {name: info(name, array, device) for name, array in arrays.items()}
    if "kv_lengths" in options:
        described["kv_lengths"] = _described_lengths(options.pop("kv_lengths"), described["q"], device)
    problem = describe("attention", described, options, contract=arguments["contract"])
    reasons = _xla.reasons(arguments["contract"]) if named == _xla.NAME else _engine_reasons(problem, named, arguments["contract"])
    if reasons:
        from attn_spec._registry import runners

        raise UnsupportedProblem(NAME, reasons, problem, runners(problem, without=NAME))
    return problem


def _engine_reasons(problem: Problem, named: str | None, contract: str | None) -> tuple[str, ...]:
    """Why no platform runs the problem; without a named engine, the reasons of that of the problem's device.

    What this machine lacks is a reason beside others alone: the call may be lowered for another one.
    """
    engine = ENGINES[named or select(problem.device)]
    reasons = engine.reasons(problem, contract)
    if not reasons or (named is None and any(_runs_at_home(problem, other, contract) for other in ENGINES.values())):
        return ()
    return (*reasons, *filter(None, [engine.unavailable()]))


def _runs_at_home(problem: Problem, engine: Engine, contract: str | None) -> bool:
    """Whether an exact engine runs the problem on devices of its own."""
    at_home = replace(problem, device=engine.capabilities.devices[0])
    return engine.exact and not engine.capabilities.reasons(at_home) and not (at_home.contract == SM90 and engine.sm90_reasons(at_home))


def _one_for_each(value: Any, q: Any) -> Any:
    """An integer array without axes, traced or not, becomes one for each batch item."""
    if not (isinstance(value, (jax.Array, np.ndarray)) and value.shape == () and getattr(q, "ndim", 0) > 0):
        return value
    broadcast_to: Any = jnp.broadcast_to if isinstance(value, jax.Array) else np.broadcast_to  # JAX cuts numpy's integers to 32 bits
    return broadcast_to(value, q.shape[:1])


def _described_lengths(value: Any, q: ArrayInfo | None, device: str) -> ArrayInfo:
    """One length for every batch item, described as the array that it becomes."""
    if isinstance(value, bool):
        raise TypeError(f"attention: kv_lengths must be an integer or an integer array [B]; got {value!r}")
    return ArrayInfo(q.shape[:1] if q is not None else (), "int32", device)


def _last_start(rows: int) -> int:
    """The largest position of a first row whose last row still has one of 32 bits."""
    return _INT32_MAX - max(rows - 1, 0)


def _optional(array: Any) -> jax.Array | None:
    return None if array is None else jnp.asarray(array)
