"""Cases, arrays and contenders that the JAX benchmarks share: attention forward, and forward with gradients, as compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attn_jax_rocm_sink import attention

__all__ = ["Case", "arrays_of", "backward_of", "forward_of", "largest_difference", "ours", "theirs"]

Arrays = dict[str, jax.Array]
Contender = Callable[[Arrays], jax.Array]


@dataclass(frozen=True)
class Case:
    """One shape; ``window`` counts keys besides the diagonal one. With ``sinks`` there is no peer: JAX's own attention takes none."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    contract: str | None = None

    def __str__(self) -> str:
        more = [
            *(["causal"] if self.causal else []),
            *([f"window {self.window}"] if self.window else []),
            *(["sinks"] if self.sinks else []),
            *([self.contract] if self.contract else []),
        ]
        return " ".join([f"B{self.batch} H{self.heads}/{self.kv_heads} S{self.length} D{self.head_dim} {self.dtype}", *more])


def arrays_of(case: Case, seed: int = 0) -> Arrays:
    """Standard normal q, k, v and dout [B, H, S, D], and sinks [H]."""
    keys = jax.random.split(jax.random.key(seed), 5)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.heads}
    found = {
        name: jax.random.normal(key, (case.batch, count, case.length, case.head_dim), jnp.dtype(case.dtype))
        for key, (name, count) in zip(keys, heads.items(), strict=False)
    }
    return found | ({"sinks": jax.random.normal(keys[4], (case.heads,))} if case.sinks else {})


def ours(case: Case, engine: str) -> Contender:
    window = None if case.window is None else (case.window, 0)
    return lambda arrays: attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        causal=case.causal,
        window=window,
        sinks=arrays.get("sinks"),
        contract=case.contract,
        engine=engine,
    )


def theirs(case: Case, implementation: str) -> Contender:
    """``jax.nn.dot_product_attention`` on the same arrays, [B, S, H, D] inside. It knows no sinks."""
    window = None if case.window is None else (case.window, 0)

    def run(arrays: Arrays) -> jax.Array:
        q, k, v = (jnp.swapaxes(arrays[name], 1, 2) for name in ("q", "k", "v"))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, local_window_size=window, implementation=implementation)
        return jnp.swapaxes(out, 1, 2)

    return run


def forward_of(contender: Contender, arrays: Arrays) -> Callable[[], Any]:
    program = jax.jit(contender).lower(arrays).compile()
    return lambda: program(arrays)


def backward_of(contender: Contender, arrays: Arrays) -> Callable[[], Any]:
    """Forward and the gradients of q, k, v (and sinks) in one program."""

    def run(arrays: Arrays) -> Any:
        moving = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}
        out, pullback = jax.vjp(lambda part: contender({**arrays, **part}), moving)
        return out, pullback(arrays["dout"])[0]

    program = jax.jit(run).lower(arrays).compile()
    return lambda: program(arrays)


def largest_difference(found: Any, expected: Any) -> float:
    """Of any output, beside the largest expected value of that output."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        left, right = (np.asarray(array, dtype=np.float64) for array in (a, b))
        worst = max(worst, float(np.abs(left - right).max() / max(np.abs(right).max(), 1e-30)))
    return worst
