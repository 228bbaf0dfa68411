"""Hypothesis strategies for calls: shapes, masks, options and values (ties, subnormals, -0, huge, NaN, infinities) of every operator.

Data are drawn through a seed, so an example is small and shrinks by shape and kind of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from attn_spec._arrays import from_float32
from attn_spec._backend import Call
from attn_spec._operators import DTYPES

__all__ = ["attention_calls", "calls", "gemm_calls", "joint_calls", "register_profiles", "softmax_calls", "values", "varlen_calls"]

HEAD_DIMS = (1, 3, 7, 20, 64, 72, 100)
RATIOS = ((1, 1), (2, 1), (4, 2), (3, 3), (6, 2))
KINDS = ("normal", "ties", "skewed", "special")
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, -1e-40, 3e38, -3e38, 1e-20)


def register_profiles(chosen: str | None = None) -> None:
    """Profiles ``attn-ci`` (the same examples on every machine) and ``attn-search`` (new ones at each run); loads the first unless one was
    chosen on the command line."""
    settings.register_profile("attn-ci", derandomize=True, deadline=None, max_examples=20, database=None)
    settings.register_profile("attn-search", deadline=None, max_examples=200, print_blob=True)
    settings.load_profile(chosen or "attn-ci")


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, kind: str) -> np.ndarray:
    """Data of one kind: "normal"; "ties", few mantissa bits, so that sums meet rounding ties; "skewed", one strong channel and row
    norms over four decades; "special", normal with a few of ``SPECIAL``."""
    data = rng.standard_normal(shape, dtype=np.float32)
    if kind == "ties":
        data = np.ldexp(rng.integers(-8, 9, shape).astype(np.float32), rng.integers(-12, 3, shape))
    elif kind == "skewed":
        data = data * np.float32(10) ** rng.uniform(-2, 2, (*shape[:-1], 1)).astype(np.float32)
        data[..., int(rng.integers(shape[-1]))] += np.float32(8)
    elif kind == "special" and data.size:
        count = min(3, data.size)
        data.reshape(-1)[rng.choice(data.size, count, replace=False)] = rng.choice(np.array(SPECIAL, np.float32), count)
    return from_float32(data, dtype)


def _rng(draw: st.DrawFn) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))


@st.composite
def attention_calls(draw: st.DrawFn, *, gradient: bool = True, most_keys: int = 300) -> Call:
    """``attention`` with any mix of its features."""
    rng, dtype, kind = _rng(draw), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    (heads, kv_heads), batch = draw(st.sampled_from(RATIOS)), draw(st.integers(1, 2))
    queries = draw(st.sampled_from((1, 2, 5)))
    keys = draw(st.one_of(st.integers(1, 20), st.sampled_from([n for n in (255, 256, 257, 300) if n <= most_keys] or [20])))
    head_dim, value_dim = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS))
    arrays: dict[str, np.ndarray] = {
        "q": values(rng, (batch, heads, queries, head_dim), dtype, kind),
        "k": values(rng, (batch, kv_heads, keys, head_dim), dtype, kind),
        "v": values(rng, (batch, kv_heads, keys, value_dim), dtype, kind),
    }
    options: dict[str, Any] = {"causal": draw(st.booleans()), "return_lse": True}
    used = draw(
        st.sets(st.sampled_from(("mask", "lengths", "q_start", "k_start", "window", "sinks", "bias", "scale", "dropout")), max_size=4)
    )
    if "mask" in used:
        arrays["key_padding_mask"] = rng.random((batch, keys)) < 0.7
    if "lengths" in used:
        arrays["kv_lengths"] = rng.integers(0, keys + 1, batch).astype(np.int32)
    if "q_start" in used:
        arrays["q_start"] = rng.integers(0, keys + 1, batch)
    if "k_start" in used:
        options["k_start"] = draw(st.sampled_from((1, 100, 255, 256)))
    if "window" in used:
        sides = st.sampled_from((None, 0, 1, 4, keys))
        options["window"] = (draw(sides), draw(sides))
    if "sinks" in used:
        arrays["sinks"] = values(rng, (heads,), "float32", draw(st.sampled_from(("normal", "special"))))
    if "bias" in used:
        shape = tuple(size if draw(st.booleans()) else 1 for size in (batch, heads, queries, keys))
        bias = rng.standard_normal(shape, dtype=np.float32)
        arrays["bias"] = from_float32(np.where(rng.random(shape) < 0.2, np.float32(-np.inf), bias), dtype)
    if "scale" in used:
        options["scale"] = draw(st.sampled_from((0.0, 1.0, -0.5, 0.3)))
    if "dropout" in used:
        options |= {"dropout_p": draw(st.sampled_from((0.1, 0.48, 1.0))), "dropout_seed": draw(st.integers(0, 2**64 - 1))}
    wrt = tuple(name for name in ("q", "k", "v", "sinks", "bias") if name in arrays) if gradient else ()
    shape = (batch, heads, queries)
    cotangents = (
        {"out": values(rng, (*shape, value_dim), dtype, "normal"), "lse": values(rng, shape, "float32", "normal")} if gradient else None
    )
    return Call("attention", arrays, options, cotangents, wrt)


@st.composite
def varlen_calls(draw: st.DrawFn, *, gradient: bool = True) -> Call:
    """``attention_varlen`` with empty segments, padded segments and trailing rows."""
    rng, dtype, kind = _rng(draw), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    (heads, kv_heads), head_dim = draw(st.sampled_from(RATIOS)), draw(st.sampled_from((1, 7, 20)))
    segments, trailing = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    sizes = {name: np.array([draw(st.integers(0, 9)) for _ in range(segments)], np.int64) for name in "qk"}
    totals = {name: int(size.sum()) + trailing for name, size in sizes.items()}
    arrays: dict[str, np.ndarray] = {
        "q": values(rng, (totals["q"], heads, head_dim), dtype, kind),
        "k": values(rng, (totals["k"], kv_heads, head_dim), dtype, kind),
        "v": values(rng, (totals["k"], kv_heads, head_dim), dtype, kind),
    }
    for name, size in sizes.items():
        arrays[f"cu_seqlens_{name}"] = np.concatenate([[0], np.cumsum(size)]).astype(np.int32)
    if draw(st.booleans()):
        arrays |= {f"seqlens_{name}": rng.integers(0, size + 1).astype(np.int32) for name, size in sizes.items()}
    if draw(st.booleans()):
        arrays["sinks"] = values(rng, (heads,), "float32", "normal")
    options = {"causal": draw(st.booleans()), "return_lse": True, "window": draw(st.sampled_from((None, (2, 0), (1, 1))))}
    wrt = tuple(name for name in ("q", "k", "v", "sinks") if name in arrays) if gradient else ()
    rows = totals["q"], heads, head_dim
    cotangents = (
        {"out": values(rng, rows, dtype, "normal"), "lse": values(rng, (heads, totals["q"]), "float32", "normal")} if gradient else None
    )
    return Call("attention_varlen", arrays, options, cotangents, wrt)


@st.composite
def softmax_calls(draw: st.DrawFn, *, gradient: bool = True) -> Call:
    """``joint_attn_softmax`` on rows around the tile edges, with and without padding."""
    rng, dtype = _rng(draw), draw(st.sampled_from(DTYPES))
    keys = draw(st.one_of(st.integers(1, 40), st.sampled_from((255, 256, 257, 511, 513, 700))))
    shape = (*draw(st.sampled_from(((2,), (1, 3), (2, 2, 1), (2, 0, 2)))), keys)
    scores = values(rng, shape, dtype, draw(st.sampled_from(KINDS)))
    if draw(st.booleans()):
        scores = from_float32(np.where(rng.random(shape) < 0.3, np.float32(-np.inf), rng.standard_normal(shape, dtype=np.float32)), dtype)
    arrays = {"scores": scores}
    if draw(st.booleans()):
        arrays["key_padding_mask"] = rng.random((shape[0], keys)) < draw(st.sampled_from((0.0, 0.5, 0.9)))
    cotangents = {"probs": values(rng, shape, dtype, "normal")} if gradient else None
    return Call("joint_attn_softmax", arrays, {}, cotangents, ("scores",) if gradient else ())


@st.composite
def gemm_calls(draw: st.DrawFn, *, gradient: bool = True) -> Call:
    """``joint_attn_qk_gemm`` or ``joint_attn_av_gemm``."""
    rng, dtype, kind = _rng(draw), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    (heads, kv_heads), batch = draw(st.sampled_from(RATIOS)), draw(st.integers(1, 2))
    queries, keys, width = draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from((1, 5, 33))), draw(st.sampled_from(HEAD_DIMS))
    if draw(st.booleans()):
        arrays = {
            "q": values(rng, (batch, heads, queries, width), dtype, kind),
            "k": values(rng, (batch, kv_heads, keys, width), dtype, kind),
        }
        options = {"out_dtype": draw(st.sampled_from(("float32", dtype))), "scale": draw(st.sampled_from((None, 0.3)))}
        op, out, out_dtype = "joint_attn_qk_gemm", "scores", str(options["out_dtype"])
    else:
        probs = values(rng, (batch, heads, queries, keys), draw(st.sampled_from(("float32", dtype))), kind)
        arrays = {"probs": probs, "v": values(rng, (batch, kv_heads, keys, width), dtype, kind)}
        op, out, out_dtype, options = "joint_attn_av_gemm", "out", dtype, {}
    shape = (batch, heads, queries, keys if out == "scores" else width)
    cotangents = {out: values(rng, shape, out_dtype, "normal")} if gradient else None
    return Call(op, arrays, options, cotangents, tuple(arrays) if gradient else ())


@st.composite
def joint_calls(draw: st.DrawFn, *, gradient: bool = True) -> Call:
    """``joint_attention`` with prompt padding."""
    rng, dtype, kind = _rng(draw), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    (heads, kv_heads), batch, head_dim = draw(st.sampled_from(RATIOS)), draw(st.integers(1, 2)), draw(st.sampled_from((1, 7, 20, 64)))
    sizes = {"txt": draw(st.integers(0, 6)), "img": draw(st.sampled_from((1, 4, 9)))}
    arrays: dict[str, np.ndarray] = {
        f"{part}_{side}": values(rng, (batch, heads if part == "q" else kv_heads, size, head_dim), dtype, kind)
        for side, size in sizes.items()
        for part in ("q", "k", "v")
    }
    wrt = tuple(arrays) if gradient else ()
    if draw(st.booleans()):
        arrays["prompt_mask"] = rng.random((batch, sizes["txt"])) < 0.6
    cotangents = {f"out_{side}": values(rng, (batch, heads, size, head_dim), dtype, "normal") for side, size in sizes.items()}
    return Call("joint_attention", arrays, {}, cotangents if gradient else None, wrt)


def calls(*, gradient: bool = True) -> st.SearchStrategy[Call]:
    """A call of any operator of the contracts."""
    kinds = (attention_calls, varlen_calls, softmax_calls, gemm_calls, joint_calls)
    return st.one_of([kind(gradient=gradient) for kind in kinds])
