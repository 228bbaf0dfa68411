"""Checks of one call, on shapes, dtypes and devices alone, and the Problem that describes it.

Every public function of every framework calls :func:`describe` before any work, so that bad input has one wording everywhere.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_spec._contract import contract as find_contract
from attn_spec._contract import default_contract
from attn_spec._operators import DTYPES, OPERATORS, PRODUCTION, QAT, operator
from attn_spec._problem import Problem
from attn_spec._qat import QATConfig

__all__ = ["ArrayInfo", "describe"]

_INTEGERS = ("int32", "int64")
_INT32_MAX = 2**31 - 1
_FOUR_BIT_HEAD_DIMS = range(16, 257, 16)
_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103
"""Magnitudes from here on round to infinity in float32."""


@dataclass(frozen=True)
class ArrayInfo:
    """Shape, dtype name and device type of one array argument."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"


def describe(
    op: str,
    arrays: Mapping[str, ArrayInfo | None],
    options: Mapping[str, Any] | None = None,
    *,
    contract: str | None = None,
    gradient: bool = False,
    caller: str | None = None,
) -> Problem:
    """Check one call and describe it.

    ``arrays`` maps argument names to ArrayInfo (None: not given); ``options`` holds the keyword options; integers given in place of an
    array (``q_start=0``) go to ``options``. ``caller`` is the function that messages name (default: the operator). Raises TypeError for
    dtypes and for arguments that the operator does not have, ValueError for shapes, sizes, devices and option values, each naming the
    value, UnknownName for a contract that there is not.
    """
    spec = operator(op)
    given = {name: info for name, info in arrays.items() if info is not None}
    options = dict(options or {})
    function = caller or op
    missing = [name for name in spec.inputs if name not in given]
    if missing:
        raise TypeError(f"{function}: missing {', '.join(missing)}")
    known = (*spec.arrays, *spec.options)
    for name in (*arrays, *options):
        if name not in known:
            raise TypeError(f"{function}: unknown argument {name!r}; known: {', '.join(known)}")
    _check_devices(function, given)
    _check_options(function, options)
    sizes, features = _CHECKS[op](function, given, options)
    if gradient:
        features.add("gradient")
    dtype, device = given[spec.inputs[0]].dtype, given[spec.inputs[0]].device
    name = default_contract(op, dtype, sizes.get("head_dim", 1), device) if contract is None else contract
    if op != PRODUCTION:
        find_contract(name)
    elif contract is not None:
        raise ValueError(f"{op}: it stands outside every contract, {contract} included; use 'attention'")
    config = options.get("config", QATConfig()) if op in QAT else None
    return Problem(op=op, dtype=dtype, device=device, contract=name, features=frozenset(features), config=config, **sizes)


def _check_devices(op: str, given: Mapping[str, ArrayInfo]) -> None:
    devices = {name: info.device for name, info in given.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{op}: all arrays must be on one device; got {', '.join(f'{n} on {d}' for n, d in devices.items())}")


def _float(op: str, given: Mapping[str, ArrayInfo], *names: str) -> None:
    first = given[names[0]]
    for name in names:
        info = given[name]
        if info.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} has dtype {info.dtype}; supported: {', '.join(DTYPES)}")
        if info.dtype != first.dtype:
            raise TypeError(f"{op}: {names[0]} is {first.dtype} and {name} is {info.dtype}; they must share one dtype")


def _rank(op: str, given: Mapping[str, ArrayInfo], rank: int, axes: str, *names: str) -> None:
    for name in names:
        shape = given[name].shape
        if len(shape) != rank:
            raise ValueError(f"{op}: {name} must have {rank} axes [{axes}]; got shape {list(shape)}")


def _equal(op: str, what: str, **values: int) -> None:
    first = next(iter(values.values()))
    if any(value != first for value in values.values()):
        raise ValueError(f"{op}: {what} must agree; got {', '.join(f'{name} {value}' for name, value in values.items())}")


def _heads(op: str, heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: query heads must be a positive multiple of kv heads; got {heads} query heads and {kv_heads} kv heads")


def _head_dim(op: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{op}: the head dim of {name} must be at least 1; got {value}")


def _boolean(op: str, given: Mapping[str, ArrayInfo], name: str, shape: tuple[int, ...], axes: str) -> bool:
    info = given.get(name)
    if info is None:
        return False
    if info.dtype != "bool":
        raise TypeError(f"{op}: {name} must be bool (True keeps the key); got {info.dtype}")
    if info.shape != shape:
        raise ValueError(f"{op}: {name} must have shape [{axes}] = {list(shape)}; got {list(info.shape)}")
    return True


def _integers(op: str, given: Mapping[str, ArrayInfo], name: str, shape: tuple[int, ...], axes: str) -> bool:
    info = given.get(name)
    if info is None:
        return False
    if info.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64; got {info.dtype}")
    if info.shape != shape:
        raise ValueError(f"{op}: {name} must have shape [{axes}] = {list(shape)}; got {list(info.shape)}")
    return True


def _sinks(op: str, given: Mapping[str, ArrayInfo], heads: int) -> bool:
    info = given.get("sinks")
    if info is None:
        return False
    if info.dtype not in DTYPES:
        raise TypeError(f"{op}: sinks have dtype {info.dtype}; supported: {', '.join(DTYPES)}")
    if info.shape != (heads,):
        raise ValueError(f"{op}: sinks must have shape [H] = [{heads}]; got {list(info.shape)}")
    return True


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite_float32(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return abs(float(value)) < _FLOAT32_OVERFLOW
    except OverflowError:
        return False


def _is_integer_scalar(array: Any) -> bool:
    dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    return dtype is not None and shape is not None and "int" in str(dtype) and math.prod(shape) == 1


def _check_options(op: str, options: Mapping[str, Any]) -> None:
    if "config" in options and not isinstance(options["config"], QATConfig):
        raise TypeError(f"{op}: config must be a QATConfig; got {type(options['config']).__name__}")
    scale = options.get("scale")
    if scale is not None and not _is_finite_float32(scale):
        raise ValueError(f"{op}: scale must be a finite number or None; got {scale!r} (it must be finite in float32: below 2**128)")
    if "out_dtype" in options and options["out_dtype"] not in DTYPES:
        raise TypeError(f"{op}: out_dtype must be one of {', '.join(DTYPES)}; got {options['out_dtype']}")
    for name in ("causal", "return_lse"):
        if not isinstance(options.get(name, False), bool):
            raise TypeError(f"{op}: {name} must be True or False; got {options[name]!r}")
    window = options.get("window")
    if window is not None:
        if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(side is None or _is_integer(side) for side in window)):
            raise TypeError(f"{op}: window must be (left, right), each an integer or None; got {window!r}")
        if any(side is not None and side < 0 for side in window):
            raise ValueError(f"{op}: window sides count keys besides the diagonal one and must be 0 or more; got {window!r}")
        if any(side is not None and side > _INT32_MAX for side in window):
            raise ValueError(f"{op}: window sides must be at most 2**31 - 1 (None for no bound); got {window!r}")
    dropout_p = options.get("dropout_p", 0.0)
    if isinstance(dropout_p, bool) or not (isinstance(dropout_p, numbers.Real) and 0.0 <= float(dropout_p) <= 1.0):
        raise ValueError(f"{op}: dropout_p must lie in [0, 1]; got {dropout_p!r}")
    seed = options.get("dropout_seed")
    if seed is not None and not _is_integer(seed) and not _is_integer_scalar(seed):
        found = f"{seed.dtype} {list(seed.shape)}" if hasattr(seed, "dtype") and hasattr(seed, "shape") else repr(seed)
        raise TypeError(f"{op}: dropout_seed must be an integer or a scalar array of integers; got {found}")
    if seed is not None and _is_integer(seed) and not 0 <= seed < 2**64:
        raise ValueError(f"{op}: dropout_seed must lie in [0, 2**64); got {seed}")
    for name in ("q_start", "k_start"):
        start = options.get(name)
        if start is not None and not _is_integer(start):
            raise TypeError(f"{op}: {name} must be an integer or an integer array [B]; got {start!r}")
        if start is not None and abs(start) > _INT32_MAX:
            raise ValueError(f"{op}: {name} must be an integer within 32 bits, from -(2**31 - 1) to 2**31 - 1; got {start}")
    if (options.get("k_start") or 0) < 0:
        raise ValueError(f"{op}: k_start must be 0 or more; got {options['k_start']}")


def _used(options: Mapping[str, Any]) -> set[str]:
    used = {"causal"} if options.get("causal") else set()
    if options.get("window") is not None and tuple(options["window"]) != (None, None):
        used.add("window")
    if options.get("dropout_p", 0.0) > 0.0:
        used.add("dropout")
    if options.get("return_lse"):
        used.add("return_lse")
    return used | {name for name in ("q_start", "k_start") if options.get(name) is not None}


def _qk_gemm(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    _float(op, given, "q", "k")
    _rank(op, given, 4, "B, H, S, D", "q")
    _rank(op, given, 4, "B, K, T, D", "k")
    (batch, heads, queries, head_dim), (k_batch, kv_heads, keys, k_dim) = given["q"].shape, given["k"].shape
    _equal(op, "batch", q=batch, k=k_batch)
    _equal(op, "head dim", q=head_dim, k=k_dim)
    _heads(op, heads, kv_heads)
    _head_dim(op, "q", head_dim)
    return {"batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "head_dim": head_dim}, set()


def _softmax(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    _float(op, given, "scores")
    shape = given["scores"].shape
    if not shape:
        raise ValueError(f"{op}: scores must have at least one axis [..., T]; got a scalar")
    if shape[-1] < 1:
        raise ValueError(f"{op}: a row must have at least one key; got T={shape[-1]}")
    if shape[-1] > _INT32_MAX:
        raise ValueError(f"{op}: T must fit 32 bits; got {shape[-1]}")
    features = set()
    if given.get("key_padding_mask") is not None:
        if len(shape) < 2:
            raise ValueError(f"{op}: key_padding_mask [B, T] needs scores with a batch axis; got scores of shape {list(shape)}")
        if _boolean(op, given, "key_padding_mask", (shape[0], shape[-1]), "B, T"):
            features.add("key_padding_mask")
    batch = shape[0] if len(shape) > 1 else 1
    return {"batch": batch, "queries": math.prod(shape[1:-1]), "keys": shape[-1]}, features


def _av_gemm(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    for name in ("probs", "v"):
        _float(op, given, name)
    if given["probs"].dtype not in ("float32", given["v"].dtype):
        raise TypeError(f"{op}: probs must be float32 or the dtype of v ({given['v'].dtype}); got {given['probs'].dtype}")
    _rank(op, given, 4, "B, H, S, T", "probs")
    _rank(op, given, 4, "B, K, T, V", "v")
    (batch, heads, queries, keys), (v_batch, kv_heads, v_keys, value_dim) = given["probs"].shape, given["v"].shape
    _equal(op, "batch", probs=batch, v=v_batch)
    _equal(op, "keys", probs=keys, v=v_keys)
    _heads(op, heads, kv_heads)
    _head_dim(op, "v", value_dim)
    return {"batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "value_dim": value_dim}, set()


def _four_bit(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    sizes, features = (_dense if op == "qat_attention" else _packed)(op, given, options)
    _equal(op, "head dims", q=sizes["head_dim"], v=sizes["value_dim"])
    if sizes["head_dim"] not in _FOUR_BIT_HEAD_DIMS:
        raise ValueError(f"{op}: the head dim must be a multiple of 16 from 16 to 256; got {sizes['head_dim']}")
    return sizes, features


def _dense(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    _float(op, given, "q", "k", "v")
    _rank(op, given, 4, "B, H, S, D", "q")
    _rank(op, given, 4, "B, K, T, D", "k", "v")
    q, k, v = given["q"].shape, given["k"].shape, given["v"].shape
    _equal(op, "batch", q=q[0], k=k[0], v=v[0])
    _equal(op, "kv heads", k=k[1], v=v[1])
    _equal(op, "keys", k=k[2], v=v[2])
    _equal(op, "head dim", q=q[3], k=k[3])
    _heads(op, q[1], k[1])
    _head_dim(op, "q", q[3])
    _head_dim(op, "v", v[3])
    _positions(op, options, q_start=q[2], k_start=k[2])
    features = _used(options)
    if _boolean(op, given, "key_padding_mask", (q[0], k[2]), "B, T"):
        features.add("key_padding_mask")
    features |= {name for name in ("kv_lengths", "q_start", "k_start") if _integers(op, given, name, (q[0],), "B")}
    if _sinks(op, given, q[1]):
        features.add("sinks")
    if given.get("bias") is not None:
        _bias(op, given["bias"], (q[0], q[1], q[2], k[2]))
        features.add("bias")
    sizes = {"batch": q[0], "heads": q[1], "kv_heads": k[1], "queries": q[2], "keys": k[2], "head_dim": q[3], "value_dim": v[3]}
    return sizes, features


def _positions(op: str, options: Mapping[str, Any], **counts: int) -> None:
    """The last position from each start that is a number; one in an array is checked by who can read it."""
    for name, count in counts.items():
        start = options.get(name)
        if start is not None and count > 0 and start + count - 1 > _INT32_MAX:
            raise ValueError(f"{op}: positions must stay below 2**31; got {name}={start} with {count} rows")


def _bias(op: str, bias: ArrayInfo, full: tuple[int, ...]) -> None:
    if bias.dtype not in DTYPES:
        raise TypeError(
            f"{op}: bias has dtype {bias.dtype}; supported: {', '.join(DTYPES)} (a mask is key_padding_mask, or -inf in the bias)"
        )
    # no "size not in (1, axis)": torch.compile answers that without looking at the values of symbolic sizes
    if len(bias.shape) != 4 or any(size != 1 and size != axis for size, axis in zip(bias.shape, full, strict=True)):
        raise ValueError(f"{op}: bias must have shape [B|1, H|1, S|1, T|1] for [B, H, S, T] = {list(full)}; got {list(bias.shape)}")


def _packed(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    _float(op, given, "q", "k", "v")
    _rank(op, given, 3, "total, H, D", "q")
    _rank(op, given, 3, "total, K, D", "k", "v")
    q, k, v = given["q"].shape, given["k"].shape, given["v"].shape
    _equal(op, "packed keys", k=k[0], v=v[0])
    _equal(op, "kv heads", k=k[1], v=v[1])
    _equal(op, "head dim", q=q[2], k=k[2])
    _heads(op, q[1], k[1])
    _head_dim(op, "q", q[2])
    _head_dim(op, "v", v[2])
    offsets = given["cu_seqlens_q"].shape
    if len(offsets) != 1 or offsets[0] < 1:
        raise ValueError(f"{op}: cu_seqlens_q must have shape [segments + 1]; got {list(offsets)}")
    segments = offsets[0] - 1
    for name, size, axes in (
        ("cu_seqlens_q", segments + 1, "segments + 1"),
        ("cu_seqlens_k", segments + 1, "segments + 1"),
        ("seqlens_q", segments, "segments"),
        ("seqlens_k", segments, "segments"),
    ):
        _integers(op, given, name, (size,), axes)
    features = _used(options) | {name for name in ("seqlens_q", "seqlens_k") if given.get(name) is not None}
    if _sinks(op, given, q[1]):
        features.add("sinks")
    sizes = {"batch": segments, "heads": q[1], "kv_heads": k[1], "queries": q[0], "keys": k[0], "head_dim": q[2], "value_dim": v[2]}
    return sizes, features


def _joint(op: str, given: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    names = OPERATORS["joint_attention"].inputs
    _float(op, given, *names)
    _rank(op, given, 4, "B, H, S, D", *names)
    shapes = {name: given[name].shape for name in names}
    _equal(op, "batch", **{name: shape[0] for name, shape in shapes.items()})
    for part in ("q", "k", "v"):
        _equal(op, f"heads of {part}", **{f"{part}_{side}": shapes[f"{part}_{side}"][1] for side in ("txt", "img")})
    for side in ("txt", "img"):
        _equal(op, f"{side} length", **{f"{part}_{side}": shapes[f"{part}_{side}"][2] for part in ("q", "k", "v")})
    _equal(op, "kv heads", k=shapes["k_txt"][1], v=shapes["v_txt"][1])
    _equal(op, "head dim", **{name: shapes[name][3] for name in names if name[0] in "qk"})
    _equal(op, "value dim", v_txt=shapes["v_txt"][3], v_img=shapes["v_img"][3])
    q, k, v = shapes["q_txt"], shapes["k_txt"], shapes["v_txt"]
    _heads(op, q[1], k[1])
    _head_dim(op, "q", q[3])
    _head_dim(op, "v", v[3])
    total = q[2] + shapes["q_img"][2]
    features = {"prompt_mask"} if _boolean(op, given, "prompt_mask", (q[0], q[2]), "B, T_txt") else set()
    sizes = {"batch": q[0], "heads": q[1], "kv_heads": k[1], "queries": total, "keys": total, "head_dim": q[3], "value_dim": v[3]}
    return sizes, features


_CHECKS = {
    "joint_attn_qk_gemm": _qk_gemm,
    "joint_attn_softmax": _softmax,
    "joint_attn_av_gemm": _av_gemm,
    "attention": _dense,
    "attention_varlen": _packed,
    "qat_attention": _four_bit,
    "qat_attention_varlen": _four_bit,
    "joint_attention": _joint,
    "attn": _dense,
}
